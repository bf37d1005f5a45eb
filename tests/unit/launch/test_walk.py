"""How far it is from an override to sbatch: the rooms that the call goes through, one by one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

import hpc_trainer
from hpc_trainer.cli.main import main
from tests.unit.slurm.fake_slurm import FakeSlurm

_PACKAGE = f"{Path(hpc_trainer.__file__).parent}/"
# What happens to a point of the grid on its way, and where: the calls that lead there are the walk.
STATIONS = {
    "config/compose/fast_compose.py compose_point", "config/rules/validate.py validate", "launch/freeze.py freeze",
    "launch/plan.py build_plan", "launch/plan.py fit", "record/spec.py append_specs",
    "record/submissions.py write_intent", "launch/batch_job.py worker_command",
    "launch/submitit_bridge.py _make_submission_file_text", "slurm/commands.py submit_script",
}  # fmt: skip


def test_from_an_override_to_sbatch_are_fifteen_rooms(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    words = ["submit", "cluster=slurm", "experiment=digits", "sweep_name=walk", "seed=1,2", "snapshot=off"]
    monkeypatch.setattr(sys, "argv", ["hpc-trainer", *words])
    reached: set[str] = set()
    rooms: dict[str, None] = {}

    def look(frame: FrameType | None, event: str, _: object) -> None:
        if frame is None or event != "call" or not frame.f_code.co_filename.startswith(_PACKAGE):
            return
        station = f"{frame.f_code.co_filename.removeprefix(_PACKAGE)} {frame.f_code.co_name}"
        if station in STATIONS - reached:
            reached.add(station)
            while frame is not None:
                if frame.f_code.co_filename.startswith(_PACKAGE):
                    rooms.setdefault(frame.f_code.co_filename.removeprefix(_PACKAGE))
                frame = frame.f_back

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.setprofile(before)
    assert ended.value.code in (0, None)
    assert reached == STATIONS
    assert len(fake_slurm.calls("sbatch")) == 1
    assert len(rooms) <= 15, " ".join(rooms)
