"""Intent, confirmation, drop: what was about to be submitted, and what became of it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.errors import RunStateError, UntrustedFileError
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import Faults, read_lines
from hpc_trainer.record.submissions import (
    SUCCESSOR,
    TOP_UP,
    Book,
    Removed,
    Submission,
    Waiting,
    as_digest,
    as_job_id,
    as_race,
    as_run_ids,
    claim_run,
    claimed_by,
    latest_of_each_run,
    newest_of_run,
    read_ledger,
    read_removed,
    read_removed_sweep,
    read_submissions,
    rivals_of_each_run,
    winner_of,
    write_confirmation,
    write_doubt,
    write_dropped,
    write_intent,
    write_refused,
    write_removed,
    write_removed_sweep,
    write_waiting,
)
from hpc_trainer.slurm.commands import user_name


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    return SweepPaths(tmp_path)


def _intent(paths: SweepPaths, *run_ids: str, executor: str = "slurm") -> Submission:
    return write_intent(paths, executor=executor, hardware="cpu_x1", run_ids=run_ids)


def test_copies_of_what_has_its_lines_are_not_read(paths: SweepPaths) -> None:
    """A look at 10,000 submissions reads one file."""
    answered, dropped, open_ = (_intent(paths, each) for each in "abc")
    write_confirmation(paths, answered, "7")
    write_dropped(paths, dropped, "nobody has it")
    for intent in (answered, dropped):
        (paths.intents / f"{intent.uuid}.json").write_text("damaged\n")
    assert read_ledger(paths).damage == ()
    (paths.intents / f"{open_.uuid}.json").write_text("damaged\n")
    assert read_ledger(paths).damage != ()


def test_an_intent_without_an_answer_stands_alone(paths: SweepPaths) -> None:
    assert read_submissions(paths) == []
    intent = _intent(paths, "a", "b")
    assert read_submissions(paths) == [intent]
    assert (intent.job_id, intent.element_id(0)) == (None, None)
    assert len(intent.uuid) == 32


def test_a_confirmed_intent_has_its_job(paths: SweepPaths) -> None:
    intent = _intent(paths, "a", "b")
    write_confirmation(paths, intent, "77")
    (read,) = read_submissions(paths)
    assert (read.job_id, read.run_ids, read.element_id(1)) == ("77", ("a", "b"), "77_1")


@pytest.mark.parametrize("job_id", ["7\0", "../../7", "7 8", "", "7" * 301])
def test_a_job_id_that_is_none_is_a_damaged_line(paths: SweepPaths, job_id: str) -> None:
    """Names of files are made of it: a NUL ended `status` in a traceback."""
    intent = _intent(paths, "a", "b")
    write_confirmation(paths, intent, job_id)
    ledger = read_ledger(paths)
    assert [each.job_id for each in ledger.submissions] == [None]
    assert any("job_id is not a job id" in str(each) for each in ledger.damage)


@pytest.mark.parametrize("code", ["\0", "../../c", "C" * 64, ""])
def test_a_digest_that_is_none_is_a_damaged_line(paths: SweepPaths, code: str) -> None:
    """The archive's name is made of it: a waiting run was refused for good by its own command."""
    write_waiting(paths, ["a"], reason="no room", code=code)
    ledger = read_ledger(paths)
    assert (ledger.waiting, ledger.refused) == ({}, {})
    assert any("code is not a digest" in str(each) for each in ledger.damage)


def test_local_runs_share_the_queues_id(paths: SweepPaths) -> None:
    intent = _intent(paths, "a", "b", executor="local")
    write_confirmation(paths, intent, "host:1:2.00")
    assert read_submissions(paths)[0].element_id(1) == "host:1:2.00"


def test_a_dropped_intent_is_gone(paths: SweepPaths) -> None:
    first, second = _intent(paths, "a"), _intent(paths, "a")
    assert first.uuid != second.uuid
    write_dropped(paths, first, "the scheduler does not know it")
    assert read_submissions(paths) == [second]


def test_the_newest_submission_of_each_run(paths: SweepPaths) -> None:
    first, second = _intent(paths, "a", "b", "c"), _intent(paths, "c", "b")
    latest = latest_of_each_run(read_submissions(paths))
    assert latest == {"a": (first, 0), "b": (second, 1), "c": (second, 0)}


def test_a_torn_intent_was_not_submitted(paths: SweepPaths) -> None:
    _intent(paths, "a")
    data = paths.submissions.read_bytes()
    paths.submissions.write_bytes(data[:-10])
    shutil.rmtree(paths.intents)  # its writer was killed before it came to the copy
    assert read_submissions(paths) == []
    second = _intent(paths, "b")
    assert read_submissions(paths) == [second]


