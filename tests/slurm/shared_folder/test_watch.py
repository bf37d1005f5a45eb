"""What the watcher calls false: states that never were, however short, and states that are late for too long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.slurm.shared_folder.watch import SHOWN, TRUE, Look, falsehoods, read_looks

_AGE_S = 60.0


def _looks(*pairs: tuple[str, str], every_s: float = 10.0) -> list[Look]:
    """One look at the truth and one at what is shown, every so many seconds."""
    looks = []
    for number, states in enumerate(pairs):
        for who, state in zip((TRUE, SHOWN), states, strict=True):
            begin = number * every_s + (who == SHOWN)
            looks.append(Look(who, begin, begin + 0.5, {"a": (state, "why")} if state else {}))
    last = pairs[-1][0]
    return [*looks, Look(TRUE, len(pairs) * every_s, len(pairs) * every_s + 0.5, {"a": (last, "why")})]


@pytest.mark.parametrize(
    "pairs",
    [
        (("PENDING", "PENDING"), ("RUNNING", "RUNNING"), ("COMPLETED", "COMPLETED")),
        (("PENDING", "RUNNING"), ("COMPLETED", "COMPLETED")),  # it was at work between two looks at the truth
        (("RUNNING", "RUNNING"), ("COMPLETED", "RUNNING"), ("COMPLETED", "RUNNING"), ("COMPLETED", "COMPLETED")),
        (("RUNNING", "PENDING"), ("REQUEUED", "PENDING"), ("RUNNING", "REQUEUED"), ("COMPLETED", "COMPLETED")),
        (("RUNNING", "RUNNING"), ("COMPLETED", "UNKNOWN"), ("COMPLETED", "COMPLETED")),
        (("", ""), ("PENDING", ""), ("RUNNING", "RUNNING")),  # the sweep was not seen yet
        (("RUNNING", "RUNNING"), ("FAILED", "PENDING"), ("RUNNING", "RUNNING")),  # somebody brought it back in between
    ],
)
def test_what_is_right_or_not_late_for_long(pairs: Sequence[tuple[str, str]]) -> None:
    assert falsehoods(_looks(*pairs), _AGE_S) == []


def test_a_state_that_never_was_is_false_however_short() -> None:
    pairs = (("RUNNING", "RUNNING"), ("COMPLETED", "FAILED"), ("COMPLETED", "COMPLETED"))
    (found,) = falsehoods(_looks(*pairs), _AGE_S)
    assert (found.state, found.truth, found.seconds, found.is_late) == ("FAILED", "COMPLETED", 10.0, False)
    first, *story = str(found).splitlines()
    assert first == "a FAILED (why) for 10.0 s while COMPLETED: never true"
    assert story[2:5] == [
        "    true      -1.0 to    -0.5 s: COMPLETED why",
        "    shown      0.0 to     0.5 s: FAILED why",
        "    true       9.0 to     9.5 s: COMPLETED why",
    ]


def test_a_run_that_nobody_brought_back_does_not_wait() -> None:
    pairs = (("RUNNING", "RUNNING"), ("FAILED", "PENDING"), ("FAILED", "FAILED"))
    (found,) = falsehoods(_looks(*pairs), _AGE_S)
    assert (found.state, found.truth, found.is_late) == ("PENDING", "FAILED", False)


@pytest.mark.parametrize(("state", "num_looks"), [("RUNNING", 7), ("UNKNOWN", 16)])
def test_a_state_is_late_beyond_the_caches_age(state: str, num_looks: int) -> None:
    pairs = (("RUNNING", "RUNNING"), *(("COMPLETED", state),) * num_looks, ("COMPLETED", "COMPLETED"))
    (found,) = falsehoods(_looks(*pairs), _AGE_S)
    assert (found.state, found.seconds, found.is_late) == (state, 10.0 * num_looks, state == "RUNNING")
    assert not falsehoods(_looks(pairs[0], *pairs[2:]), _AGE_S)


def test_while_the_server_does_not_know_either_an_end_is_no_falsehood() -> None:
    """A full quota lets a worker record nothing (exit 74). Both looks wait for what may come, and one waits longer."""
    ended = (("RUNNING", "RUNNING"), *(("UNKNOWN", "UNKNOWN"),) * 40, ("UNKNOWN", "FAILED"), ("PENDING", "PENDING"))
    assert falsehoods(_looks(*ended), _AGE_S) == []
    (found,) = falsehoods(_looks(("RUNNING", "RUNNING"), ("RUNNING", "FAILED"), ("RUNNING", "RUNNING")), _AGE_S)
    assert found.state == "FAILED"


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "looks.jsonl").write_text(
        '{"who": "true", "begin": 1.0, "end": 2.0, "states": {"a": ["RUNNING", ""]}}\n{"who": "sho'
    )
    assert read_looks(tmp_path / "looks.jsonl") == [Look(TRUE, 1.0, 2.0, {"a": ("RUNNING", "")})]
