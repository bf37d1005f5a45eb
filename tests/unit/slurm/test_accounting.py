"""sacct, read on what releases 22.05 and 24.11 print: how jobs ended, and every start of one with its seconds."""

from __future__ import annotations

import re
import time

import pytest

from hpc_trainer.errors import SilentError, SlurmError, UnclearError
from hpc_trainer.slurm.queue import (
    AccountingEntry,
    Allocation,
    ask_allocations,
    ask_left,
    find_ended,
    is_of,
    keeps_accounting,
    left_of,
    parse_accounting,
    parse_allocations,
    read_accounting,
)
from tests.unit.slurm.fake_slurm import ACCOUNTING_HEADER, FakeSlurm

# sacct -p -X -o JobID,State,..: 22.05 (above) and 24.11 with its truncations (below).
SACCT = """\
JobID|State|ExitCode|NodeList|JobName|Comment|End|
201_0|COMPLETED|0:0|gpu001|digits-01234567|||
201_1|CANCELLED by 1000|0:0|None assigned|digits-01234567|||
201_2|CANCELLED by 1000|0:15|gpu002|digits-01234567|||
201_3|TIMEOUT|0:0|gpu[001-002]|digits-01234567|||
201_4|OUT_OF_MEMORY|0:125|gpu003|digits-01234567|||
201_5|OUT_OF_ME+|0:125|gpu003|digits-01234567|||
201_6|NODE_FAIL|1:0|gpu004|digits-01234567|||
201_7|PREEMPTED|0:0|gpu004|digits-01234567|||
201_8|FAILED|1:0|gpu004|digits-01234567|||
201_9|CANCELLED+|0:0|gpu004|digits-01234567|||
201_[10-99%4]|PENDING|0:0|None assigned|digits-01234567|||
202|FAILED|78:0|cn1|digits-01234567|||
203||0:0|cn1|digits-01234567|||
"""


def test_sacct() -> None:
    entries = parse_accounting(SACCT)
    states = {job_id: entry.state for job_id, entry in entries.items()}
    assert states == {
        "201_0": "COMPLETED", "201_1": "CANCELLED", "201_2": "CANCELLED", "201_3": "TIMEOUT",
        "201_4": "OUT_OF_MEMORY", "201_5": "OUT_OF_ME", "201_6": "NODE_FAIL", "201_7": "PREEMPTED", "201_8": "FAILED",
        "201_9": "CANCELLED", "201_[10-99%4]": "PENDING", "202": "FAILED", "203": "UNKNOWN",
    }  # fmt: skip
    assert entries["201_3"].node == "gpu[001-002]"
    assert entries["202"].exit_code == "78:0"
    assert (entries["202"].name, entries["202"].comment) == ("digits-01234567", "")


def test_every_value_of_a_row_is_read_and_a_job_without_an_end_has_none() -> None:
    rows = "".join(
        f"7_{index}|FAILED|1:0|n1|digits-01234567|a | bar|{end}|\n"
        for index, end in enumerate(("1795432325", "0", "Unknown", "1"))
    )
    entries = parse_accounting(ACCOUNTING_HEADER + rows)
    assert entries["7_0"] == AccountingEntry(
        job_id="7_0", state="FAILED", exit_code="1:0", node="n1", name="digits-01234567", comment="a | bar",
        end_time=1795432325.0,
    )  # fmt: skip
    assert [entry.end_time for entry in entries.values()] == [1795432325.0, None, None, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        "", "garbage\n", "sacct: error: slurmdbd\n", "JobID|State|\n", SACCT[:-5], SACCT + "garbage\n",
        SACCT + "|FAILED|1:0|cn1|x|||\n", SACCT + "204|FAILED|\n", SACCT[: SACCT.index("201_3") + 9] + "\n",
    ],
)  # fmt: skip
def test_what_sacct_does_not_print_is_no_answer(text: str) -> None:
    with pytest.raises(SlurmError, match="sacct"):
        parse_accounting(text)