def test_submissions_that_others_may_write_are_refused(paths: SweepPaths) -> None:
    _intent(paths, "a")
    paths.submissions.chmod(0o622)
    with pytest.raises(UntrustedFileError):
        read_submissions(paths)


def test_what_was_asked_for_is_read_again(paths: SweepPaths) -> None:
    """A later submit counts by it, and a successor job takes its code."""
    before = time.time()
    intent = write_intent(paths, executor="slurm", hardware="gpu_x16", run_ids=["a"], parallelism=7, code="c" * 64)
    (read,) = read_submissions(paths)
    assert (read.hardware, read.kind, read.parallelism, read.code) == ("gpu_x16", "array", 7, "c" * 64)
    assert before <= read.time == intent.time <= time.time()


def test_an_intent_of_before_there_were_kinds_is_an_array(paths: SweepPaths) -> None:
    record = {"event": "intent", "uuid": "1" * 32, "executor": "slurm", "hardware": "x", "run_ids": ["a"], "time": 5.0}
    paths.submissions.write_text(json.dumps(record) + "\n")
    (read,) = read_submissions(paths)
    assert (read.kind, read.parallelism, read.code, read.job_id) == ("array", None, None, None)


def test_a_doubt_has_its_own_time(paths: SweepPaths) -> None:
    intent = _intent(paths, "a")
    _backdate(paths, 500.0)
    write_doubt(paths, intent)
    (read,) = read_ledger(paths).unsettled
    assert read.doubt_time is not None
    assert read.doubt_time - read.time == pytest.approx(500.0, abs=60.0)


def _backdate(book: Book, age_s: float) -> None:
    """The last line was written `age_s` ago."""
    lines = list(read_lines(book.submissions))
    lines[-1]["time"] -= age_s
    book.submissions.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_top_up_job_is_settled_as_an_array_is_and_has_no_runs(paths: SweepPaths) -> None:
    array = _intent(paths, "a")
    top_up = write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=(), kind=TOP_UP)
    ledger = read_ledger(paths)
    assert (ledger.submissions, ledger.top_ups, ledger.unsettled) == ([array], [top_up], [array, top_up])
    write_confirmation(paths, top_up, "7")
    write_dropped(paths, array, "x")
    ledger = read_ledger(paths)
    assert ([each.job_id for each in ledger.top_ups], ledger.submissions, ledger.unsettled) == (["7"], [], [])


# --- the sweep's own queue ---


def test_a_run_waits_until_it_is_submitted(paths: SweepPaths) -> None:
    write_waiting(paths, ["a", "b", "c"], "no room", "1" * 64)
    write_waiting(paths, ["d"], "still no room", None)
    first, other = Waiting(reason="no room", code="1" * 64), Waiting(reason="still no room", code=None)
    assert read_ledger(paths).waiting == {"a": first, "b": first, "c": first, "d": other}
    taken = _intent(paths, "b", "d")
    assert read_ledger(paths).waiting == {"a": first, "c": first}
    write_dropped(paths, taken, "the scheduler does not know it")
    assert read_ledger(paths).waiting == {"a": first, "b": first, "c": first, "d": other}, "as before, with its code"
    write_confirmation(paths, _intent(paths, "b", "d"), "7")
    assert read_ledger(paths).waiting == {"a": first, "c": first}


def test_an_array_that_nobody_waited_for_leaves_nobody_waiting_when_it_is_dropped(paths: SweepPaths) -> None:
    write_dropped(paths, _intent(paths, "a"), "x")
    assert read_ledger(paths).waiting == {}


def test_what_slurm_refused_waits_no_longer_until_it_is_submitted_again(paths: SweepPaths) -> None:
    write_waiting(paths, ["a", "b"], "no room", None)
    write_refused(paths, ["a"], "Invalid qos specification")
    ledger = read_ledger(paths)
    assert (list(ledger.waiting), ledger.refused) == (["b"], {"a": "Invalid qos specification"})
    _intent(paths, "a")
    assert read_ledger(paths).refused == {}


# --- successor jobs: in the run's own file ---


def _successor(run: RunPaths, after: str, job_id: str | None = None) -> Submission:
    intent = write_intent(run, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id], kind=SUCCESSOR, after=after)
    if job_id is not None:
        write_confirmation(run, intent, job_id)
    return read_submissions(run)[-1]


@pytest.fixture
def run(paths: SweepPaths) -> RunPaths:
    run = paths.run("b")
    run.folder.mkdir()
    return run


def test_a_successor_is_a_job_of_its_own(run: RunPaths) -> None:
    assert _successor(run, "an array", "500").element_id(0) == "500"


