"""A byte-level GPT on Python's own library as tokens: bits a byte on files that it never saw (docs/benchmarks/)."""

from __future__ import annotations

import hashlib
import json
import math
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hpc_trainer.data.tokens.files import write_tokens

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

BUDGET_BITS, NUM_STEPS = 2.2, 2500
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_END = 256


def write_library(folder: Path) -> int:
    """The .py files of the standard library without its tests: one of 20, by the SHA-256 of its name, is held out.

    Returns the bytes of all.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(library) for path in library.rglob("*.py"))
    files = sorted(name.as_posix() for name in names if not _NOT_LIBRARY & set(name.parts))
    size = 0
    for split in ("train", "eval"):
        mine = [name for name in files if _is_held_out(name) == (split == "eval")]
        documents = (np.frombuffer((library / name).read_bytes(), dtype=np.uint8) for name in mine)
        size += write_tokens(folder / split, documents, vocab_size=257, end_of_document=_END).num_tokens - len(mine)
    return size


def _is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 20 == 0


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_a_gpt_learns_the_library(local: LocalDriver, tmp_path: Path) -> None:
    assert write_library(tmp_path / "library") >= 5_000_000
    words = (
        "train", "--json", "model=gpt", "model.num_layers=4", "model.embed_dim=128", "data=tokens",
        f"data.path={tmp_path}/library", "data.seq_len=256", "train.global_batch_size=8",
        f"train.num_steps={NUM_STEPS}", "train.eval_every_steps=0", "optim=muon", "optim.lr=3e-3", "schedule=cosine",
        "schedule.warmup_steps=50", "task=language_model", "cluster=local", "hardware=cpu_x1",
        "hardware.time_limit_min=120", "checkpoint.every_steps=500", "sweep_name=library",
    )  # fmt: skip
    result = json.loads(local.run(*words, timeout_s=3 * 3600).stdout)
    assert result["metrics"]["eval_loss"] / math.log(2) <= BUDGET_BITS
