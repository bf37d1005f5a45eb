"""What a plan knows of a sweep that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.launch.arrays import ActiveArray
from hpc_trainer.launch.known import Known, first_few, known_of
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.states import RunState
from hpc_trainer.record.submissions import write_confirmation, write_intent, write_removed
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm, uuid_of

OLD, NEW = "a" * 64, "b" * 64


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))


def _submit(sweep: SweepOnDisk, *indices: int, job_id: str | None, code: str | None = None) -> None:
    run_ids = [sweep.specs[index].run_id for index in indices]
    intent = write_intent(sweep.paths, executor="slurm", hardware="cpu_x1", run_ids=run_ids, code=code)
    if job_id is not None:
        write_confirmation(sweep.paths, intent, job_id)


def test_the_code_of_a_run_is_that_of_its_newest_submission(sweep: SweepOnDisk) -> None:
    first, second = (spec.run_id for spec in sweep.specs)
    _submit(sweep, 0, 1, job_id="1", code=OLD)
    assert known_of(sweep.paths).codes == {first: OLD, second: OLD}
    _submit(sweep, 0, job_id="2", code=NEW)
    assert known_of(sweep.paths).codes == {first: NEW, second: OLD}
    _submit(sweep, 1, job_id="3", code=None)
    assert known_of(sweep.paths).codes == {first: NEW}, "nobody knows what the newest submission of the second froze"


def test_of_a_sweep_that_was_never_submitted_nothing_is_known(tmp_path: Path) -> None:
    assert known_of(SweepPaths(tmp_path / "none")) == Known()


def test_a_shape_is_known_once_slurm_has_taken_a_job_of_it(sweep: SweepOnDisk) -> None:
    """The plan warns of what may be wrong with a shape that the cluster has never taken."""
    assert known_of(sweep.paths).shapes == frozenset()
    _submit(sweep, 0, 1, job_id=None)
    assert known_of(sweep.paths).shapes == frozenset(), "nobody knows whether sbatch took it"
    _submit(sweep, 0, job_id="1")
    assert known_of(sweep.paths).shapes == {sweep.specs[0].shape}


def test_the_slowest_stop_of_a_shape_is_known(sweep: SweepOnDisk) -> None:
    _submit(sweep, 0, 1, job_id="1")
    assert known_of(sweep.paths).stop_s == {}, "no run has measured itself"
    for index, save_s in enumerate((2.0, 30.0)):
        sweep.start(index, job_id=f"1_{index}", resumed=0)
        write_json(sweep.run(index).heartbeat, {"attempt": 0, "step": 7, "step_s": 0.5, "save_s": save_s})
    assert known_of(sweep.paths).stop_s == {sweep.specs[0].shape: 30.5}
    sweep.done(1)
    assert known_of(sweep.paths).stop_s == {sweep.specs[0].shape: 30.5}, "a run that is done has measured it too"


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([], []), (["a", None, "a", "b"], ["a", "b"]), (["a", "b", "c"], ["a", "b", "c"]),
        (["a", "b", "c", "d"], ["a", "b", "c", "1 more lines."]),
        (list("abcde") * 2, ["a", "b", "c", "2 more lines."]),
    ],
)  # fmt: skip
def test_the_first_distinct_lines_are_shown_and_the_others_counted(lines: list[str | None], shown: list[str]) -> None:
    assert first_few(lines, 3, "lines") == shown


def test_jobs_in_the_queue_are_known_by_their_array_in_the_order_of_their_submission(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    ids = [spec.run_id for spec in sweep.specs]
    intents = []
    for run_ids, job_id, parallelism in (([ids[1]], "700", None), ([ids[0]], "600", 5)):
        intent = write_intent(
            sweep.paths, executor="slurm", hardware=f"on_{job_id}", run_ids=run_ids, parallelism=parallelism
        )  # fmt: skip
        write_confirmation(sweep.paths, intent, job_id)
        intents.append(intent)
    fake_slurm.print(
        "squeue",
        f"JOBID|STATE|NODELIST|REASON|COMMENT|NAME|end\n600_0|RUNNING|n1|None|{intents[1].uuid}|x|end\n"
        f"700_0|PENDING||Priority|{intents[0].uuid}|x|end\n",
    )
    known = known_of(sweep.paths)
    assert known.active == (
        ActiveArray(job_id="700", hardware="on_700", parallelism=1, num_active=1),
        ActiveArray(job_id="600", hardware="on_600", parallelism=5, num_active=1),
    )
    assert (set(known.elements), known.waiting_jobs) == ({"600_0", "700_0"}, {ids[1]: ("700_0",)})
    assert (known.states[ids[0]], known.states[ids[1]]) == (RunState.RUNNING, RunState.PENDING)


def test_an_interrupted_run_has_reached_its_step_and_a_removed_one_begins_anew(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_1|CANCELLED|0:0|n1\n")
    sweep.start(0, resumed=0)
    sweep.end(0, state=RunState.PREEMPTED, cause="preempted", step=30, saved_step=30)
    first, second = (spec.run_id for spec in sweep.specs)
    assert known_of(sweep.paths).steps == {first: 30}
    write_removed(sweep.paths, second, uuid_of("500"))
    known = known_of(sweep.paths, make_grid(sweep.paths.folder, sweep.specs))
    assert known.states[second] is RunState.NEW
    (note,) = [note for note in known.notes if "begins anew" in note]
    assert note.startswith(f"{second} was removed by ")
    assert note.endswith(": it begins anew, at step 0.")
