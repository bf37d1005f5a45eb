"""A rank that an error ends: what its time went to."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_trainer.observe.flight_recorder import FlightRecorder
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import Kind
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker.attempt import Recorders, _watched
from hpc_trainer.worker.conclude import Stop
from tests.unit.record.builders import make_config


def _run(spans: Spans) -> Any:
    """Return what is read of a run while it is watched."""
    saver = SimpleNamespace(standing_step=None)
    return SimpleNamespace(spans=spans, saver=saver, beat=lambda: None, is_rank_zero=True, step=0, first_step=0)


@pytest.mark.parametrize(
    ("first_failure", "kind"), [("StuckError", Kind.hang), ("RuntimeError", Kind.step), (None, Kind.step)]
)
def test_what_a_rank_waited_for_a_stuck_one_was_a_hang(tmp_path: Path, first_failure: str | None, kind: Kind) -> None:
    """Which of the ranks that are silent leaves first is chance: the wait of one that it broke off is a hang too."""
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    if first_failure is not None:
        write_json(paths.failure(0), {"rank": 1, "type": first_failure, "message": "", "exit_code": 1})
    spans = Spans()
    run = _run(spans)
    stop = Stop(
        config=make_config("monitor.watchdog_s=30"), paths=paths, env=read_rank_env({}), flag=StopFlag(), attempt=0,
        saved_step=None,
    )  # fmt: skip
    with contextlib.suppress(ConnectionError), _watched(run, stop, Recorders([FlightRecorder(stop, spans)])):
        with spans.within(Kind.step, 1):
            run.beat()
        with spans.within(Kind.step, 2):
            time.sleep(0.3)
            raise ConnectionError("closed by peer")
    assert spans.seconds()[kind] >= 0.3
    assert spans.seconds()[{Kind.hang: Kind.step, Kind.step: Kind.hang}[kind]] < 0.3


def test_a_short_timeout_of_collectives_leaves_the_watchdog_the_time_that_it_needs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It begins with the stacks some seconds before its limit: below those every rank was stuck at once."""
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    spans = Spans()
    run = _run(spans)
    env = dataclasses.replace(read_rank_env({}), world_size=2)
    config = make_config("parallel.timeout_s=3")
    stop = Stop(config=config, paths=paths, env=env, flag=StopFlag(), attempt=0, saved_step=None)
    with _watched(run, stop, Recorders([FlightRecorder(stop, spans)])):
        time.sleep(1.0)
    assert "watchdog" not in capfd.readouterr().err
