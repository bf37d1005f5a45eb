"""The local queue records the death of a run that could not start."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hpc_trainer.launch.local_queue import _record_silent_death, _Started
from hpc_trainer.runs.journal import Journal
from tests.unit.operate.sweeps import SweepOnDisk
from tests.unit.runs.builders import make_specs


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
