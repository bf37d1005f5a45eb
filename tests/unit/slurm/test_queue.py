"""squeue and sacct, read on what releases 22.05 and 24.11 print."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpc_trainer.errors import SlurmError
from hpc_trainer.slurm.queue import (
    array_of,
    find_by_uuid,
    find_ended,
    job_name,
    parse_accounting,
    parse_queue,
    read_accounting,
    read_queue,
)
from tests.unit.slurm.fake_slurm import FakeSlurm

# squeue -h -r -o '%i|%T|%N|%r|%k|%j' on 22.05: elements one by one, a finished one completing, a requeued one waiting.
SQUEUE = """\
1080_5|PENDING||Resources|0123456789abcdef0123456789abcdef|digits-01234567
1080_6|PENDING||JobHeldUser|0123456789abcdef0123456789abcdef|digits-01234567
1080_0|RUNNING|gpu003|None|0123456789abcdef0123456789abcdef|digits-01234567
1080_1|RUNNING|gpu[001-002,007]|None|0123456789abcdef0123456789abcdef|digits-01234567
1080_2|COMPLETING|gpu004|NonZeroExitCode|0123456789abcdef0123456789abcdef|digits-01234567
1080_3|PENDING||BeginTime|0123456789abcdef0123456789abcdef|digits-01234567
1081|RUNNING|cn1|None|(null)|digits-89abcdef
1082+0|RUNNING|cn2|None|a comment | with a bar|their job
1083_[5-1024%4]|PENDING||JobArrayTaskLimit|x
1084|SPECIAL_EXIT||Job requeued in held state|(null)
slurm_load_jobs error: something else

1085|PENDING
"""


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


@pytest.mark.parametrize("text", ["", "\n\n", "JOBID PARTITION NAME\n"])
def test_an_empty_queue(text: str) -> None:
    assert parse_queue(text) == {}


def test_an_intent_finds_its_array_by_comment_or_name() -> None:
    entries = list(parse_queue(SQUEUE).values())
    assert find_by_uuid(entries, "other", "0123456789abcdef0123456789abcdef") == "1080"
    assert find_by_uuid(entries, "digits", "89abcdef000000000000000000000000") == "1081", "the comment is gone"
    assert find_by_uuid(entries, "other", "89abcdef000000000000000000000000") is None
    assert job_name("digits", "0123456789abcdef0123456789abcdef") == "digits-01234567"


def test_an_intent_finds_what_has_ended_in_the_accounting(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sacct", "77_0|COMPLETED|0:0|n1|3\n77_1|COMPLETED|0:0|n1|3\n")
    assert find_ended("digits", "0123456789abcdef0123456789abcdef", 0.0) == "77"
    (call,) = fake_slurm.calls("sacct")
    assert "--name digits-01234567" in call
    fake_slurm.answer("sacct", "")
    assert find_ended("digits", "0123456789abcdef0123456789abcdef", 0.0) is None


@pytest.mark.parametrize("job_id", ["123", "123_4", "123_[5-9%2]", "123+0", "123.batch"])
def test_the_array_of_an_element(job_id: str) -> None:
    assert array_of(job_id) == "123"


# sacct -n -P -X -o JobID,State,ExitCode,NodeList,ElapsedRaw: 22.05 (above) and 24.11 with its truncations (below).
SACCT = """\
201_0|COMPLETED|0:0|gpu001|3600
201_1|CANCELLED by 1000|0:0|None assigned|0
201_2|CANCELLED by 1000|0:15|gpu002|12
201_3|TIMEOUT|0:0|gpu[001-002]|3601
201_4|OUT_OF_MEMORY|0:125|gpu003|77
201_5|OUT_OF_ME+|0:125|gpu003|77
201_6|NODE_FAIL|1:0|gpu004|5
201_7|PREEMPTED|0:0|gpu004|5
201_8|FAILED|1:0|gpu004|
201_9|CANCELLED+|0:0|gpu004|5
201_[10-99%4]|PENDING|0:0|None assigned|0
202|FAILED|78:0|cn1|1
203||0:0|cn1|1
|FAILED|1:0|cn1|1
garbage
"""


def test_sacct() -> None:
    entries = parse_accounting(SACCT)
    states = {job_id: entry.state for job_id, entry in entries.items()}
    assert states == {
        "201_0": "COMPLETED", "201_1": "CANCELLED", "201_2": "CANCELLED", "201_3": "TIMEOUT",
        "201_4": "OUT_OF_MEMORY", "201_5": "OUT_OF_ME", "201_6": "NODE_FAIL", "201_7": "PREEMPTED", "201_8": "FAILED",
        "201_9": "CANCELLED", "201_[10-99%4]": "PENDING", "202": "FAILED", "203": "UNKNOWN",
    }  # fmt: skip
    assert (entries["201_3"].node, entries["201_3"].elapsed_s) == ("gpu[001-002]", 3601)
    assert entries["201_8"].elapsed_s == 0
    assert entries["202"].exit_code == "78:0"


# --- how they are asked ---


def test_the_queue_is_asked_once_element_by_element(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", SQUEUE)
    assert len(read_queue()) == 10
    (call,) = fake_slurm.calls()
    assert "-r" in call.split()
    assert "%i|%T|%N|%r|%k" in call


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without a name")
def test_a_user_without_a_name_in_a_container_has_a_queue_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lies in a folder that only we may enter
        fake = FakeSlurm(Path(folder) / "fake-slurm")
        monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
        fake.answer("squeue", SQUEUE)
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


def test_the_accounting_is_asked_once_for_all_arrays(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sacct", SACCT)
    assert len(read_accounting(["202", "201", "201"])) == 13
    (call,) = fake_slurm.calls()
    assert call.endswith("-j 201,202")
    assert "-S" in call.split(), "by default sacct looks back to midnight only"


def test_no_jobs_ask_nothing(fake_slurm: FakeSlurm) -> None:
    assert read_accounting([]) == {}
    assert fake_slurm.calls() == []


def test_a_site_without_accounting_has_none(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sacct", error="Slurm accounting storage is disabled\n", code=1)
    assert read_accounting(["201"]) == {}


def test_a_queue_that_does_not_answer_is_an_error(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
        read_queue()
