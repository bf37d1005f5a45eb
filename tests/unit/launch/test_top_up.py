"""The sweep's own queue: what has no room waits, a small job submits it, and every verb says so."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.errors import RunStateError
from hpc_trainer.launch.grids import retry, submit_grid, top_up
from hpc_trainer.launch.later_jobs import TopUpJob, top_up_shape
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_ledger
from tests.unit.launch.grids import make_grid
from tests.unit.launch.scripts import read_script
from tests.unit.record.builders import make_spec, make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

LIMITS = """\
MaxArraySize            = {size}
AccountingStorageEnforce = limits
QOS=normal(1) GrpSubmitJobs=6({used}) User Limits=No Users
"""
FULL = "sbatch: error: AssocGrpSubmitJobsLimit\nsbatch: error: Batch job submission failed: Job violates policy\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sweep"


@pytest.fixture
def limited(fake_slurm: FakeSlurm) -> FakeSlurm:
    fake_slurm.answer("scontrol", LIMITS.format(size=4, used=0))
    return fake_slurm


def test_the_top_up_job_comes_first_and_waits_for_half(folder: Path, limited: FakeSlurm) -> None:
    specs = make_specs(9, "cluster=slurm", hardware__partition="long", hardware__gpus_per_node=0)
    done = submit_grid(make_grid(folder, specs)).outcome
    assert [(array.job_id, len(array.run_ids)) for array in done.arrays] == [("102", 4), ("103", 1)]
    assert (done.top_up, len(done.waiting)) == ("101", 4)
    assert limited.calls("sbatch")[0].split()[1] == "--begin=now+60"
    script = read_script(limited.script("101"))
    assert script.array is None
    assert script.command[-2:] == ["top-up", str(folder)]
    assert (script.shape.partition, script.shape.gpus_per_node, script.shape.num_nodes) == ("long", 0, 1)
    (aimed,) = [call for call in limited.calls("scontrol") if "update" in call]
    assert aimed == "scontrol update JobId=101 Dependency=afterany:102_0:102_1 StartTime=now"


def test_waiting_runs_are_pending_with_the_reason(folder: Path, limited: FakeSlurm) -> None:
    specs = make_specs(9, "cluster=slurm")
    grid = make_grid(folder, specs)
    submit_grid(grid)
    status = read_status(grid.sweep)
    assert [run.state for run in status.runs] == [RunState.PENDING] * 9
    assert [run.waits_in_sweep for run in status.runs] == [False] * 5 + [True] * 4
    waiting = status.runs[-1]
    assert waiting.job_id is None
    assert "GrpSubmitJobs of QOS normal is 6, 0 in use" in (waiting.cause or "")
    assert status.notes == ["4 run(s) wait in the sweep's own queue: job 101 submits them as runs end."]
    limited.clear_queue()
    assert "no top-up job is queued" in read_status(grid.sweep).notes[0]


def test_the_same_line_again_tops_up_what_fits(folder: Path, limited: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(9, "cluster=slurm"))
    submit_grid(grid)
    limited.answer("scontrol", LIMITS.format(size=4, used=6))
    again = submit_grid(grid).outcome
    assert (again.arrays, len(again.waiting)) == ((), 4)
    limited.answer("scontrol", LIMITS.format(size=4, used=2))
    more = submit_grid(grid).outcome
    assert (sum(len(array.run_ids) for array in more.arrays), more.waiting) == (4, ())
    assert read_status(grid.sweep).waiting == []


def test_a_top_up_with_nothing_to_do_submits_nothing(folder: Path, limited: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(2, "cluster=slurm"))
    submit_grid(grid)
    limited.forget_calls()
    assert top_up(grid.sweep) is None
    assert limited.calls("sbatch") == []


def test_cancelled_while_waiting_stays_out_and_the_top_up_job_goes_too(folder: Path, limited: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(9, "cluster=slurm"))
    submit_grid(grid)
    status = read_status(grid.sweep)
    cancel_runs(status, [status.runs[-1]])
    assert limited.calls("scancel") == [], "others still wait"
    status = read_status(grid.sweep)
    assert status.runs[-1].state is RunState.CANCELLED
    cancel_runs(status, status.waiting)
    (call,) = limited.calls("scancel")
    assert call.split()[-1] == "101"
    assert top_up(grid.sweep) is None


def test_a_limit_that_nobody_told_is_found_by_halves(folder: Path, fake_slurm: FakeSlurm) -> None:
    """The site hides its limits: arrays of more than three elements are refused, and after two nothing fits."""
    sbatch = fake_slurm.bin / "sbatch"
    refuse = (
        'for script; do :; done\nlast=$(sed -n "s/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p" "$script")\n'
        'if [ "${last:-0}" -gt 2 ]; then echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; fi\n'
    )
    sbatch.write_text(sbatch.read_text().replace("number=$((", refuse + "number=$((", 1))
    grid = make_grid(folder, make_specs(11, "cluster=slurm"))
    done = submit_grid(grid).outcome
    assert [len(array.run_ids) for array in done.arrays] == [2], "11 → 5 → 2"
    assert (len(done.waiting), done.top_up) == (9, "101")
    assert any("no room for more jobs: QOSMaxSubmitJobPerUserLimit" in note for note in done.notes)


@pytest.mark.parametrize(("most", "slots"), [(2, 2), (1, 1), (0, 0)])
def test_a_pool_has_as_many_slots_as_a_limit_that_nobody_told_allows(
    folder: Path, fake_slurm: FakeSlurm, most: int, slots: int
) -> None:
    sbatch = fake_slurm.bin / "sbatch"
    refuse = (
        'for script; do :; done\nlast=$(sed -n "s/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p" "$script")\n'
        f'if [ -n "$last" ] && [ "$last" -ge {most} ]; then\n'
        '  echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1\nfi\n'
    )
    sbatch.write_text(sbatch.read_text().replace("number=$((", refuse + "number=$((", 1))
    grid = make_grid(folder, make_specs(8, "cluster=slurm", pool__jobs=4))
    done = submit_grid(grid).outcome
    assert [array.slots for array in done.arrays] == ([slots] if slots else []), "4 → 2 → 1"
    assert len(done.waiting) == (0 if slots else 8), "slots take all of the runs"
    assert any("no room for more jobs: QOSMaxSubmitJobPerUserLimit" in note for note in done.notes)


def test_a_refused_top_up_job_loses_nothing(folder: Path, limited: FakeSlurm) -> None:
    sbatch = limited.bin / "sbatch"
    words = "sbatch: error: Invalid job: this partition takes GPU jobs only"
    refuse = f'case "$*" in *--begin*) echo "{words}" >&2; exit 1 ;; esac\n'
    sbatch.write_text(sbatch.read_text().replace("number=$((", refuse + "number=$((", 1))
    grid = make_grid(folder, make_specs(9, "cluster=slurm"))
    done = submit_grid(grid).outcome
    assert (done.top_up, len(done.waiting)) == (None, 4)
    assert any("this partition takes GPU jobs only" in note and "same command again" in note for note in done.notes)
    limited.answer("scontrol", LIMITS.format(size=4, used=0))
    assert submit_grid(grid).outcome.waiting == ()


@pytest.mark.parametrize(
    "memory", ["mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu"], ids=lambda name: name.removeprefix("mem_gb_")
)
def test_a_top_up_job_asks_for_one_core_whatever_the_runs_ask_for(
    folder: Path, limited: FakeSlurm, memory: str
) -> None:
    """What it asked for besides, it would wait for; what it did not say is the site's default."""
    asked: dict[str, Any] = dict.fromkeys(("mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu")) | {memory: 60.0}
    asked |= {"gpu_type": "h100", "constraint": "nvlink", "exclude": "n[1-9]", "partition": "long"}
    changes = {f"hardware__{key}": value for key, value in asked.items()}
    specs = make_specs(9, "cluster=slurm", "hardware=gpu_x16", cluster__account="mine", **changes)
    limited.answer("sinfo", "")
    submit_grid(make_grid(folder, specs))
    shape = read_script(limited.script("101")).shape
    assert dataclasses.asdict(shape) == {
        "num_nodes": 1, "tasks_per_node": 1, "cpus_per_task": 1, "gpus_per_node": 0,
        "mem_gb_per_node": None, "mem_gb_per_gpu": None, "mem_gb_per_cpu": None,
        "gpu_type": None, "constraint": None, "exclude": None, "gpu_request": shape.gpu_request,
        "partition": "long", "qos": None, "account": "mine", "time_limit_min": 30, "signal_lead_s": 30,
        "ranks_per_task": 1, "whole_node": False,
    }  # fmt: skip


