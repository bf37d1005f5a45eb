"""A rank that held the others up is told by `status` while the run works, and by `why` as long as the run is there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hpc_trainer.cli.run_verbs import run_status
from hpc_trainer.observe import straggler_log as stragglers
from hpc_trainer.observe.straggler_log import MOST_SHOWN, Straggler, StragglerLog, read_stragglers
from hpc_trainer.operate.report.data import build_report
from hpc_trainer.operate.why import explain
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import read_heartbeat
from hpc_trainer.record.reading import read_json
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

SLOW = Straggler(
    time=1_000_000_000.0, attempt=0, step=90, rank=3, node="n2", is_slow=True, factor=1.834, own_s=0.18, others_s=0.1,
    is_data=True,
)  # fmt: skip
WORDS = "rank 3 on n2 takes 1.83 times as long as the others (180 ms of a step, 100 ms): it waits for its data"


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit()
    sweep.start()
    sweep.beat(step=100)
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n")
    fake_slurm.answer("sacct", "")
    return sweep


def _why(sweep: SweepOnDisk) -> tuple[list[str], list[str]]:
    status = read_status(sweep.paths)
    told = explain(status, status.runs[0], asks_slurm=False)
    return told.evidence, told.timeline


def test_status_notes_what_the_run_says(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    place = sweep.run().heartbeat
    write_json(place, {**(read_json(place) or {}), "remarks": {"stragglers": WORDS, "odd": 7}})
    folder = sweep.paths.folder.parent
    run_status("sweep", folder, watch=False, as_json=False)
    assert f"Note: {sweep.specs[0].run_id}: {WORDS}." in capsys.readouterr().out.splitlines()
    run_status("sweep", folder, watch=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["runs"][0]["remarks"] == [WORDS]
    sweep.end(state=RunState.FAILED, cause="exception")
    fake_slurm.answer("squeue", "")
    assert read_status(sweep.paths).runs[0].remarks == (), "of a run at work alone"


def test_why_tells_who_when_and_that_it_is_over(sweep: SweepOnDisk) -> None:
    log = StragglerLog(sweep.run())
    log.append(SLOW)
    evidence, timeline = _why(sweep)
    assert f"from step 90 of attempt 0 on {WORDS}" in evidence
    assert timeline[0].endswith(f"attempt 0, step 90: {WORDS}"), "by time"
    told = f"{sweep.specs[0].run_id}: from step 90 of attempt 0 on {WORDS}"
    assert told in build_report(read_status(sweep.paths)).notes
    log.append(dataclasses.replace(SLOW, step=200, time=2e9, is_slow=False))
    evidence, timeline = _why(sweep)
    assert not [line for line in evidence if "rank 3" in line]
    assert timeline[-1].endswith("attempt 0, step 200: rank 3 on n2 is as quick as the others again")


def test_many_stragglers_are_counted(sweep: SweepOnDisk) -> None:
    log = StragglerLog(sweep.run())
    for rank in range(12):
        log.append(dataclasses.replace(SLOW, rank=rank, factor=2.0 + rank))
    told = [line for line in _why(sweep)[0] if "rank" in line]
    assert len(told) == MOST_SHOWN + 1
    assert "rank 11 on n2 takes 13 times" in told[0]
    assert told[-1] == "and 7 more rank(s)"


def test_a_file_is_bounded_and_a_full_disk_is_borne(sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "MOST_LINES", 3)
    log = StragglerLog(sweep.run())
    for step in range(5):
        log.append(dataclasses.replace(SLOW, step=step))
    assert [each.step for each in read_stragglers(sweep.run())] == [0, 1, 2]
    sweep.run().stragglers.unlink()
    sweep.run().stragglers.mkdir()
    StragglerLog(sweep.run()).append(SLOW)


def test_of_a_heartbeat_that_others_wrote_a_few_remarks_are_told(tmp_path: Path) -> None:
    beat = tmp_path / "heartbeat.json"
    remarks = {str(number): "x" * 10_000 for number in range(100)} | {"odd": 7}
    beat.write_text(json.dumps({"step": 1, "remarks": remarks}))
    told = read_heartbeat(beat)["remarks"]
    assert len(told) <= 8
    assert max(map(len, told.values())) <= 2_000
