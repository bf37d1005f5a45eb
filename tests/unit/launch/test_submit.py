"""Submitting with stand-ins for Slurm: once, whatever happened, wherever the command was killed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import (
    ConfigError,
    MissingCommandError,
    RefusedError,
    SilentError,
    SlurmError,
    SubmitError,
    UntrustedFileError,
)
from hpc_trainer.launch import submit as submit_module
from hpc_trainer.launch.frozen_code.archive import archive_of
from hpc_trainer.launch.settle import settle_intents
from hpc_trainer.launch.submit import ask_slurm, submit_plan, with_mail
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.files import make_folder
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import FileLock, process_name
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.spec import append_specs, read_specs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_submissions, write_confirmation, write_intent
from tests.unit.launch.grids import make_grid, make_plan, submit
from tests.unit.record.builders import make_spec, make_specs
from tests.unit.record.lookalike import start_lookalike
from tests.unit.slurm.fake_slurm import FakeSlurm

SLURM = ("cluster=slurm",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sweep"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that settle_intents slept: time passes at once."""
    slept: list[float] = []
    monkeypatch.setattr(
        "hpc_trainer.launch.settle.time",
        types.SimpleNamespace(time=lambda: time.time() + sum(slept), sleep=slept.append),
    )
    return slept


def _events(folder: Path) -> list[str]:
    return [record["event"] for record in read_lines(SweepPaths(folder).submissions)]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_runs_folder_that_others_could_have_filled_is_refused_before_anything_is_written(
    folder: Path, fake_slurm: FakeSlurm, is_link: bool
) -> None:
    specs = make_specs(1, *SLURM)
    run = SweepPaths(folder).run(specs[0].run_id).folder
    run.parent.mkdir(parents=True, mode=0o700)
    if is_link:
        run.symlink_to("nowhere")
    else:
        run.mkdir()
        run.chmod(0o777)
    with pytest.raises(UntrustedFileError, match="symbolic link" if is_link else "others may write"):
        submit(make_grid(folder, specs))
    assert fake_slurm.calls("sbatch") == []
    assert not SweepPaths(folder).specs.exists()


def test_a_grid_of_50_is_one_sbatch_and_few_files(folder: Path, fake_slurm: FakeSlurm) -> None:
    specs = make_specs(50, *SLURM)
    (array,) = submit(make_grid(folder, specs))
    assert (array.job_id, array.hardware, array.run_ids) == ("101", "cpu_x1", tuple(spec.run_id for spec in specs))
    assert [call.split()[0] for call in fake_slurm.calls()] == ["scontrol", "sinfo", "test-only", "sbatch"]
    assert "#SBATCH --array=0-49%50" in fake_slurm.script("101")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert [name for name in names if not name.startswith(("slurm/", "code/"))] == [
        "specs.jsonl", "submissions.jsonl", f"submissions/{read_submissions(SweepPaths(folder))[0].uuid}.json",
        "submissions/specs.jsonl", "sweep.json",
    ]  # fmt: skip
    assert len([name for name in names if name.startswith("code/")]) <= 1, "one archive, if hpc_trainer is a checkout"
    assert len(names) <= 7
    assert {path.stat().st_mode & 0o077 for path in folder.rglob("*") if not path.is_symlink()} == {0}
    assert list(read_specs(SweepPaths(folder)).values()) == specs
    assert json.loads(SweepPaths(folder).sweep.read_text())["run_ids"] == [spec.run_id for spec in specs]