def test_a_top_up_job_takes_no_longer_than_a_run_and_the_partition_that_the_site_names() -> None:
    spec = make_spec("cluster=slurm", hardware__time_limit_min=5, cluster__top_up_partition="small")
    shape = top_up_shape(spec)
    assert (shape.time_limit_min, shape.partition) == (5, "small")


def test_a_name_that_is_no_sweep_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunStateError, match="holds no sweep"):
        top_up(SweepPaths(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()


def test_a_top_up_job_that_has_not_begun_is_used_again(folder: Path, limited: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(12, "cluster=slurm"))
    submit_grid(grid)
    for _ in range(3):
        limited.answer("scontrol", LIMITS.format(size=4, used=6))
        again = submit_grid(grid).outcome
        assert (again.arrays, again.top_up, len(again.waiting)) == ((), "101", 7)
    assert len([call for call in limited.calls("sbatch") if "--begin" in call]) == 1
    aimed = [call for call in limited.calls("scontrol") if "update" in call]
    assert aimed[-1].endswith("Dependency=afterany:102_0:102_1 StartTime=now"), "at the runs of the earlier submit"


def test_with_others_in_all_the_room_it_looks_again_in_ten_minutes(folder: Path, limited: FakeSlurm) -> None:
    limited.answer("scontrol", LIMITS.format(size=4, used=6))
    done = submit_grid(make_grid(folder, make_specs(3, "cluster=slurm"))).outcome
    assert (done.arrays, done.top_up) == ((), "101")
    (aimed,) = [call for call in limited.calls("scontrol") if "update" in call]
    assert aimed == "scontrol update JobId=101 StartTime=now+600"


def test_a_limit_of_one_submits_a_run_and_no_top_up_job(folder: Path, limited: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(3, "cluster=slurm"))
    for number in range(3):
        limited.answer("scontrol", LIMITS.format(size=4, used=5))
        done = submit_grid(grid).outcome
        assert ([len(array.run_ids) for array in done.arrays], done.top_up) == ([1], None)
        assert len(done.waiting) == 2 - number
    assert [call for call in limited.calls("sbatch") if "--begin" in call] == []


def test_waiting_runs_keep_the_code_that_they_were_submitted_with(
    folder: Path, limited: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two submits with two states of the code: both queues are worked off, each with its own."""
    first, second = "1" * 64, "2" * 64

    def code_is(digest: str) -> None:
        monkeypatch.setattr(
            "hpc_trainer.launch.grids.read_code",
            lambda *_: types.SimpleNamespace(digest=digest, notes=(), left_out=(), contents={}, roots=()),
        )

    monkeypatch.setattr("hpc_trainer.launch.submit.store_code", lambda *_: None)
    monkeypatch.setattr("hpc_trainer.launch.submit.code_revision", lambda _: {})
    specs = make_specs(14, "cluster=slurm")
    code_is(first)
    submit_grid(make_grid(folder, specs[:8]))
    code_is(second)
    limited.answer("scontrol", LIMITS.format(size=4, used=6))
    submit_grid(make_grid(folder, specs))
    limited.answer("scontrol", LIMITS.format(size=20, used=-20))
    done = top_up(SweepPaths(folder))
    assert done is not None
    assert done.waiting == ()
    code_of = {run_id: each.code for each in read_ledger(SweepPaths(folder)).submissions for run_id in each.run_ids}
    assert [code_of[spec.run_id] for spec in specs] == [first] * 8 + [second] * 6


def test_what_slurm_refuses_for_good_waits_no_longer_and_holds_up_nobody(folder: Path, limited: FakeSlurm) -> None:
    small, large = make_specs(7, "cluster=slurm"), make_specs(3, "cluster=slurm", "hardware=gpu_x1")
    submit_grid(make_grid(folder, [*large, *small]))
    sbatch = limited.bin / "sbatch"
    refuse = (
        "for script; do :; done\n"
        'if grep -q "^#SBATCH --cpus-per-task=1$" "$script" && grep -q "array=" "$script"; then '
        'echo "sbatch: error: Batch job submission failed: Invalid qos specification" >&2; exit 1; fi\n'
    )
    sbatch.write_text(sbatch.read_text().replace("number=$((", refuse + "number=$((", 1))
    limited.answer("scontrol", LIMITS.format(size=4, used=-20))
    done = top_up(SweepPaths(folder))
    assert done is not None
    assert (done.arrays, done.waiting) == ((), ())
    status = read_status(SweepPaths(folder))
    refused = [run for run in status.runs if run.state is RunState.FAILED]
    assert len(refused) == 5
    assert "Invalid qos specification" in (refused[0].cause or "")
    assert top_up(SweepPaths(folder)) is None, "no chain of top-up jobs"
    sbatch.write_text(sbatch.read_text().replace(refuse, ""))
    assert retry(SweepPaths(folder), [run.run_id for run in refused]).num_submitted == 5
    assert not [run for run in read_status(SweepPaths(folder)).runs if run.state is RunState.FAILED]


def test_a_full_partition_is_tried_once_for_all_its_arrays(folder: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", "MaxArraySize            = 4\n")
    sbatch = fake_slurm.bin / "sbatch"
    refuse = 'case "$*" in *--begin*) ;; *) echo "sbatch: error: AssocMaxSubmitJobLimit" >&2; exit 1 ;; esac\n'
    sbatch.write_text(sbatch.read_text().replace("number=$((", refuse + "number=$((", 1))
    done = submit_grid(make_grid(folder, make_specs(40, "cluster=slurm"))).outcome
    assert (done.arrays, len(done.waiting)) == ((), 40)
    assert len(fake_slurm.calls("sbatch")) == 4, "4, 2, 1, and the top-up job"


@pytest.mark.parametrize("count", [1, 2, 3, 100, 101, 103, 1000, 10_000])
def test_the_top_up_job_waits_for_the_first_half_by_fifty_names_at_most(fake_slurm: FakeSlurm, count: int) -> None:
    job = TopUpJob("7")
    job.aim([f"9_{index}" for index in range(count)])
    (call,) = fake_slurm.calls("scontrol")
    assert call.startswith("scontrol update JobId=7 Dependency=afterany:")
    assert call.endswith(" StartTime=now")
    awaited = [int(name.removeprefix("9_")) for name in call.split("afterany:")[1].split()[0].split(":")]
    half = max(1, count // 2)
    assert len(set(awaited)) == len(awaited) <= 50
    assert len(awaited) >= min(half, 25)
    assert half - 1 - max(awaited) <= half // 25, "the last of the first half, or one close to it"
    assert max(awaited) < half


def test_a_top_up_job_that_cannot_be_told_what_to_wait_for_begins_in_a_minute(folder: Path, limited: FakeSlurm) -> None:
    scontrol = limited.bin / "scontrol"
    refuse = 'case "$*" in update*) echo "scontrol: error: Requested operation is disabled" >&2; exit 1 ;; esac\n'
    scontrol.write_text(
        scontrol.read_text().replace('if [ -e "$here/$name.hang"', refuse + 'if [ -e "$here/$name.hang"')
    )
    done = submit_grid(make_grid(folder, make_specs(9, "cluster=slurm"))).outcome
    assert (done.top_up, sum(len(array.run_ids) for array in done.arrays), len(done.waiting)) == ("101", 5, 4)
    assert any("job 101 begins in 60 s" in note and "is disabled" in note for note in done.notes)


def test_a_lost_reply_to_the_top_up_job_keeps_no_run_back_and_places_no_second_one(
    folder: Path, limited: FakeSlurm
) -> None:
    """It is accepted, and nobody hears of it: the arrays are submitted all the same, the next command finds it."""
    limited.lose_reply()
    limited.lag()
    grid = make_grid(folder, make_specs(9, "cluster=slurm"))
    done = submit_grid(grid).outcome
    assert (done.top_up, sum(len(array.run_ids) for array in done.arrays), len(done.waiting)) == (None, 5, 4)
    assert any("Socket timed out" in note for note in done.notes)
    assert not any("No top-up job" in note for note in done.notes), "there may be one"
    assert not [call for call in limited.calls("scontrol") if "update" in call], "nobody knows its id"
    limited.catch_up()
    limited.answer("scontrol", LIMITS.format(size=4, used=6))
    again = submit_grid(grid).outcome
    assert (again.arrays, again.top_up, len(again.waiting)) == ((), "101", 4)
    assert len([call for call in limited.calls("sbatch") if "--begin" in call]) == 1
