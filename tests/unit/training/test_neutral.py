"""Evaluating, logging, loading in workers, saving and profiling do not change what is learned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpc_trainer.runtime.rank_group import RankGroup
from tests.unit.training.world_child import compose, play

BASE = ["experiment=digits", "train.num_steps=12", "train.global_batch_size=16", "monitor.log_every_steps=50",
        "train.eval_every_steps=0", "checkpoint.every_steps=1000", "train.ema_decay=0.9"]  # fmt: skip
MODELS = {
    "dropout": ["model=mlp", "model.hidden_dim=16", "model.dropout=0.3", "data.max_shift=1", "precision=bf16"],
    "batch_norm": ["model=resnet18", "model.width=2", "data=synthetic_images", "data.num_samples=64",
                   "data.num_eval=20", "data.image_size=8", "train.grad_accum_steps=2"],
    "logical": ["model=mlp", "model.hidden_dim=16", "model.dropout=0.3", "train.logical_ranks=2"],
    "draws": ["model=custom", "model._target_=tests.unit.training.drawing.DrawingNet", "data=custom",
              "data._target_=tests.unit.training.drawing.DrawingDigits"],
}  # fmt: skip
CHANGES = [
    ["train.eval_every_steps=3"], ["monitor.log_every_steps=1"], ["data.num_workers=2"], ["checkpoint.every_steps=2"],
    ["train.eval_every_steps=1", "monitor.log_every_steps=2", "data.num_workers=1"], ["profiler"],
    ["monitor.profile_warmup_steps=3", "monitor.profile_steps=4"],
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _global_switches() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the worker does: several on a busy machine wait for each other
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def _final_state(folder: Path, words: list[str]) -> bytes:
    with contextlib.ExitStack() as stack:
        if "profiler" in words:
            words = [word for word in words if word != "profiler"]
            activities = [torch.profiler.ProfilerActivity.CPU]
            stack.enter_context(torch.profiler.profile(activities=activities))
        assert play(compose(words, 1), folder, RankGroup(), 0, None) == "done"
    return (folder / "checkpoints" / "step-00000012" / "state.safetensors").read_bytes()


@pytest.fixture(scope="module", params=MODELS)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    words = [*BASE, *MODELS[request.param]]
    return words, _final_state(tmp_path_factory.mktemp("undisturbed") / "run", words)


@pytest.mark.few(5)
@pytest.mark.parametrize("changes", CHANGES, ids=" ".join)
def test_looking_changes_no_bit(tmp_path: Path, undisturbed: tuple[list[str], bytes], changes: list[str]) -> None:
    words, expected = undisturbed
    assert _final_state(tmp_path / "run", [*words, *changes]) == expected


def test_another_seed_does_change_it(tmp_path: Path, undisturbed: tuple[list[str], bytes]) -> None:
    words, expected = undisturbed
    assert _final_state(tmp_path / "run", [*words, "seed=1"]) != expected