def test_what_is_no_refusal_of_slurm_is_not_recorded_as_one(
    folder: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A top-up job that lost the lock, or that has no sbatch, must not leave runs behind that look refused for good."""
    plan = make_plan(folder, make_specs(2, *SLURM))
    make_folder(folder)

    class Lost(FileLock):
        def renew(self) -> None:
            raise SubmitError("another submit took it over")

    with pytest.raises(SubmitError, match="took it over"):
        submit_plan(plan, command_line=None, lock=Lost(SweepPaths(folder).lock, "submit"), skip_refused=True)
    (fake_slurm.bin / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(fake_slurm.bin))
    with pytest.raises(MissingCommandError):
        submit_plan(plan, command_line=None, skip_refused=True)
    assert _events(folder) == ["intent", "dropped"]


def test_a_second_submit_calls_no_sbatch(folder: Path, fake_slurm: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(3, *SLURM))
    submit(grid)
    fake_slurm.forget_calls()
    size = SweepPaths(folder).specs.stat().st_size
    assert submit(grid) == []
    assert fake_slurm.calls("sbatch") == []
    assert len(fake_slurm.calls()) <= 2
    assert SweepPaths(folder).specs.stat().st_size == size


def test_one_value_more_is_one_run_more(folder: Path, fake_slurm: FakeSlurm) -> None:
    submit(make_grid(folder, make_specs(3, *SLURM)))
    (array,) = submit(make_grid(folder, make_specs(4, *SLURM)))
    assert array.run_ids == (make_spec(*SLURM, seed=3).run_id,)
    assert "#SBATCH --array=0-0%1" in fake_slurm.script("102")


def test_two_shapes_are_two_arrays(folder: Path, fake_slurm: FakeSlurm) -> None:
    specs = [make_spec(*SLURM), make_spec(*SLURM, "hardware=gpu_x16"), make_spec(*SLURM, seed=1)]
    arrays = submit(make_grid(folder, specs))
    assert [(array.hardware, len(array.run_ids)) for array in arrays] == [("cpu_x1", 2), ("gpu_x16", 1)]
    assert len(fake_slurm.calls("sbatch")) == 2


def test_the_intent_is_on_disk_before_sbatch_runs(folder: Path, fake_slurm: FakeSlurm) -> None:
    seen = fake_slurm.folder / "seen"
    script = (fake_slurm.bin / "sbatch").read_text()
    spy = f'cp "{folder}/submissions.jsonl" "{seen}.intent"; cp "{folder}/specs.jsonl" "{seen}.specs"\n'
    (fake_slurm.bin / "sbatch").write_text(script.replace("#!/bin/sh\n", f"#!/bin/sh\n{spy}"))
    specs = make_specs(2, *SLURM)
    submit(make_grid(folder, specs))
    (intent,) = read_lines(Path(f"{seen}.intent"))
    assert (intent["event"], intent["run_ids"]) == ("intent", [spec.run_id for spec in specs])
    assert len(list(read_lines(Path(f"{seen}.specs")))) == 2
    assert f"#SBATCH --comment={intent['uuid']}" in fake_slurm.script("101")
    assert f"--array {intent['uuid']}" in fake_slurm.script("101")
    assert _events(folder) == ["intent", "confirmed"]


def test_a_refused_array_is_an_error_and_the_next_submit_works(folder: Path, fake_slurm: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(2, *SLURM))
    fake_slurm.answer("sbatch", error="sbatch: error: Batch job submission failed: Invalid account\n", code=1)
    with pytest.raises(RefusedError, match="Invalid account"):
        submit(grid)
    assert read_submissions(SweepPaths(folder)) == []
    assert fake_slurm.calls("squeue") == [], "a plain refusal needs no look at the queue"
    fake_slurm.forget("sbatch")
    (array,) = submit(grid)
    assert len(array.run_ids) == 2
    assert len(read_specs(SweepPaths(folder))) == 2
    assert len(list(read_lines(SweepPaths(folder).specs))) == 2, "no spec is written twice"


def test_the_arrays_before_a_refused_one_stand(folder: Path, fake_slurm: FakeSlurm) -> None:
    grid = make_grid(folder, [make_spec(*SLURM), make_spec(*SLURM, "hardware=gpu_x16")])
    script = (fake_slurm.bin / "sbatch").read_text()
    refuse = 'if grep -q gpus-per-node "$1"; then echo "sbatch: error: Invalid GPUs today" >&2; exit 1; fi\n'
    (fake_slurm.bin / "sbatch").write_text(script.replace("#!/bin/sh\n", f"#!/bin/sh\n{refuse}"))
    with pytest.raises(RefusedError, match="Invalid GPUs today"):
        submit(grid)
    (fake_slurm.bin / "sbatch").write_text(script)
    (array,) = submit(grid)
    assert array.hardware == "gpu_x16"


def test_a_lost_reply_is_not_submitted_twice(folder: Path, fake_slurm: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(3, *SLURM))
    fake_slurm.lose_reply()
    (array,) = submit(grid)
    assert array.job_id == "101"
    assert submit(grid) == []
    assert len(fake_slurm.calls("sbatch")) == 1


@pytest.mark.parametrize("end", ["exit 137", "kill -9 $$", "echo 'logger: no route to the log host' >&2; exit 1"])
def test_a_wrapper_that_fails_after_the_job_was_accepted_makes_no_second_array(
    end: str, folder: Path, fake_slurm: FakeSlurm
) -> None:
    """A site's own `sbatch` around Slurm's, that is killed or fails at work of its own, and swallows the answer."""
    grid = make_grid(folder, make_specs(3, *SLURM))
    wrapper, real = fake_slurm.bin / "sbatch", fake_slurm.bin / "real" / "sbatch"
    real.parent.mkdir()
    wrapper.rename(real)
    asked = f'case "$*" in --test-only*) exec "{real}" "$@" ;; esac\n'
    wrapper.write_text(f'#!/bin/sh\n{asked}"{real}" "$@" > /dev/null\n{end}\n')
    wrapper.chmod(0o755)
    (array,) = submit(grid)
    assert array.job_id == "101"
    assert submit(grid) == []
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_reply_that_is_late_by_a_minute_is_waited_for(
    folder: Path, fake_slurm: FakeSlurm, clock: list[float]
) -> None:
    """sbatch gave up; the controller works the request off after that. Nothing is submitted twice."""
    grid = make_grid(folder, make_specs(3, *SLURM))
    fake_slurm.answer("sbatch", error="sbatch: error: Batch job submission failed: Socket timed out\n", code=1)
    with pytest.raises(SilentError, match="may have the job all the same"):
        submit(grid)
    assert _events(folder) == ["intent", "doubt"]
    status = read_status(SweepPaths(folder))
    assert {run.state for run in status.runs} == {RunState.UNKNOWN}
    (submission,) = read_submissions(SweepPaths(folder))
    fake_slurm.forget("sbatch")
    late = f'[ -e "$here/seen" ] && echo "900_0|PENDING||Priority|{submission.uuid}|x|end"; touch "$here/seen"\n'
    script = fake_slurm.bin / "squeue"
    script.write_text(script.read_text() + late)
    assert submit(grid) == []
    assert _events(folder) == ["intent", "doubt", "confirmed"]
    assert sum(clock) >= 30


def test_between_sbatch_and_its_confirmation_runs_are_shown_and_cancelled(folder: Path, fake_slurm: FakeSlurm) -> None:
    uuid = _killed_before_the_answer(folder)
    fake_slurm.answer("squeue", f"900_1|PENDING||Priority|{uuid}|x\n900_0|RUNNING|n1|None|{uuid}|x\n")
    status = read_status(SweepPaths(folder))
    assert [(run.state, run.job_id) for run in status.runs] == [
        (RunState.RUNNING, "900_0"), (RunState.PENDING, "900_1"),
    ]  # fmt: skip
    assert len(cancel_runs(status, status.runs)) == 2
    assert fake_slurm.calls("scancel") == ["scancel --quiet 900_[0-1]"]


def test_a_lost_reply_while_squeue_is_down_is_settled_by_the_next_submit(folder: Path, fake_slurm: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(3, *SLURM))
    fake_slurm.lose_reply()
    fake_slurm.answer("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SilentError, match="Socket timed out"):
        submit(grid)
    with pytest.raises(SlurmError, match="Unable to contact"):
        submit(grid)  # to submit now could be to submit twice
    assert len(fake_slurm.calls("sbatch")) == 1
    fake_slurm.forget("squeue")
    assert submit(grid) == []
    assert read_submissions(SweepPaths(folder))[0].job_id == "101"
    assert len(fake_slurm.calls("sbatch")) == 1


def _killed_before_the_answer(folder: Path, executor: str = "slurm") -> str:
    """What a submit that was killed between intent and confirmation leaves; returns the intent's uuid."""
    folder.mkdir(parents=True)
    specs = make_specs(2, *SLURM)
    append_specs(SweepPaths(folder), specs)
    intent = write_intent(
        SweepPaths(folder), executor=executor, hardware="cpu_x1", run_ids=[spec.run_id for spec in specs]
    )
    return intent.uuid


def test_killed_after_sbatch_the_job_is_adopted(folder: Path, fake_slurm: FakeSlurm) -> None:
    uuid = _killed_before_the_answer(folder)
    fake_slurm.answer(
        "squeue", f"900_1|PENDING||Priority|{uuid}\n900_0|RUNNING|n1|None|{uuid}\n901|RUNNING|n1|None|x\n"
    )
    assert submit(make_grid(folder, make_specs(2, *SLURM))) == []
    assert fake_slurm.calls("sbatch") == []
    (submission,) = read_submissions(SweepPaths(folder))
    assert (submission.uuid, submission.job_id) == (uuid, "900")


def test_an_orphan_that_ran_by_a_clock_two_minutes_behind_is_found(
    folder: Path, fake_slurm: FakeSlurm, clock: list[float]
) -> None:
    """No accounting, and its node believes that it began before it was submitted: no second job all the same."""
    _killed_before_the_answer(folder)
    fake_slurm.answer("sacct", error="Slurm accounting storage is disabled\n", code=1)
    run = SweepPaths(folder).run(make_specs(2, *SLURM)[0].run_id)
    run.logs.mkdir(mode=0o700, parents=True)
    Journal(run).start(0, job_id="900_0", restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
    (line,) = read_lines(run.journal(0))
    run.journal(0).write_text(json.dumps({**line, "time": line["time"] - 120}) + "\n")
    submit(make_grid(folder, make_specs(2, *SLURM)))
    assert fake_slurm.calls("sbatch") == []
    assert [each.job_id for each in read_submissions(SweepPaths(folder))] == ["900"]


def test_killed_before_sbatch_the_intent_is_dropped_and_submitted_again(
    folder: Path, fake_slurm: FakeSlurm, clock: list[float]
) -> None:
    uuid = _killed_before_the_answer(folder)
    (array,) = submit(make_grid(folder, make_specs(2, *SLURM)))
    assert array.job_id == "101"
    assert _events(folder) == ["intent", "dropped", "intent", "confirmed"]
    assert read_submissions(SweepPaths(folder))[0].uuid != uuid
    assert sum(clock) >= 10, "what sbatch handed over a moment ago may not show yet"
    assert len(fake_slurm.calls("squeue")) <= 4, "three looks for the intent, and the status of runs that have none"


def test_a_job_that_shows_late_is_adopted(folder: Path, fake_slurm: FakeSlurm, clock: list[float]) -> None:
    uuid = _killed_before_the_answer(folder)
    late = f'[ -e "$here/seen" ] && echo "900_0|PENDING||Priority|{uuid}||end"; touch "$here/seen"\n'
    script = fake_slurm.bin / "squeue"
    script.write_text(script.read_text() + late)
    assert submit(make_grid(folder, make_specs(2, *SLURM))) == []
    assert read_submissions(SweepPaths(folder))[0].job_id == "900"
    assert fake_slurm.calls("sbatch") == []
    assert len(clock) == 1


def test_settled_intents_ask_nobody(folder: Path, fake_slurm: FakeSlurm) -> None:
    submit(make_grid(folder, make_specs(1, *SLURM)))
    fake_slurm.forget_calls()
    settle_intents(SweepPaths(folder))
    assert fake_slurm.calls() == []


def test_an_interrupted_run_is_submitted_again_with_the_same_id(folder: Path, fake_slurm: FakeSlurm) -> None:
    grid = make_grid(folder, make_specs(2, *SLURM))
    submit(grid)
    fake_slurm.clear_queue()
    for number, state in enumerate((RunState.PREEMPTED, RunState.FAILED)):
        paths = SweepPaths(folder).run(grid.specs[number].run_id)
        paths.folder.mkdir()
        journal = Journal(paths)
        journal.start(0, job_id=f"101_{number}", restart_count=0, node="n", pid=1, executor="slurm", world_size=1)
        journal.end(0, state=state, cause="x")
    (array,) = submit(grid)
    assert array.run_ids == (grid.specs[0].run_id,)
    fake_slurm.forget_calls()
    (retried,) = submit(grid, retry_failed=True)
    assert retried.run_ids == (grid.specs[1].run_id,)


def test_the_surrounding_job_is_not_seen(folder: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    submit(make_grid(folder, make_specs(1, *SLURM)))
    assert fake_slurm.seen_environment("sbatch") == []


def test_an_array_names_the_code_that_it_runs(folder: Path, fake_slurm: FakeSlurm) -> None:
    submit(make_grid(folder, make_specs(1, *SLURM)))
    (archive,) = (folder / "code").iterdir()
    (submission,) = read_submissions(SweepPaths(folder))
    assert submission.code is not None
    assert archive.name == f"{submission.code[:12]}.zip"
    assert f" {archive} --sweep-dir " in fake_slurm.script("101")
    assert json.loads(SweepPaths(folder).sweep.read_text())["code"]["snapshot"]["digest"] == submission.code


def test_nothing_is_written_when_the_code_cannot_be_frozen(folder: Path, fake_slurm: FakeSlurm) -> None:
    specs = [make_spec(*SLURM, snapshot__max_files=10)]
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"more than snapshot.max_files=10 files"):
        submit(make_grid(folder, specs))
    assert list(folder.iterdir()) == []
    assert fake_slurm.calls("sbatch") == []


# --- the local executor ---


def test_a_local_queue_that_lives_is_adopted(folder: Path) -> None:
    """Killed between the start of the queue and the confirmation: a second queue would run everything twice."""
    uuid = _killed_before_the_answer(folder, executor="local")
    # A process that looks like the queue: the module's name and the intent are among its arguments.
    queue = start_lookalike("hpc_trainer.launch.local_queue", "--intent", uuid)
    try:
        settle_intents(SweepPaths(folder))
        (submission,) = read_submissions(SweepPaths(folder))
        assert submission.job_id == process_name(queue.pid)
    finally:
        queue.kill()
        queue.communicate()


def test_a_local_queue_that_never_started_is_dropped(folder: Path) -> None:
    _killed_before_the_answer(folder, executor="local")
    settle_intents(SweepPaths(folder))
    assert read_submissions(SweepPaths(folder)) == []


def test_nothing_local_asks_slurm(folder: Path, fake_slurm: FakeSlurm) -> None:
    _killed_before_the_answer(folder, executor="local")
    settle_intents(SweepPaths(folder))
    assert fake_slurm.calls() == []


def test_the_local_queue_outlives_the_command_and_knows_its_intent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    children: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def record(argv: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(argv)
        assert options["start_new_session"] is True
        children.append(real([sys.executable, "-S", "-c", "pass"], **options))  # type: ignore[call-overload]
        return children[0]

    monkeypatch.setattr(subprocess, "Popen", record)
    monkeypatch.setattr("hpc_trainer.launch.submit.code_revision", lambda _: {})
    (array,) = submit(make_grid(folder, make_specs(2), Executor.local))
    (argv,) = started
    children[0].wait()
    (submission,) = read_submissions(SweepPaths(folder))
    assert argv[-2:] == list(array.run_ids)
    assert submission.uuid in argv
    assert submission.job_id == array.job_id
    write_confirmation(SweepPaths(folder), submission, array.job_id)
    assert _events(folder)[:2] == ["intent", "confirmed"]


def test_a_local_queue_starts_runs_from_the_frozen_code_if_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(submit_module.subprocess, "Popen", lambda argv, **_: started.append(argv))
    plan = make_plan(tmp_path / "runs" / "sweep", make_specs(2))
    plan.grid.sweep.local_logs.mkdir(parents=True)
    submit_module._start_queue(plan, [])
    submit_module._start_queue(dataclasses.replace(plan, code="a" * 64), [])
    installed, frozen = started
    archive = str(archive_of(plan.grid.sweep, "a" * 64))
    assert "--archive" not in installed
    assert frozen[frozen.index("--archive") + 1] == archive
    assert [word for word in frozen if word not in ("--archive", archive)] == installed


_NO_ROOM = "Batch job submission failed: Job violates accounting/QOS policy (QOSMaxSubmitJobPerUserLimit)"
_DRAINED = "allocation failure: Requested node configuration is not available"
_WRONG = "allocation failure: Invalid account or account/partition combination specified"
_LATE = "allocation failure: Socket timed out on send/recv operation"


@pytest.mark.parametrize(
    ("error", "note", "problem"),
    [
        (_NO_ROOM, f"Slurm has no room for cpu_x1 now: {_NO_ROOM}", None),
        (_DRAINED, f"Slurm cannot start cpu_x1 as the nodes are now: {_DRAINED}", None),
        (_WRONG, None, f"Slurm would refuse hardware=cpu_x1: {_WRONG}"),
        (_LATE, f"sbatch --test-only did not answer: {_LATE}", None),
    ],
)
def test_what_slurm_says_of_a_shape_is_a_note_or_a_problem_and_is_kept_with_the_shape(
    folder: Path, fake_slurm: FakeSlurm, error: str, note: str | None, problem: str | None
) -> None:
    made = make_plan(folder, make_specs(2, *SLURM))
    plan = dataclasses.replace(made, notes=("an earlier note",))
    shape = plan.arrays[0].shape
    fake_slurm.answer("test-only", code=1, error=f"sbatch: error: {error}\n")
    asked = ask_slurm(plan)
    assert asked.notes == ("an earlier note", *filter(None, [note]))
    assert asked.problems == tuple(filter(None, [problem]))
    assert asked.answers[shape] == (None, note or problem)
    assert asked.starts == (None,)
    assert len(fake_slurm.calls("test-only")) == 1


def test_a_shape_that_was_accepted_before_is_not_asked_of(folder: Path, fake_slurm: FakeSlurm) -> None:
    plan = make_plan(folder, make_specs(2, *SLURM))
    shape = plan.arrays[0].shape
    assert ask_slurm(plan, frozenset({shape})).starts == (None,)
    assert fake_slurm.calls() == []
    asked = ask_slurm(plan)
    assert asked.starts == ("2026-01-01T00:00:00",)
    assert asked.answers[shape] == ("2026-01-01T00:00:00", None)
    wrong = dataclasses.replace(plan, problems=("something else",))
    fake_slurm.forget_calls()
    assert ask_slurm(wrong).problems == ("something else",)
    assert fake_slurm.calls() == []


def test_mail_is_an_option_of_sbatch_that_the_user_may_override() -> None:
    cluster = {"name": "lab", "sbatch": {"mail-type": "ALL"}}
    assert with_mail({"cluster": cluster}) is cluster
    assert with_mail({"cluster": cluster, "notify": {"mail": None}}) is cluster
    options = {"mail-user": "ann@lab", "mail-type": "ALL"}
    assert with_mail({"cluster": cluster, "notify": {"mail": "ann@lab"}}) == {"name": "lab", "sbatch": options}
    plain = {"name": "lab", "sbatch": {"mail-user": "ann@lab", "mail-type": "END,FAIL"}}
    assert with_mail({"cluster": {"name": "lab"}, "notify": {"mail": "ann@lab"}}) == plain
