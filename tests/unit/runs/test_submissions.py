"""Intent, confirmation, drop: what was about to be submitted, and what became of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.errors import UntrustedFileError
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.submissions import (
    Submission,
    latest_of_each_run,
    read_submissions,
    write_confirmation,
    write_dropped,
    write_intent,
)


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    return SweepPaths(tmp_path)


def _intent(paths: SweepPaths, *run_ids: str, executor: str = "slurm") -> Submission:
    return write_intent(paths, executor=executor, hardware="cpu_x1", run_ids=run_ids)


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
    assert read_submissions(paths) == []
    second = _intent(paths, "b")
    assert read_submissions(paths) == [second]


def test_submissions_that_others_may_write_are_refused(paths: SweepPaths) -> None:
    _intent(paths, "a")
    paths.submissions.chmod(0o622)
    with pytest.raises(UntrustedFileError):
        read_submissions(paths)
