"""train.micro_batch_size=auto finds what fits, leaves no trace, and stays with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hpc_trainer.config.mesh import divisors
from hpc_trainer.errors import ConfigError, TooLargeError
from hpc_trainer.features.memory import search as fit_batch
from hpc_trainer.features.memory.estimate import estimate
from hpc_trainer.features.memory.search import largest
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.metrics import SPEED
from hpc_trainer.record.reading import read_json, read_lines
from hpc_trainer.runtime.devices import is_out_of_memory
from hpc_trainer.training.context import RunContext
from tests import warm
from tests.journals import JOURNALS
from tests.unit.training.ranks import two_ranks_say
from tests.unit.training.train_here import config_of, saved_bytes, train_here
from tests.unit.training.world_child import compose

AUTO = "train.micro_batch_size=auto"
# Batch norm, dropout, augmentation, an average: all that a forward pass draws or moves.
WORDS = (
    "model=resnet18", "model.width=8", "data=synthetic_images", "data.image_size=8", "data.num_samples=100",
    "data.num_eval=20", "train.global_batch_size=24", "train.num_steps=6", "train.ema_decay=0.9",
    "monitor.log_every_steps=1",
)  # fmt: skip


class Room:
    """A probe of a device on which `most` samples fit."""

    counts = True

    def __init__(self, most: int) -> None:
        self.most, self.tried, self.trials = most, list[int](), list[fit_batch.Trials]()

    def limit(self) -> int:
        return 10**12

    def held(self) -> int:
        return 0

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        run()
        return 0

    def clear(self) -> None: ...


@pytest.fixture(autouse=True)
def _warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What estimates is a process of its own: it is forked here."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", warm.execute_child)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    room = Room(8)
    monkeypatch.setattr(fit_batch, "probe_of", lambda device, hardware: room)
    passes = fit_batch.Trials._pass

    def limited(trials: Any, size: int) -> None:
        room.tried.append(size)
        room.trials.append(trials)
        passes(trials, size)  # really: its traces are what the tests look for
        if size > room.most:
            raise torch.OutOfMemoryError("CUDA out of memory. (test)")

    monkeypatch.setattr(fit_batch.Trials, "_pass", limited)
    return room


@pytest.mark.parametrize("count", [1, 2, 7, 60, 64, 97, 720])
def test_the_search_finds_the_largest_in_few_trials(count: int) -> None:
    sizes = divisors(count)
    assert sizes == [size for size in range(1, count + 1) if count % size == 0]
    for most in range(count + 2):
        tried: list[int] = []

        def fits(size: int, most: int = most, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= most

        assert largest(sizes, fits) == max((size for size in sizes if size <= most), default=None)
        assert len(tried) == len(set(tried)) <= 2 * count.bit_length()
        doubled = min((size for size in sizes if size >= 2 * most), default=count)
        assert max(tried) <= doubled, "nothing is tried beyond the double of what fits, where there is such a size"


def _metrics(run: RunContext) -> list[dict[str, Any]]:
    return [{key: line[key] for key in line if key not in ("time", *SPEED)} for line in read_lines(run.paths.metrics)]


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [(), ("model=cnn", "model.dropout=0.2")],
    ids=["norms", "dropout"],
)
def test_it_is_the_run_that_was_given_the_size(more: tuple[str, ...], room: Room, tmp_path: Path) -> None:
    words = [*(word for word in WORDS if not more or "model" not in word), *more]
    given = train_here(config_of(*words, "train.micro_batch_size=8"), tmp_path / "given")
    found = train_here(config_of(*words, AUTO), tmp_path / "found")
    assert room.tried == [1, 2, 4, 8, 24, 12]
    assert saved_bytes(found) == saved_bytes(given)
    assert _metrics(found) == _metrics(given)
    (step,) = found.paths.checkpoints.glob("step-*6")
    manifest = read_json(step / "manifest.json") or {}
    assert manifest["meta"]["made_with"]["fit"] == {"micro_batch_size": 8, "grad_accum_steps": 3}
    assert [each["micro_batch_size"] for _, each in Journal(found.paths).fits()] == [8]


@pytest.mark.long
def test_an_update_that_needs_more_than_a_small_batch_counts(room: Room, tmp_path: Path) -> None:
    """Newton-Schulz of muon, beside short sequences; a pass of the probe here needs nothing."""
    words = ["model=gpt", "data=text_bytes", "model.num_layers=2", "model.num_heads=2", "model.embed_dim=128"]
    words += ["data.seq_len=4", "optim=muon", "train.global_batch_size=4", "train.num_steps=1"]
    words += ["data.path=tests/text.txt"]
    found = estimate(config_of(*words, "train.micro_batch_size=2"))
    assert found.update > 0
    train_here(config_of(*words, AUTO), tmp_path / "run")
    (needs,) = {tuple(trials.needs.values()) for trials in room.trials}
    held = found.optimizer + found.average + found.gathered
    assert set(needs) == {held + found.gradients + found.activations + found.update}


@pytest.mark.long
def test_a_trial_begins_with_the_gradients_that_its_step_would_have(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step has several micro-batches, all but the first find gradients there: 4 bytes a weight."""
    seen: dict[int, bool] = {}
    batch = fit_batch.Trials._batch

    def looked_at(trials: Any, size: int) -> Any:
        weights = [weight for weight in trials.loss.parameters() if weight.requires_grad]
        if any(weight.grad is not None for weight in weights):
            seen[size] = all(weight.grad is not None for weight in weights)
        return batch(trials, size)

    monkeypatch.setattr(fit_batch.Trials, "_batch", looked_at)
    room.most = 24
    train_here(config_of(*WORDS, AUTO, "train.num_steps=1"), tmp_path / "run")
    assert room.tried == [1, 2, 4, 8, 24]
    assert seen == {1: True, 2: True, 4: True, 8: True}, "24 samples are the whole step"