def test_the_newest_of_a_run_is_what_was_written_last_in_either_file(paths: SweepPaths, run: RunPaths) -> None:
    assert newest_of_run(run, None) is None
    array = (_intent(paths, "a", "b"), 1)
    assert newest_of_run(run, array) == array
    first = _successor(run, array[0].uuid, "500")
    assert newest_of_run(run, array) == (first, 0)
    assert newest_of_run(run, None) == (first, 0), "the sweep's file is lost"
    second = _successor(run, first.uuid)
    assert newest_of_run(run, array) == (second, 0), "its submission was interrupted"
    again = (_intent(paths, "b"), 0)
    assert newest_of_run(run, again) == again
    write_dropped(run, second, "x")
    assert newest_of_run(run, array) == (first, 0)


@pytest.mark.parametrize("lost", [(1,), (0,), (0, 1)])
def test_a_doubt_stands_twice_too(paths: SweepPaths, lost: tuple[int, ...]) -> None:
    """Without it the job would be given up after 10 s and sent again, and the controller may take the first later."""
    intent = _intent(paths, "a")
    write_doubt(paths, intent)
    lines = paths.submissions.read_bytes().splitlines(keepends=True)
    paths.submissions.write_bytes(b"".join(line for place, line in enumerate(lines) if place not in lost))
    (read,) = read_ledger(paths).unsettled
    assert read.doubt_time == pytest.approx(time.time(), abs=60.0)


@pytest.mark.parametrize("line", ['{"event": "confirmed"}', '{"event": 7}', "[]", '{"event": "intent", "uuid": "x"}'])
def test_a_line_that_says_nothing_hides_no_other(paths: SweepPaths, line: str) -> None:
    intent = _intent(paths, "a")
    with paths.submissions.open("a") as file:
        file.write(line + "\n")
    write_confirmation(paths, intent, "77")
    assert [each.job_id for each in read_submissions(paths)] == ["77"]


def _raced(paths: SweepPaths, run_ids: tuple[str, ...], race: str | None) -> Submission:
    return write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=run_ids, race=race)


def test_jobs_of_one_run_on_several_shapes_are_rivals_until_it_is_submitted_anew(paths: SweepPaths) -> None:
    first, second = (_raced(paths, ("a", "b"), "0" * 32) for _ in range(2))
    assert rivals_of_each_run([first, second]) == {run: ((first, i), (second, i)) for i, run in enumerate("ab")}
    other = _raced(paths, ("b",), "1" * 32)
    assert rivals_of_each_run([first, second, other])["b"] == ((other, 0),)
    alone = _raced(paths, ("a",), None)
    assert list(rivals_of_each_run([first, second, other, alone])) == ["b"]


def test_one_job_has_the_run_and_says_so_again(paths: SweepPaths) -> None:
    run = paths.run("a")
    run.folder.mkdir()
    first, second = (_raced(paths, ("a",), "0" * 32) for _ in range(2))
    jobs = ((first, 0), (second, 0))
    assert winner_of(run, jobs) is None
    assert claimed_by(run, "0" * 32) is None
    assert claim_run(run, second)
    assert not claim_run(run, first)
    assert claim_run(run, second)
    assert winner_of(run, jobs) == (second, 0)
    assert claimed_by(run, "0" * 32) == second.uuid
    run.claim("0" * 32).write_text("{")
    with pytest.raises(RunStateError, match="exists but cannot be read, so the job that has a is unknown"):
        claim_run(run, first)


def test_if_the_claim_is_lost_the_attempts_tell_who_has_the_run(paths: SweepPaths) -> None:
    intents = [_raced(paths, ("a", "b"), "0" * 32) for _ in range(2)]
    for number, intent in enumerate(intents):
        write_confirmation(paths, intent, str(7 + number))
    first, second = read_submissions(paths)
    jobs = ((first, 1), (second, 1))
    assert winner_of(paths.run("b"), jobs, {"8_1"}) == (second, 1)
    assert winner_of(paths.run("b"), jobs, {"8_0"}) is None


def test_who_removed_a_run_and_when(paths: SweepPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    write_removed(paths, "a", "0" * 32)
    write_removed(paths, "b", "")
    (paths.removed / "c.json").write_text('{"user": "anna"}')
    (paths.removed / "d.json").write_text("{")
    (paths.removed / "note.txt").touch()
    faults = Faults()
    removed = Removed(user=user_name(), time=1000.0, uuid="0" * 32)
    names = [path.name for path in paths.folder.iterdir()]
    assert read_removed(paths, names, faults) == {"a": removed, "b": Removed(user=user_name(), time=1000.0)}
    assert len(faults) == 2
    assert read_removed(paths, [], faults) == {}
    clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(1000))
    assert removed.words == f"removed by {user_name()}, {clock}"
    assert read_removed_sweep(paths.folder) is None
    write_removed_sweep(paths.folder)
    assert read_removed_sweep(paths.folder) == Removed(user=user_name(), time=1000.0)


