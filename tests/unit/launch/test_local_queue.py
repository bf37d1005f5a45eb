"""The local queue: what it reads, and the death of a run that could not start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpc_trainer.launch import local_queue
from hpc_trainer.launch.local_queue import _record_silent_death, _Started
from hpc_trainer.runs.frozen_config import LateConfig
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
