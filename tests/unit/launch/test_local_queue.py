"""The local queue: what it reads, and the death of a run that could not start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpc_trainer.launch import local_queue
from hpc_trainer.launch.local_queue import _is_over, _record_silent_death, _Started
from hpc_trainer.runs.frozen_config import LateConfig
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.journal import Journal
from tests.unit.runs.builders import make_specs
from tests.unit.state.sweeps import SweepOnDisk


def test_a_process_id_that_comes_again_is_another_attempt(tmp_path: Path) -> None:
    """As in a container, where the ids begin anew with every start."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=local"))
    journal = Journal(sweep.run())
    with subprocess.Popen(["false"]) as process:
        process.wait()
    for count, start in enumerate(("1a2b3c4d", "5e6f7081")):
        dead = _Started(spec=sweep.specs[0], process=process, gpus=[], num_attempts=count, start=start)
        _record_silent_death(sweep.paths, dead)
        attempts = journal.read()
        assert [each.attempt for each in attempts] == list(range(count + 1))
        assert attempts[-1].job_id == f"local-{process.pid}-{start}", "as the worker itself would have called it"
        assert attempts[-1].has_ended


@pytest.mark.parametrize(("mode", "umask"), [(0o700, 0o077), (0o750, 0o027)])
def test_the_group_reads_what_it_may_read_of_the_sweep_and_no_configuration_is_parsed_for_it(
    mode: int, umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 runs, of which it is given one, they would take 1.1 s and 190 MB."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(3, "cluster=local"))
    sweep.paths.folder.chmod(mode)
    seen: list[object] = []
    monkeypatch.setattr(LateConfig, "_content", lambda self: seen.append(self) or pytest.fail("parsed"))
    monkeypatch.setattr(local_queue, "run_queue", lambda *_, **__: seen.append(os.umask(0o077)))
    before = os.umask(0o077)
    try:
        local_queue.main(
            ["--sweep-dir", str(sweep.paths.folder), "--max-parallel", "1", sweep.specs[0].run_id]
        )  # fmt: skip
    finally:
        os.umask(before)
    assert seen == [umask]


def test_the_end_of_a_run_whose_folder_is_away_is_judged_when_it_is_back(tmp_path: Path) -> None:
    """Else a run of which nothing can be read would have failed to start."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=local"))
    sweep.submit("local-1-1a2b3c4d", executor="local")
    sweep.start(job_id="local-1-1a2b3c4d", executor="local")
    sweep.done()
    sweep.end(state=RunState.COMPLETED, cause="done")
    before = sweep.run().journal(0).read_text()
    with subprocess.Popen(["false"]) as process:
        process.wait()
    run = _Started(spec=sweep.specs[0], process=process, gpus=[], num_attempts=0, start="1a2b3c4d")
    away = sweep.paths.folder.with_name("away")
    sweep.paths.folder.rename(away)
    assert not _is_over(sweep.paths, run, is_urgent=False)
    assert not sweep.paths.folder.exists()
    away.rename(sweep.paths.folder)
    assert _is_over(sweep.paths, run, is_urgent=False)
    assert sweep.run().journal(0).read_text() == before
    sweep.paths.folder.rename(away)
    assert _is_over(sweep.paths, run, is_urgent=True), "who was asked to stop does not wait"
