"""What sbatch answers, told apart: accepted, refused, no room now, nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.errors import MissingCommandError, NoRoomError, RefusedError, SilentError, SlurmError, UnclearError
from hpc_trainer.slurm.commands import estimate_start, is_of_nodes, submit_script
from tests.unit.slurm.fake_slurm import FakeSlurm

FAILED = "sbatch: error: Batch job submission failed"
REFUSED = FAILED + ": Invalid account or account/partition combination specified\n"
LOST = [
    "Unable to contact slurm controller (receive failure)", "Unable to contact slurm controller (send failure)",
    "Message receive failure", "Unexpected message received", "Transport endpoint is not connected",
    "Connection reset by peer", "Broken pipe",
]  # fmt: skip
REFUSALS = [
    "Invalid partition name specified", "Requested node configuration is not available", "Access/permission denied",
    "Requested time limit is invalid (missing or exceeds some limit)", "Invalid job array specification",
    "Node count specification invalid", "Job dependency problem", "Invalid generic resource (gres) specification",
    "User's group not permitted to use this partition", "Requested operation is presently disabled",
    "Memory required by task is not available", "Required partition not available (inactive or drain)",
    "Pathname of a file, directory or other parameter too long", "Unspecified error", "Invalid qos specification",
    "Job violates accounting/QOS policy (job size and/or time limits)", "Requested reservation is invalid",
    "CPU count per node can not be satisfied", "Task count specification invalid", "Invalid feature specification",
]  # fmt: skip
FULL = (
    "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
    "accounting/QOS policy (job submit limit, user's size and/or time limits)\n"
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\n#SBATCH --array=0-1%1\ntrue\n")
    return path


def test_accepted(script: Path, fake_slurm: FakeSlurm) -> None:
    assert submit_script(script, options=["--begin=now+60"]) == "101"
    assert fake_slurm.calls("sbatch") == [f"sbatch --begin=now+60 {script}"]
    for text in ("Submitted batch job 7\n", "7;cluster\n", "info: hello\nSubmitted batch job 7 on cluster x\n"):
        fake_slurm.answer("sbatch", text)
        assert submit_script(script) == "7"


@pytest.mark.parametrize("text", ["Submitted batch job 12", "12", "Submitted batch", "1;clus"])
def test_half_a_number_is_another_jobs(script: Path, fake_slurm: FakeSlurm, text: str) -> None:
    """The answer was job 123456, and was cut: the queue knows by the uuid which one it is."""
    fake_slurm.answer("sbatch", text)
    with pytest.raises(UnclearError, match="cannot be read"):
        submit_script(script)


def test_an_answer_that_cannot_be_read_is_quoted(script: Path, fake_slurm: FakeSlurm) -> None:
    for output, error, quoted in (
        ("x" * 400, "", "x" * 300),
        ("", "sbatch: error: a word\nsbatch: error: a word\nsbatch: error: two\n", "a word; two"),
        ("", "", "nothing"),
    ):
        fake_slurm.answer("sbatch", output, error=error)
        with pytest.raises(UnclearError, match=f"^the answer of sbatch cannot be read: '{quoted}'\\. The controller"):
            submit_script(script)


@pytest.mark.parametrize(("code", "kind"), [(125, RefusedError), (126, UnclearError), (254, UnclearError)])
def test_the_codes_of_a_shell_say_nothing_of_the_job(
    script: Path, fake_slurm: FakeSlurm, code: int, kind: type[SlurmError]
) -> None:
    fake_slurm.answer("sbatch", error=REFUSED, code=code)
    with pytest.raises(SlurmError) as caught:
        submit_script(script)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (REFUSED, 1, RefusedError),
        (FULL, 1, NoRoomError),
        ("sbatch: error: AssocGrpSubmitJobsLimit\nsbatch: error: Batch job submission failed: x\n", 1, NoRoomError),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n", 1, NoRoomError),
        (f"{FAILED}: Socket timed out on send/recv operation\n", 1, SilentError),
        (f"{FAILED}: Zero Bytes were transmitted or received\n", 1, SilentError),
        *((f"{FAILED}: {words}\n", 1, SilentError) for words in LOST),
        # Nothing was sent.
        (f"{FAILED}: Unable to contact slurm controller (connect failure)\n", 1, RefusedError),
        # The same job is refused tomorrow too, whatever the general words after the reason say.
        (FULL.replace("QOSMaxSubmitJobPerUserLimit", "QOSMaxGRESPerJob"), 1, RefusedError),
        (FULL.replace("sbatch: error: QOSMaxSubmitJobPerUserLimit\n", ""), 1, NoRoomError),
        (f"{FAILED}: Resource temporarily unavailable\n", 1, NoRoomError),
        ("", 1, UnclearError),
        ("sbatch: warning: hello\n", 0, UnclearError),
        # After the job was accepted: a wrapper that is killed, or that fails at work of its own.
        ("", 137, UnclearError),
        (REFUSED, 137, UnclearError),
        (FULL, 143, UnclearError),
        ('/usr/local/bin/sbatch: line 12: 4711 Killed  /opt/slurm/bin/sbatch "$@"\n', 137, UnclearError),
        ("logger: cannot reach the log host\n", 1, UnclearError),
        ("Traceback (most recent call last):\nKeyError: 'project'\n", 1, UnclearError),
        (f"{FAILED}: Header lengths are longer than data received\n", 1, UnclearError),
        (f"{FAILED}: words of a release to come\n", 1, UnclearError),
        # What Slurm and sbatch refuse with.
        *((f"{FAILED}: {words}\n", 1, RefusedError) for words in REFUSALS),
        (f"sbatch: error: GPU jobs only here\n{FAILED}: Unspecified error\n", 1, RefusedError),
        ("sbatch: error: Unable to open file job.sh\n", 1, RefusedError),
        ("sbatch: unrecognized option '--nope'\nTry \"sbatch --help\" for more information\n", 255, RefusedError),
    ],
)
def test_each_answer_is_its_own_error(
    script: Path, fake_slurm: FakeSlurm, error: str, code: int, kind: type[SlurmError]
) -> None:
    fake_slurm.answer("sbatch", error=error, code=code)
    with pytest.raises(SlurmError) as caught:
        submit_script(script)
    assert type(caught.value) is kind


def test_a_killed_or_hanging_sbatch_is_silent(script: Path, fake_slurm: FakeSlurm) -> None:
    (fake_slurm.bin / "sbatch").write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(SilentError):
        submit_script(script)
    (fake_slurm.bin / "sbatch").write_text("#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(SilentError, match="no answer within"):
        submit_script(script, timeout_s=0.3)


def test_a_job_id_counts_whatever_the_wrapper_ends_with(script: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sbatch", "Submitted batch job 7\n", error="quota: timed out\n", code=137)
    assert submit_script(script) == "7"
    (fake_slurm.bin / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 8\nexec sleep 30\n")
    assert submit_script(script, timeout_s=3.0) == "8"


def test_the_words_are_slurms_own(script: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sbatch", error=REFUSED, code=1)
    with pytest.raises(RefusedError, match=r"^sbatch did not accept the job: Batch job submission failed: Invalid acc"):
        submit_script(script)


def test_only_submits_nothing_and_reads_the_start(fake_slurm: FakeSlurm) -> None:
    line = "sbatch: Job 5 to start at 2026-11-21T06:32:10 using 4 processors on nodes n[1-2] in partition main\n"
    fake_slurm.answer("test-only", error=line)
    assert estimate_start("#!/bin/bash\ntrue\n") == "2026-11-21T06:32:10"
    assert fake_slurm.calls() == ["test-only --test-only"]
    fake_slurm.answer("test-only", "")
    assert estimate_start("x") is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name\n",
            RefusedError,
        ),
        ("allocation failure: Invalid qos specification\n", RefusedError),
        (FULL.replace("Batch job submission failed", "allocation failure"), NoRoomError),
        ("allocation failure: Unable to contact slurm controller (receive failure)\n", SilentError),
    ],
)
def test_only_errors(fake_slurm: FakeSlurm, error: str, kind: type[SlurmError]) -> None:
    fake_slurm.answer("test-only", error=error, code=1)
    with pytest.raises(SlurmError) as caught:
        estimate_start("x")
    assert type(caught.value) is kind


def test_nodes_that_are_busy_or_drained_now_do_not_make_a_request_wrong() -> None:
    for words in ("Requested node configuration is not available", "Requested nodes are busy"):
        assert is_of_nodes(RefusedError(words, words))
    assert not is_of_nodes(RefusedError("x", "Invalid qos specification"))


def test_no_sbatch(script: Path, no_slurm: None) -> None:
    with pytest.raises(MissingCommandError, match="not on PATH"):
        submit_script(script)
