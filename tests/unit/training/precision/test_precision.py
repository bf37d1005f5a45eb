"""Each precision in the shared loop: its format is at work in steps and evaluations, and it learns what fp32 learns."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.features.float8 import float8
from hpc_trainer.features.float8.float8 import use_float8
from hpc_trainer.models.gpt import Gpt
from tests.unit.training.train_here import config_of, train_here

_NUM_STEPS = 16
_WORDS = ["model=gpt", "model.num_layers=2", "model.num_heads=2", "model.embed_dim=32", "data=synthetic_tokens",
          "data.vocab_size=64", "data.seq_len=16", "data.num_samples=256", "data.num_eval=20", "optim.lr=1e-2",
          f"train.num_steps={_NUM_STEPS}", "train.global_batch_size=8", "train.grad_accum_steps=2",
          "train.max_grad_norm=1.0", "train.compile=false", "train.eval_every_steps=8", "monitor.log_every_steps=1",
          "checkpoint.every_steps=100"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _global_switches() -> Iterator[None]:
    tf32, threads = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


@contextlib.contextmanager
def _formats_of_logits() -> Iterator[set[tuple[bool, torch.dtype]]]:
    """(whether it was a step, format) of all that comes out of the model meanwhile."""
    seen: set[tuple[bool, torch.dtype]] = set()

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, Gpt):
            seen.add((module.training, output.dtype))

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def _curves(folder: Path, dtype: Dtype) -> tuple[list[float], list[float], set[tuple[bool, torch.dtype]]]:
    """Losses of the steps and of the evaluations, and the formats of their logits."""
    config = config_of(*_WORDS)
    config.precision.compute_dtype = dtype  # after the rules, which refuse what needs a GPU to be faster
    config.precision.init_scale = 256.0  # of fp16 alone; no step of it is skipped with that
    with _formats_of_logits() as formats:
        run = train_here(config, folder)
    lines = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    losses, evaluated = ([line[key] for line in lines if key in line] for key in ("loss", "eval_loss"))
    assert (len(losses), len(evaluated)) == (_NUM_STEPS, _NUM_STEPS // 8)
    return losses, evaluated, formats


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    losses, evaluated, formats = _curves(tmp_path_factory.mktemp("fp32") / "run", Dtype.fp32)
    assert formats == {(True, torch.float32), (False, torch.float32)}
    assert losses[-1] < 0.95 * losses[0], "it learns"
    return losses, evaluated


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("dtype", "format_", "tolerance"),
    [
        (Dtype.fp32, torch.float32, 0.0),
        (Dtype.tf32, torch.float32, 0.0),  # a CPU has no such unit: the same bits
        (Dtype.bf16, torch.bfloat16, 1e-3),
        (Dtype.fp16, torch.float16, 1e-4),
        (Dtype.fp8, torch.bfloat16, 2e-2),
    ],
)
def test_it_learns_what_fp32_learns_in_its_own_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: tuple[list[float], list[float]], dtype: Dtype,
    format_: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    if dtype is Dtype.fp8:
        pytest.importorskip("torchao.float8", reason="torchao is not installed (the extra `quantize`)")
        monkeypatch.setattr(float8, "use_float8", functools.partial(use_float8, emulate=True))
    losses, evaluated, formats = _curves(tmp_path / "run", dtype)
    assert formats == {(True, format_), (False, format_)}
    assert (losses == reference[0]) == (evaluated == reference[1]) == (tolerance == 0), "another rounding, or the same"
    assert losses == pytest.approx(reference[0], rel=tolerance)
    assert evaluated == pytest.approx(reference[1], rel=tolerance)
