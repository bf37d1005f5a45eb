"""The probe of a run of `verify resume`: a line a step that names every tensor, and the interruption at its step."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import read_lines
from hpc_trainer.runtime.rank_env import PROBE_VARIABLE, read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.verify.interruptions import Interruption, environment
from hpc_trainer.verify.probe import Probe, ProbedRun
from hpc_trainer.worker.attempt import find_replacements
from tests.unit.record.builders import make_config


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.calls = 0
        self.recent: deque[float] = deque([1.5])

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs)


def _run(folder: Path, attempt: int = 0) -> RunContext:
    paths, group = RunPaths(folder), RankGroup()
    folder.mkdir(mode=0o700, exist_ok=True)
    Journal(paths).start(
        attempt, job_id=f"j{attempt}", restart_count=0, node="n", pid=os.getpid(), executor="local", world_size=1
    )
    return find_replacements(make_config()).context(
        paths=paths, env=read_rank_env({}), group=group, stop=StopFlag(), attempt=attempt, num_steps=9,
        store=CheckpointStore(paths.checkpoints, group=group, keep_last=2, attempt=attempt),
    )  # fmt: skip


def _lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(RunPaths(folder).trace(0)) if line["kind"] == kind]


def test_a_run_that_nobody_verifies_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROBE_VARIABLE, raising=False)
    assert type(_run(tmp_path / "run")) is RunContext


def test_each_line_names_what_a_checkpoint_would_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in environment([]).items():
        monkeypatch.setenv(variable, value)
    folder, model, draws = tmp_path / "run", Net(), torch.Generator().manual_seed(1)
    run = _run(folder)
    assert isinstance(run, ProbedRun)
    run.restore(model=model, draws=draws, best=None)
    for step in (1, 2):
        model(torch.full((1, 2), float(step)))
        model.eval()(torch.ones(1, 2))
        model.train()
        torch.rand(1, generator=draws)
        model.calls += 1
        run.log(step, {"x": step})
        run.heartbeat(step)
    run.save(2, model=model, draws=draws, best=0.5)

    first, second = (line["leaves"] for line in _lines(folder, "step"))
    assert {"inputs", "model.layer.weight", "model.layer.bias", "draws", "random.torch"} <= first.keys()
    assert not any(name.startswith("best") for name in first), "it is not what it was when restore got it"
    assert {name for name in first if first[name] != second[name]} == {"inputs", "draws"}
    (began,), (saved,) = _lines(folder, "began"), _lines(folder, "saved")
    assert (began["leaves"]["loose.model.calls"], saved["leaves"]["loose.model.calls"]) == ("0", "2")
    assert saved["leaves"]["loose.model.recent.0"] == "1.5"
    assert "loose-buffer.model.scratch" in saved["leaves"]
    assert not any("training" in name or "_parameters" in name for name in saved["leaves"])
    assert saved["leaves"]["best"] == "0.5"

    again, model = _run(folder, 1), Net()
    again.restore(model=model, draws=torch.Generator(), best=None)
    restored = _lines(folder, "restored")[-1]["leaves"]
    assert restored == {name: text for name, text in saved["leaves"].items() if not name.startswith("loose")}


class Bag:
    """A person's own object, with everything that may be in one."""

    def __init__(self, model: nn.Module) -> None:
        self.n, self.model, self.me, self.kind = 3, model, self, Bag
        self.draws, self.numpy_draws = random.Random(1), np.random.RandomState(1)
        self.counter = itertools.count(5)
        self.cycle: list[Any] = []
        self.cycle.append(self.cycle)
        self.weights = list(model.parameters())
        self.teacher = nn.Linear(1, 1, bias=False)
        self.group = torch.optim.SGD(self.teacher.parameters(), lr=0.1)
        self.deep, self.too_deep = Slots(Slots(7)), Slots(Slots(Slots(7)))
        self.no_memory = torch.empty(2, device="meta")
        self.many = Slots(list(range(100_000)))


class Slots:
    """No __dict__."""

    __slots__ = ("unset", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


def test_what_a_model_keeps_in_objects_of_its_own_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in environment([]).items():
        monkeypatch.setenv(variable, value)
    folder, model = tmp_path / "run", Net()
    bag = Bag(model)
    model.bag, model.after = bag, Slots(1)  # type: ignore[assignment]
    run = _run(folder)
    run.restore(model=model)
    run.save(1, model=model)
    bag.n += 1
    bag.draws.random()
    bag.numpy_draws.normal()
    next(bag.counter)
    with torch.no_grad():
        bag.teacher.weight += 1
    bag.deep.value.value = 8
    run.save(2, model=model)
    one, two = (line["leaves"] for line in _lines(folder, "saved"))
    begin = "loose.model.bag."
    changed = {name.removeprefix(begin).partition(".")[0] for name in one if one[name] != two[name]}
    assert changed == {"n", "draws", "numpy_draws", "counter", "teacher", "deep"}
    assert (one[f"{begin}deep.value.value"], two[f"{begin}deep.value.value"]) == ("7", "8")
    assert f"{begin}too_deep.value.value.value" not in one
    assert not any(".weights." in name or ".me." in name or ".group" in name for name in one)
    assert len(one) < 1_100, "not without end"
    assert one["loose.model.after.value"] == "1", "and each attribute by itself"


def test_a_compiled_model_has_a_beginning_too(tmp_path: Path) -> None:
    """No hook may look at its forward passes, which would break its graph."""
    model = Net()
    model.calls = 4
    probe = Probe(RunPaths(tmp_path), 0, 1, [], sees_inputs=False)
    probe.restored({"model": model}, 3)
    (began,) = _lines(tmp_path, "began")
    assert (began["step"], began["leaves"]["loose.model.calls"]) == (3, "4")
    model(torch.ones(1, 2))
    assert len(_lines(tmp_path, "began")) == 1


@pytest.fixture
def heard() -> Iterator[threading.Event]:
    event = threading.Event()
    before = signal.signal(signal.SIGUSR2, lambda *_: event.set())
    yield event
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(("rank", "attempt", "comes"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_the_interruption_comes_to_its_rank_in_its_attempt(
    tmp_path: Path, heard: threading.Event, rank: int, attempt: int, comes: bool
) -> None:
    plan = [Interruption(step=3, number=signal.SIGUSR2, fraction=0.0, rank=rank)]
    probe = Probe(RunPaths(tmp_path), 0, attempt, plan)
    probe.restored({}, 0)
    for step in (1, 2):
        probe.saw(step)
    assert not heard.wait(0.05)
    probe.saw(4)
    assert heard.wait(10.0 if comes else 0.2) is comes
