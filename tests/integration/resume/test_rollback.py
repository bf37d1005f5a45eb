"""Rollbacks: the run goes back, and past the bad batches; interrupted before or after, it has the same bits.

In one process and on one rank; two ranks through five interruptions are the cell `rollback` of the resume matrix.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import DivergedError
from hpc_trainer.record.checkpoint_folders import committed
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import read_lines
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import Outcome
from hpc_trainer.training.contract import ResumeContract
from hpc_trainer.verify.probe import Probe, ProbedRun
from hpc_trainer.verify.resume import Trace, first_difference, other_files, other_metrics, read_trace
from hpc_trainer.worker.attempt import process_group, run_main
from tests.composed import composed
from tests.integration.resume_matrix.cells import CELLS, NUM_STEPS, overrides
from tests.journals import journal_records

_ENV = read_rank_env(
    {"TORCHELASTIC_RUN_ID": "t", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
)
_CELL = next(cell for name, cell in CELLS.items() if name.endswith("-rollback"))


class _Killed(BaseException):
    """The rank is gone: nothing is saved."""


@dataclass(slots=True, kw_only=True)
class _CountedRun(ProbedRun):
    """Is gone, or asked to stop, when so many steps are done, those that are done again counted again."""

    end: int | None = None
    is_kill: bool = False
    done: list[int] = field(default_factory=list)

    def saw(self, step: int) -> None:
        ProbedRun.saw(self, step)
        if not self.done or self.done[-1] != step:
            self.done.append(step)
        if self.end is not None and len(self.done) > self.end:
            if self.is_kill:
                raise _Killed
            self.stop.request("SIGUSR2")


def _config(*more: str) -> TrainConfig:
    config = composed([*overrides(_CELL), "hardware.tasks_per_node=1", *more])
    validate(config)
    return config


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    with process_group(_ENV, device, rendezvous=rendezvous, address=None, timeout_s=60) as group:
        yield group
    torch.set_num_threads(threads)


def _play(config: TrainConfig, group: RankGroup, folder: Path, ends: list[tuple[int, bool]]) -> tuple[Trace, list[int]]:
    """The trace, and the steps at which attempts began. Each of `ends` is an attempt: (steps done, killed)."""
    paths = RunPaths(folder)
    paths.checkpoints.mkdir(parents=True)
    paths.folder.chmod(0o700)
    paths.checkpoints.chmod(0o700)
    for attempt, (end, is_kill) in enumerate([*ends, (None, False)]):
        Journal(paths).start(
            attempt, job_id=f"j{attempt}", restart_count=0, node="n", pid=os.getpid(), executor="local", world_size=1
        )
        run = _CountedRun(
            paths=paths, env=_ENV, group=group, stop=StopFlag(), attempt=attempt, num_steps=NUM_STEPS,
            store=CheckpointStore(paths.checkpoints, group=group, keep_last=1, attempt=attempt),
            saves=SaveTimer(config.checkpoint.every_steps), contract=ResumeContract.of(config, group),
            heartbeat_every_s=60.0, seed=config.seed, end=end, is_kill=is_kill, max_no_progress=99,
            is_asynchronous=False,  # else a slow disk may decide that steps are sooner done again than saved
        )  # fmt: skip
        run.probe = Probe(paths, 0, attempt, [])
        try:
            outcome = run_main(config, run)
        except _Killed:
            continue
        assert (outcome is Outcome.done) is (end is None)
    attempts = Journal(paths).read()
    return read_trace(paths, 1), [each.resumed_step or 0 for each in attempts]


@pytest.fixture(scope="module")
def undisturbed(group: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    trace, _ = _play(_config(), group, folder, [])
    return folder, trace


def test_the_data_moves_on_and_the_metrics_go_back(undisturbed: tuple[Path, Trace]) -> None:
    folder, trace = undisturbed
    told = Journal(RunPaths(folder)).read()[0].guarded
    assert len(told) >= 2, "the cell has rollbacks"
    assert all(each["action"] == "rollback" and each["to"] < each["step"] for each in told)
    assert all(each["to"] % 5 == 0 and each["to"] >= each["step"] - 5 for each in told), "to the last regular one"
    steps = [record["step"] for record in read_lines(folder / "metrics.jsonl")]
    assert steps == sorted(steps)
    assert steps.count(14) == 2, "its training and its evaluation, of the last time alone"
    assert trace.metrics[NUM_STEPS]["rollbacks"] == len(told)
    assert list(trace.steps(0)) == list(dict.fromkeys(trace.steps(0)))
    # What counts in the end took each batch once, and none that was passed over.
    lines = [line for line in trace.lines[0] if line["kind"] == "step"]
    inputs = {step: leaves["inputs"] for step, leaves in trace.steps(0).items()}
    assert len(set(inputs.values())) == NUM_STEPS
    first = [next(n for n, line in enumerate(lines) if line["step"] == each["step"]) for each in told[:1]]
    assert lines[first[0]]["leaves"]["inputs"] not in inputs.values()
    assert lines[first[0] + 1]["leaves"]["inputs"] in [line["leaves"]["inputs"] for line in lines[first[0] + 2 :]]
    assert any("times the usual. Rolled back from step" in str(record) for record in journal_records(folder, "guard"))


# The first spike is in step 11, and is seen at 14: 14 steps, then 11, 12, .. once more.
@pytest.mark.parametrize(
    ("ends", "starts"),
    [
        pytest.param([(12, True)], [0, 10], marks=pytest.mark.long),
        pytest.param([(12, False)], [0, 13], marks=pytest.mark.long),
        pytest.param([(15, True)], [0, 10], marks=pytest.mark.long),
        pytest.param([(15, False)], [0, 11], marks=pytest.mark.long),
        ([(12, False), (2, False), (1, True)], [0, 13, 13, 10]),
    ],
    ids=["killed-before-the-look", "stopped-before-the-look", "killed-after", "stopped-after", "all"],
)
def test_interrupted_around_a_rollback_it_has_the_same_bits(
    ends: list[tuple[int, bool]],
    starts: list[int],
    undisturbed: tuple[Path, Trace],
    group: RankGroup,
    tmp_path: Path,
) -> None:
    _, wanted = undisturbed
    trace, resumed = _play(_config(), group, tmp_path / "run", ends)
    assert resumed == starts
    first = first_difference(wanted, trace)
    assert first is None, first
    assert other_files(wanted, trace) == ()
    assert other_metrics(wanted, trace, wanted) == ()


def test_too_many_rollbacks_end_the_run(group: RankGroup, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"after 1 rollbacks; train\.guard.max_rollbacks=1"):
        _play(_config("train.guard.max_rollbacks=1"), group, tmp_path / "run", [])
    kept = [step for step, _ in committed(tmp_path / "run" / "checkpoints")]
    assert kept == [10], "the good one stays"
    assert len(journal_records(tmp_path / "run", "guard")) == 1