@pytest.mark.parametrize(
    ("job_id", "covered"),
    [
        ("7", [0, 1, 2, 3, 9]), ("7_2", []), ("7_[0-2]", [0, 1, 2]), ("7_[1,3%1]", [1, 3]),
        ("7_[0-3:3%4]", [0, 1, 2, 3]), ("7_[1,...]", [0, 1, 2, 3, 9]), ("7_[0,2-...%4]", [0, 1, 2, 3, 9]),
    ],
)  # fmt: skip
def test_the_elements_that_a_row_may_stand_for(job_id: str, covered: list[int]) -> None:
    text = f"{SACCT.splitlines()[0]}\n{job_id}|PENDING|0:0||digits-01234567|||\n"
    (row,) = parse_accounting(text).values()
    assert [index for index in (0, 1, 2, 3, 9) if row.may_cover(index)] == covered


def test_a_row_is_of_a_submission_by_its_name() -> None:
    assert all(is_of(row, "01234567" + 24 * "0") for row in parse_accounting(SACCT).values())


def test_an_intent_finds_what_has_ended_in_the_accounting(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sacct", "76|COMPLETED|0:0|n1|their|\n77_0|COMPLETED|0:0|n1|digits-01234567|\n")
    assert find_ended("digits", "0123456789abcdef0123456789abcdef", 0.0) == "77"
    (call,) = fake_slurm.calls("sacct")
    assert "--name digits-01234567" in call
    fake_slurm.answer("sacct", "")
    assert find_ended("digits", "0123456789abcdef0123456789abcdef", 0.0) is None


def test_the_accounting_is_asked_once_for_all_arrays(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("sacct", SACCT)
    assert len(read_accounting(["202", "201", "201"], time.time() - 90 * 86_400)) == 13
    (call,) = fake_slurm.calls()
    assert call.endswith("-j 201,202")
    start = re.search(r" -S now-(\d+)seconds ", call)
    assert start is not None, "by default sacct of some versions looks back to midnight only"
    assert 600 <= int(start[1]) - 90 * 86_400 < 700, "clocks differ"


def test_a_time_to_come_is_asked_for_as_now_less_what_clocks_may_differ(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("sacct", SACCT)
    read_accounting(["201"], time.time() + 3600)
    assert " -S now-600seconds " in fake_slurm.calls()[0]


def test_more_jobs_than_one_word_of_a_command_may_name_are_asked_in_several_calls(fake_slurm: FakeSlurm) -> None:
    """128 KiB on Linux: 20,000 runs with a successor job each were UNKNOWN for good."""
    fake_slurm.print("sacct", SACCT)
    ids = [str(10_000_000 + number) for number in range(20_000)]
    assert len(read_accounting(ids, time.time())) == 13
    asked = [call.rpartition(" -j ")[2].split(",") for call in fake_slurm.calls("sacct")]
    assert [job_id for each in asked for job_id in each] == ids
    fake_slurm.print("sacct", ANSWER)
    assert len(ask_allocations(ids, time.time())) == 2 * len(asked)


def test_no_jobs_ask_nothing(fake_slurm: FakeSlurm) -> None:
    assert read_accounting([], 0.0) == {}
    assert fake_slurm.calls() == []


def test_a_site_without_accounting_has_none(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sacct", error="Slurm accounting storage is disabled\n", code=1)
    assert read_accounting(["201"], 0.0) == {}


# --- allocations ---

# Printed by sacct 22.05 of an array element that was requeued once, with SLURM_TIME_FORMAT=%s.
ANSWER = """JobID|Start|End|ElapsedRaw|State|
2_0|1795432300|1795432325|25|PREEMPTED|
2_0|1795432330|1795432349|19|COMPLETED|
"""
FIRST = Allocation(
    job_id="2_0", start_time=1795432300.0, end_time=1795432325.0, elapsed_s=25.0, state="PREEMPTED"
)  # fmt: skip


def test_each_start_is_an_allocation() -> None:
    found = parse_allocations("a word of the site\n" + ANSWER)
    assert found[0] == FIRST
    assert [(each.elapsed_s, each.state) for each in found] == [(25.0, "PREEMPTED"), (19.0, "COMPLETED")]


@pytest.mark.parametrize(
    "row",
    [
        "2_0|1795432330|Unknown|19|RUNNING|", "2_1|Unknown|Unknown|0|PENDING|", "2_1|None|1795432330|0|CANCELLED by 0|",
        "2_1|0|1795432330|0|CANCELLED|",
    ],
)  # fmt: skip
def test_what_has_not_begun_or_not_ended_is_left_out(row: str) -> None:
    assert parse_allocations(ANSWER + row + "\n")[2:] == []


@pytest.mark.parametrize("answer", ["", "nothing\n", ANSWER + "2_0|1|2\n"])
def test_an_answer_that_tells_no_allocations(answer: str) -> None:
    with pytest.raises(UnclearError, match=r"cannot be read|was cut"):
        parse_allocations(answer)


def test_one_call_for_all_jobs(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("sacct", ANSWER)
    assert ask_allocations([], 0.0) == []
    assert fake_slurm.calls() == []
    assert ask_allocations(["2_0", "3"], 1000.0)[0] == FIRST
    (call,) = fake_slurm.calls("sacct")
    assert " -D " in call
    assert call.endswith("-j 2_0,3")


def test_a_site_without_accounting_knows_no_allocation(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("sacct", "", code=1, error="Slurm accounting storage is disabled")
    assert ask_allocations(["2_0"], 0.0) == []
    fake_slurm.print("sacct", "", code=1, error="sacct: error: Connection refused: Unable to contact slurmdbd")
    with pytest.raises(SilentError):
        ask_allocations(["2_0"], 0.0)


def test_hours_left_are_the_limit_less_what_was_used_and_what_runs() -> None:
    rows = [["lab", "", "cpu=6000,gres/gpu=600", "cpu=1200,gres/gpu=60", "cpu=600,gres/gpu=0"]]
    assert left_of(rows) == {"gpu": 9.0, "core": 70.0}
    assert left_of([*rows, ["lab", "", "gres/gpu=120", "gres/gpu=180", ""]]) == {"gpu": 0.0, "core": 70.0}
    assert left_of([["lab", "", "", "cpu=1200", ""]]) == {}, "no limit"
    two = [
        ["lab", "", f"gres/gpu={limit}", "gres/gpu:a100=30,gres/gpu:h100=30", "gres/gpu=n/a"] for limit in (600, 180)
    ]
    assert left_of(two) == left_of(two[::-1]) == {"gpu": 2.0}, "the smaller of two limits"


def test_hours_left_are_those_of_the_account_itself(fake_slurm: FakeSlurm) -> None:
    rows = (
        "Account|User|GrpTRESMins|GrpTRESRaw|TRESRunMins|",
        "lab||gres/gpu=600|gres/gpu=60|gres/gpu=0|",
        " lab|ann|gres/gpu=60|gres/gpu=0|gres/gpu=0|",
        "other||gres/gpu=120|gres/gpu=0|gres/gpu=0|",
    )
    fake_slurm.print("sshare", "".join(f"{row}\n" for row in rows))
    assert ask_left("lab") == {"gpu": 9.0}
    assert fake_slurm.calls() == ["sshare -p -A lab -o Account,User,GrpTRESMins,GrpTRESRaw,TRESRunMins"]


@pytest.mark.parametrize(
    ("error", "keeps"),
    [("", True), ("Slurm accounting storage is disabled", False), ("Unable to contact slurmdbd", True)],
)
def test_only_sacct_itself_says_that_there_is_no_accounting(fake_slurm: FakeSlurm, error: str, keeps: bool) -> None:
    fake_slurm.print("sacct", "", code=int(bool(error)), error=f"{error}\n")
    assert keeps_accounting() is keeps