_DIGEST, _RACE = "0123456789abcdef" * 4, "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("convert", "right", "wrong", "words"),
    [
        (as_run_ids, ["a", "b"], ["a", ["a", 3], ["a", "b/c"], ("a",)], "run_ids is not a list of run ids"),
        (as_job_id, "123_4", [123, "", "1 2", "a" * 301], "job_id is not a job id"),
        (as_job_id, "a" * 300, [None], "job_id is not a job id"),
        (as_digest, _DIGEST, [_DIGEST[1:], f"{_DIGEST}0", _DIGEST.upper(), 3], "code is not a digest"),
        (as_race, _RACE, [_RACE[1:], f"{_RACE}0", _RACE.upper(), 3], "race is not an identifier"),
    ],
)
def test_what_names_files_is_checked(
    convert: Callable[[object], object], right: object, wrong: object, words: str
) -> None:
    assert convert(right) == (tuple(right) if isinstance(right, list) else right)
    for value in wrong:
        with pytest.raises(ValueError, match=words):
            convert(value)


def test_jobs_of_a_submission_have_ids_by_its_kind(paths: SweepPaths) -> None:
    array = _intent(paths, "a", "b", "c")
    assert (array.element_id(1), array.is_pool, array.num_elements) == (None, False, 3)
    pool = write_intent(
        paths, executor="slurm", hardware="x", run_ids=["a", "b", "c"], slots=1, per_node=2, per_gpu=2, source="search"
    )  # fmt: skip
    assert (pool.is_pool, pool.num_elements, pool.per_gpu) == (True, 1, 2)
    successor = write_intent(paths, executor="slurm", hardware="x", run_ids=["a"], kind=SUCCESSOR)
    local = _intent(paths, "a", executor="local")
    for intent in (array, pool, successor, local):
        write_confirmation(paths, intent, "vm:7" if intent is local else "7")
    assert [each.element_id(0) for each in read_submissions(paths)] == ["7_0", "7_0", "7", "vm:7"]
    assert local.per_gpu == 0, "each run has GPUs of its own"


def test_a_ledger_says_what_waits_for_an_answer_and_whether_slots_draw_runs(paths: SweepPaths) -> None:
    first, top_up = _intent(paths, "a"), write_intent(
        paths, executor="slurm", hardware="x", run_ids=(), kind=TOP_UP
    )  # fmt: skip
    ledger = read_ledger(paths)
    assert [each.uuid for each in ledger.unsettled] == [first.uuid, top_up.uuid]
    assert not ledger.is_search
    write_confirmation(paths, first, "7")
    write_intent(paths, executor="slurm", hardware="x", run_ids=(), slots=1, source="search")
    ledger = read_ledger(paths)
    assert [each.uuid == first.uuid for each in ledger.unsettled] == [False, False]
    assert ledger.is_search


def test_a_claim_that_cannot_be_read_is_told_and_names_nobody(paths: SweepPaths) -> None:
    run, race = paths.run("a"), "0" * 32
    own = write_intent(paths, executor="slurm", hardware="x", run_ids=["a"], race=race)
    run.folder.mkdir()
    assert claimed_by(run, race) is None
    for text in ("{", '{"uuid": 7}'):
        run.claim(race).write_text(text)
        faults = Faults()
        assert claimed_by(run, race, faults) is claimed_by(run, race) is None
        assert len(faults) == (text == "{")
        with pytest.raises(RunStateError, match="exists but cannot be read, so the job that has a is unknown"):
            claim_run(run, own)


def test_a_copy_without_its_line_comes_before_what_was_written_later(paths: SweepPaths) -> None:
    first, second, third = (_intent(paths, each) for each in "abc")
    write_confirmation(paths, third, "9")
    lines = paths.submissions.read_text().splitlines(keepends=True)
    for lost in (0, 1):
        paths.submissions.write_text("".join(line for number, line in enumerate(lines) if number != lost))
        found = [each.uuid for each in read_submissions(paths)]
        assert found == [first.uuid, second.uuid, third.uuid], lost


@pytest.mark.parametrize("letter", ["0", "f"])
def test_a_copy_under_the_name_of_another_submission_counts_for_nothing(paths: SweepPaths, letter: str) -> None:
    intent = _intent(paths, "a")
    paths.submissions.unlink()
    paths.intent(intent.uuid).rename(paths.intent(letter * 32))
    assert read_submissions(paths) == []
    paths.intent(letter * 32).rename(paths.intent(intent.uuid))
    assert [each.uuid for each in read_submissions(paths)] == [intent.uuid]
