"""squeue, read on what releases 22.05 and 24.11 print."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpc_trainer.errors import SlurmError, UnclearError
from hpc_trainer.slurm.queue import array_of, find_by_uuid, is_of, job_name, parse_queue, read_queue
from tests.unit.slurm.fake_slurm import FakeSlurm

# squeue -a -r -o '%i|%T|%N|%r|%k|%j|end' on 22.05: elements one by one, a finished one completing, a requeued one
# waiting.
SQUEUE = """\
JOBID|STATE|NODELIST|REASON|COMMENT|NAME|end
1080_5|PENDING||Resources|0123456789abcdef0123456789abcdef|digits-01234567|end
1080_6|PENDING||JobHeldUser|0123456789abcdef0123456789abcdef|digits-01234567|end
1080_0|RUNNING|gpu003|None|0123456789abcdef0123456789abcdef|digits-01234567|end
1080_1|RUNNING|gpu[001-002,007]|None|0123456789abcdef0123456789abcdef|digits-01234567|end
1080_2|COMPLETING|gpu004|NonZeroExitCode|0123456789abcdef0123456789abcdef|digits-01234567|end
1080_3|PENDING||BeginTime|0123456789abcdef0123456789abcdef|digits-01234567|end
1081|RUNNING|cn1|None|(null)|digits-89abcdef|end
1082+0|RUNNING|cn2|None|a comment | with a bar|their job|end
1083_[5-1024%4]|PENDING||JobArrayTaskLimit|x||end
1084|SPECIAL_EXIT||Job requeued in held state|(null)|a name
of two lines|end
"""
EMPTY = SQUEUE.splitlines(keepends=True)[0]


def test_squeue() -> None:
    entries = parse_queue(SQUEUE)
    assert list(entries) == [
        "1080_5", "1080_6", "1080_0", "1080_1", "1080_2", "1080_3", "1081", "1082+0", "1083_[5-1024%4]", "1084",
    ]  # fmt: skip
    assert (entries["1080_1"].state, entries["1080_1"].node) == ("RUNNING", "gpu[001-002,007]")
    assert (entries["1080_3"].state, entries["1080_3"].node, entries["1080_3"].reason) == ("PENDING", "", "BeginTime")
    assert entries["1080_0"].comment == "0123456789abcdef0123456789abcdef"
    assert entries["1081"].comment == ""
    assert entries["1082+0"].comment == "a comment | with a bar"
    assert entries["1080_6"].reason == "JobHeldUser"


def test_the_first_jobs_of_a_new_controller_have_ids_of_one_digit() -> None:
    assert list(parse_queue(f"{EMPTY}7_0|PENDING||Priority|x|y|end\n8|PENDING||Priority|x|y|end\n")) == ["7_0", "8"]


@pytest.mark.parametrize("text", [EMPTY, EMPTY.rstrip(), f"Welcome.\n\n{EMPTY}", f"{EMPTY}\n\n"])
def test_an_empty_queue(text: str) -> None:
    assert parse_queue(text) == {}


@pytest.mark.parametrize(
    "text",
    [
        "", "\n\n", "JOBID PARTITION NAME\n", "slurm_load_jobs error: something else\n", SQUEUE[:-1] + "x\n",
        EMPTY[:-3], f"{EMPTY}1085|PENDING|end\n", f"{EMPTY}slurm_load_jobs error: something else\n",
        f"{EMPTY}||||||end\n",
        f"{EMPTY}1085|RUN\n1086|RUNNING|n1|None|x|y|end\n", f"{SQUEUE}Killed\n",
    ],
)  # fmt: skip
def test_what_squeue_does_not_print_is_no_answer(text: str) -> None:
    with pytest.raises(SlurmError, match="squeue"):
        parse_queue(text)


def test_an_answer_that_cannot_be_read_is_quoted_at_its_beginning_and_a_cut_one_at_its_end() -> None:
    with pytest.raises(UnclearError) as unreadable:
        parse_queue("x" * 300)
    assert str(unreadable.value) == f"the answer of squeue cannot be read: '{'x' * 200}'"
    with pytest.raises(UnclearError) as cut:
        parse_queue(EMPTY + "y" * 300)
    assert str(cut.value) == f"the answer of squeue was cut: it ends with '{'y' * 80}'"
    with pytest.raises(UnclearError, match="cannot be read: 'nothing'"):
        parse_queue(" \n")


def test_wherever_a_queue_is_cut_rows_are_whole_or_there_is_no_answer() -> None:
    whole = parse_queue(SQUEUE)
    for length in range(len(SQUEUE)):
        try:
            entries = parse_queue(SQUEUE[:length])
        except SlurmError:
            continue
        assert SQUEUE[:length].rstrip().endswith("|end"), SQUEUE[:length]
        assert entries == {key: whole[key] for key in list(whole)[: len(entries)]}


def test_an_intent_finds_its_array_by_comment_or_name() -> None:
    entries = list(parse_queue(SQUEUE).values())
    assert find_by_uuid(entries, "0123456789abcdef0123456789abcdef") == "1080"
    assert find_by_uuid(entries, "89abcdef000000000000000000000000") == "1081", "the comment is gone"
    assert find_by_uuid(entries, "89abcdee000000000000000000000000") is None
    assert find_by_uuid(entries, "") is None
    assert job_name("digits", "0123456789abcdef0123456789abcdef") == "digits-01234567"


@pytest.mark.parametrize("job_id", ["123", "123_4", "123_[5-9%2]", "123+0", "123.batch"])
def test_the_array_of_an_element(job_id: str) -> None:
    assert array_of(job_id) == "123"


def test_a_job_is_of_a_submission_by_comment_or_name() -> None:
    entries = parse_queue(SQUEUE)
    uuid = "0123456789abcdef0123456789abcdef"
    assert [job_id for job_id, entry in entries.items() if is_of(entry, uuid)] == [
        f"1080_{i}" for i in (5, 6, 0, 1, 2, 3)
    ]
    assert is_of(entries["1081"], "89abcdef" + 24 * "0")
    assert not is_of(entries["1082+0"], "")


# --- how it is asked ---


def test_the_queue_is_asked_once_element_by_element(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("squeue", SQUEUE)
    assert len(read_queue()) == 10
    (call,) = fake_slurm.calls()
    assert "-r" in call.split()
    assert "%i|%T|%N|%r|%k|%j|end" in call
    assert "-a" in call.split(), "jobs in hidden partitions"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without a name")
def test_a_user_without_a_name_in_a_container_has_a_queue_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lies in a folder that only we may enter
        fake = FakeSlurm(Path(folder) / "fake-slurm")
        monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
        fake.print("squeue", SQUEUE)
        for path in (Path(folder), *Path(folder).rglob("*")):
            os.chown(path, 54321, 54321)
        done = _read_queue_as(54321)
        assert (done.stdout.strip(), done.returncode) == ("10", 0), done.stderr
        assert "-u 54321" in fake.calls("squeue")[0]


def _read_queue_as(user: int) -> subprocess.CompletedProcess[str]:
    code = "from hpc_trainer.slurm.queue import read_queue; print(len(read_queue()))"
    # The packages may lie where only root looks: they are imported before the user changes.
    program = f"import os, hpc_trainer.slurm.queue; os.setgid({user}); os.setuid({user}); {code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd="/")


def test_a_queue_that_does_not_answer_is_an_error(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
        read_queue()