@pytest.mark.long
def test_a_resume_keeps_what_was_found(room: Room, tmp_path: Path) -> None:
    config = config_of(*WORDS, AUTO)
    whole = train_here(config, tmp_path / "whole")
    train_here(config, tmp_path / "parts", stop_at=3)
    room.most, room.tried = 24, []
    resumed = train_here(config, tmp_path / "parts", attempt=1)
    assert room.tried == []
    assert resumed.contract.changes == []
    assert saved_bytes(resumed) == saved_bytes(whole)


@pytest.mark.long
def test_another_device_is_searched_anew_and_memory_that_ended_means_less(room: Room, tmp_path: Path) -> None:
    config = config_of(*WORDS, AUTO)
    train_here(config, tmp_path, stop_at=2, cause="out_of_memory")
    room.most, room.tried = 24, []
    run = train_here(config, tmp_path, attempt=1, stop_at=4)
    assert max(room.tried) == 6, "smaller than the 8 that were too many"
    assert run.contract.changes == [
        "changes-the-schedule: fit.grad_accum_steps: 3 -> 4", "changes-the-schedule: fit.micro_batch_size: 8 -> 6",
    ]  # fmt: skip
    room.tried = []
    for path in run.paths.folder.glob(JOURNALS):
        lines = [json.dumps(record).replace('["cpu"]', '["NVIDIA H200"]') for record in read_lines(path)]
        path.write_text("".join(f"{line}\n" for line in lines))
    train_here(config, tmp_path, attempt=2)
    assert room.tried[-1] == 24


@pytest.mark.long
def test_a_model_that_takes_no_single_sample_begins_with_two(room: Room, tmp_path: Path) -> None:
    """Batch norm over 1 x 1 pixels, as resnet18 has for images of 8 pixels, refuses a batch of one."""
    config = config_of(*WORDS, AUTO)
    room.most = 2
    run = train_here(config, tmp_path, stop_at=2)
    assert room.tried == [1, 2, 4, 3]
    assert [each["micro_batch_size"] for _, each in Journal(run.paths).fits()] == [2]


def test_nothing_fits(room: Room, tmp_path: Path) -> None:
    room.most = 0
    with pytest.raises(TooLargeError, match=r"not even 2 sample\(s\) fit") as caught:
        train_here(config_of(*WORDS, AUTO), tmp_path)
    assert is_out_of_memory(caught.value)


def test_an_error_of_the_model_is_not_taken_for_memory(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(trials: Any, size: int) -> None:
        raise ValueError("a shape that does not fit")

    monkeypatch.setattr(fit_batch.Trials, "_pass", broken)
    with pytest.raises(ConfigError, match="ValueError: a shape that does not fit"):
        train_here(config_of(*WORDS, AUTO), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("task", ["Fit", "OwnCrossEntropy"])
def test_no_rank_enters_a_mode_of_fake_tensors(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep copy of a fake tensor, as torchmetrics makes, frees memory twice (runtime/own_process.py)."""
    entered: list[str] = []
    enter = FakeTensorMode.__enter__

    def seen(mode: FakeTensorMode) -> FakeTensorMode:
        entered.append("".join(traceback.format_stack(limit=8)))
        return enter(mode)

    monkeypatch.setattr(FakeTensorMode, "__enter__", seen)
    parts = "tests.unit.training.task_parts."
    padded = "tests.unit.training.data.padded_parts."
    words = ["experiment=digits", "task=custom", f"task._target_={parts}{task}", "model=custom", "data=custom",
             "schedule.warmup_steps=0", "train.num_steps=2", "train.global_batch_size=4", AUTO]  # fmt: skip
    fit = [f"model._target_={parts}TwoInputs", f"data._target_={parts}pairs"]
    own = [f"model._target_={padded}Net", f"data._target_={padded}padded"]
    train_here(compose([*words, *(fit if task == "Fit" else own)], 1), tmp_path)
    assert entered == []


@pytest.mark.long
def test_a_limit_of_the_operating_system_is_heard(tmp_path: Path) -> None:
    """The allocator's own error under RLIMIT_AS, in a process of its own."""
    # Each tensor in a mapping of its own: holes in glibc's heap count too, and made the step after the search end in a
    # third of the runs (mallopt(3): MALLOC_MMAP_THRESHOLD_, MALLOC_ARENA_MAX).
    heap = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fit_child.py")), str(tmp_path)], capture_output=True, text=True,
        timeout=250, check=False, env={**os.environ, **heap},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    journal = next(iter(tmp_path.rglob(JOURNALS)))
    (found,) = [each["found"] for each in read_lines(journal) if each["event"] == "fit"]
    assert 2 <= found["micro_batch_size"] < 512, found


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("strategies", ["ddp", "fsdp"])
def test_memory_that_ends_on_one_rank_in_the_backward_pass_hangs_nobody(strategies: str, tmp_path: Path) -> None:
    (tmp_path / "strategies").write_text(strategies)
    for each in two_ranks_say(Path(__file__).with_name("fit_ranks_child.py"), tmp_path, timeout_s=280):
        # Rank 1 ends in the backward pass of more than 4 samples, rank 0 of more than 8.
        assert each[strategies] == {"micro_batch_size": 4, "grad_accum_steps": 4, "eval_batch_size": 256}
        # Of 8 samples only rank 1's passes end early: rank 0 is told, and never comes to 16.
        assert each["ended"] == (["backward"] if each["rank"] else [])
        assert each["as_given"], "the same bits as with train.micro_batch_size=4"
