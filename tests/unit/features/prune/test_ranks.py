"""Pruning on two ranks: DDP and FSDP2, the threshold over all parts, and the same bits after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.seeds import chosen_seed
from tests.unit.training.ranks import two_ranks_say

pytestmark = [pytest.mark.dist, pytest.mark.long, pytest.mark.timeout(600)]
BASE = [
    "experiment=digits", "train.num_steps=6", "monitor.log_every_steps=1", "train.global_batch_size=16",
    "checkpoint.every_steps=1000",
    "schedule.warmup_steps=0", "optim.lr=0.01", "prune.start_step=1", "prune.end_step=5", "prune.every_steps=2",
]  # fmt: skip
GLOBAL = ("prune.method=unstructured", "prune.scope=global", "prune.sparsity=0.7", "train.ema_decay=0.9")
RUNS = {
    "ddp": [*BASE, "model=cnn", *GLOBAL],
    "fsdp": [*BASE, "model=cnn", "parallel=fsdp", *GLOBAL],
    "fsdp_n_m": [*BASE, "model=mlp", "model.hidden_dim=20", "parallel=fsdp", "prune.method=n_m"],
    "fsdp_channels": [*BASE, "model=cnn", "parallel=fsdp", "prune.method=channels", "prune.scope=global"],
}
CUT = ["ddp", "fsdp", "fsdp_channels"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prune")
    (path / "jobs.json").write_text(json.dumps({"seed": chosen_seed(), "runs": RUNS, "cut": CUT}))
    said = two_ranks_say(Path(__file__).with_name("ranks_child.py"), path)
    (path / "said.json").write_text(json.dumps(said))
    return path


def _last(folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder / "checkpoints", group=RankGroup(), keep_last=9, attempt=0, read_only=True)
    info = store.newest_valid(6)
    assert info is not None
    found: dict[str, Any] = store.load(info)[0]["objects"]
    return found


def test_parts_have_the_threshold_of_the_whole_also_among_equal_weights(folder: Path) -> None:
    said = json.loads((folder / "said.json").read_text())
    assert [each["rows"] for each in said] == [[3, 1, 4, 4], [2, 0, 3, 4]]
    assert [each["wrong"] for each in said] == [[], []]


@pytest.mark.parametrize("name", CUT)
def test_a_resumed_run_has_the_same_bits(folder: Path, name: str) -> None:
    files = [
        {path.name: path.read_bytes() for path in (folder / name / which / "checkpoints" / "step-00000006").iterdir()}
        for which in ("whole", "cut")
    ]
    for each in files:
        del each["manifest.json"]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_all_parts_together_are_as_sparse_as_asked_for(folder: Path, name: str) -> None:
    found = _last(folder / name / "whole")
    pruned = found["prune"]["pruned"]
    assert sum(int(each.sum()) for each in pruned.values()) == round(
        0.7 * sum(each.numel() for each in pruned.values())
    )
    for key, each in pruned.items():
        assert not found["model"][key][each].any()
        assert not found["ema"][f"module.{key}"][each].any()
        assert found["model"][key][~each].all()


def test_of_each_four_weights_two_are_zero_in_all_parts(folder: Path) -> None:
    weights = [each for each in _last(folder / "fsdp_n_m" / "whole")["model"].values() if each.ndim > 1]
    assert len(weights) == 3
    for weight in weights:
        assert (weight.reshape(-1, 4) == 0).sum(1).eq(2).all()


def test_channels_are_zero_in_all_parts(folder: Path) -> None:
    model = _last(folder / "fsdp_channels" / "whole")["model"]
    gone = {name: (model[f"{name}.weight"] == 0).flatten(1).all(1) for name in ("features.0", "features.4")}
    assert sum(int(each.sum()) for each in gone.values()) == 48, "6 of 12 units of 8"
    for conv, norm in (("features.0", "features.1"), ("features.4", "features.5")):
        assert not model[f"{norm}.bias"][gone[conv]].any()
        assert not model[f"{norm}.weight"][gone[conv]].any()
        assert model[f"{norm}.weight"][~gone[conv]].all()
