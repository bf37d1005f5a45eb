"""One Slurm command: bounded in time, its errors said; and what of a surrounding job sbatch may see."""

from __future__ import annotations

import json
import os
import pwd
import time

import pytest

from hpc_trainer.errors import MissingCommandError, RefusedError, SilentError, SlurmError, UnclearError
from hpc_trainer.slurm.commands import has_slurm, run_slurm, submit_environment, user_name
from tests.unit.slurm.fake_slurm import FakeSlurm


def test_its_output(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("squeue", "one\ntwo\n", error="a warning\n")
    assert run_slurm(["squeue", "-h"]) == "one\ntwo\n"
    assert fake_slurm.calls() == ["squeue -h"]
    assert has_slurm()


def test_times_come_as_seconds_and_words_in_english(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    (fake_slurm.bin / "squeue").write_text('#!/bin/sh\necho "$LC_ALL $SLURM_TIME_FORMAT"\n')
    assert run_slurm(["squeue"]) == "C %s\n"


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        ("slurm_load_jobs error: Zero Bytes were transmitted", 3, SilentError),
        ("Socket timed out on send/recv operation for job 101_0", 1, SilentError),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1, SilentError),
        ("Requested operation is presently disabled for job 101_0", 1, RefusedError),
        ("words of a release to come", 1, RefusedError),
    ],
)
def test_another_exit_code_is_an_error_with_its_last_words(
    fake_slurm: FakeSlurm, error: str, code: int, kind: type[SlurmError]
) -> None:
    fake_slurm.answer("squeue", error=f"{error}\n", code=code)
    with pytest.raises(SlurmError) as caught:
        run_slurm(["squeue", "-h"])
    assert (type(caught.value), caught.value.said) == (kind, error)
    assert str(caught.value) == f"squeue -h failed ({code}): {error}"


def test_a_command_with_many_requests_fails_only_if_it_prints_nothing(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", "one answer\n", error="another request failed\n", code=1)
    assert run_slurm(["scontrol", "-o"], script="a\nb\n") == "one answer\n"
    with pytest.raises(RefusedError, match=r"scontrol -o failed \(1\): another request failed"):
        run_slurm(["scontrol", "-o"])
    fake_slurm.answer("scontrol", error="all requests failed\n", code=1)
    with pytest.raises(RefusedError, match="all requests failed"):
        run_slurm(["scontrol", "-o"], script="a\n")


def test_filters_of_the_person_do_not_reach_a_command(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_slurm.bin / "squeue").write_text('#!/bin/sh\necho "$SQUEUE_STATES $SLURM_CONF $SLURM_BITSTR_LEN"\n')
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    assert run_slurm(["squeue"]) == " /etc/slurm.conf 0\n"


def test_a_host_without_a_cluster_is_told_in_one_sentence(fake_slurm: FakeSlurm) -> None:
    """Slurm's commands are installed, and there is neither a slurm.conf nor a controller (words of 22.05)."""
    said = (
        "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "scontrol: error: fetch_config: DNS SRV lookup failed\n"
        "scontrol: error: _establish_config_source: failed to fetch config\n"
        "scontrol: fatal: Could not establish a configuration source\n"
    )
    fake_slurm.answer("scontrol", error=said, code=1)
    with pytest.raises(SilentError) as caught:
        run_slurm(["scontrol", "-a", "-o"])
    assert str(caught.value).startswith("scontrol finds no Slurm controller")
    assert "\n" not in str(caught.value)


def test_a_command_that_is_killed_may_have_done_it(fake_slurm: FakeSlurm) -> None:
    (fake_slurm.bin / "scontrol").write_text("#!/bin/sh\nkill -15 $$\n")
    with pytest.raises(UnclearError, match=r"scontrol requeue failed \(-15\)"):
        run_slurm(["scontrol", "requeue", "1"])


def test_a_command_that_hangs_is_left(fake_slurm: FakeSlurm) -> None:
    fake_slurm.hang("squeue")
    began = time.monotonic()
    with pytest.raises(SilentError, match=r"squeue did not answer within 0\.3 s"):
        run_slurm(["squeue"], timeout_s=0.3)
    assert time.monotonic() - began < 20


def test_a_user_without_a_name_is_named_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container often has no line of the user in /etc/passwd."""
    assert user_name() == pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(os, "getuid", lambda: 4_123_456_789)
    assert user_name() == "4123456789"


@pytest.mark.usefixtures("no_slurm")
def test_a_machine_without_slurm() -> None:
    assert not has_slurm()
    with pytest.raises(MissingCommandError, match=r"squeue is not on PATH\. Is this a Slurm login node\?"):
        run_slurm(["squeue"])


def test_a_command_that_cannot_be_started_is_an_error(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_slurm.bin))  # the machine's own squeue, if any, must not take over
    (fake_slurm.bin / "squeue").write_text("#!/no/such/interpreter\n")
    with pytest.raises(SlurmError, match="squeue"):
        run_slurm(["squeue"])
    (fake_slurm.bin / "squeue").write_bytes(b"\x7fELF broken")
    with pytest.raises(SilentError, match=r"squeue could not be started: .*Exec format error"):
        run_slurm(["squeue"])


def test_bytes_that_are_no_text_do_not_stop_us(fake_slurm: FakeSlurm) -> None:
    (fake_slurm.bin / "squeue").write_text("#!/bin/sh\nprintf 'n\\377de'\n")
    assert run_slurm(["squeue"]) == "n\ufffdde"


LEAKED = {
    "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_CPUS_PER_TASK": "9", "SBATCH_PARTITION": "other",
    "SRUN_CPUS_PER_TASK": "9", "SUBMITIT_EXECUTOR": "slurm",
}  # fmt: skip


def test_the_surrounding_job_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LEAKED, "SLURM_CONF": "/etc/slurm.conf", "MY_SLURM_X": "1"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    kept = submit_environment()
    assert [name for name in LEAKED if name in kept] == []
    assert (kept["SLURM_CONF"], kept["MY_SLURM_X"]) == ("/etc/slurm.conf", "1")
    assert dict(os.environ) == before, "other threads of a rank start processes too"


@pytest.mark.parametrize("inside", ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", None])
def test_devices_and_ranks_are_hidden_inside_a_job_and_are_the_persons_on_a_login_node(
    monkeypatch: pytest.MonkeyPatch, inside: str | None
) -> None:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    if inside:
        monkeypatch.setenv(inside, "7")
    of_job = {"CUDA_VISIBLE_DEVICES": "1", "RANK": "3", "MASTER_ADDR": "n1"}
    for name, value in of_job.items():
        monkeypatch.setenv(name, value)
    kept = submit_environment()
    assert {name: kept.get(name) for name in of_job} == (dict.fromkeys(of_job) if inside else of_job)


@pytest.mark.parametrize("told", ["", "no JSON", "[]", "7"])
def test_frozen_code_that_cannot_be_read_hides_nothing_else(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv("HPC_TRAINER_FROZEN_CODE", told)
    monkeypatch.setenv("PYTHONPATH", "/home/me/lib")
    assert submit_environment()["PYTHONPATH"] == "/home/me/lib"


@pytest.mark.parametrize("rest", ["", "/home/me/lib"])
def test_the_frozen_code_of_this_node_is_hidden(monkeypatch: pytest.MonkeyPatch, rest: str) -> None:
    """On another node the path of the copy is free: another user could put modules there."""
    copy = "/tmp/hpc_trainer-7/0123456789ab/lab"
    monkeypatch.setenv("HPC_TRAINER_FROZEN_CODE", json.dumps({"/home/me/lab": copy}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([copy, f"{copy}/src", *([rest] if rest else [])]))
    kept = submit_environment()
    assert "HPC_TRAINER_FROZEN_CODE" not in kept
    assert kept.get("PYTHONPATH", "") == rest


def test_what_names_the_cluster_and_the_person_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its token sbatch is refused where auth/jwt is used; SLURM_CLUSTERS moves squeue and sbatch alike."""
    stay = {"SLURM_CONF": "a", "SLURM_CONF_SERVER": "b", "SLURM_JWT": "c", "SLURM_CLUSTERS": "d"}
    for name, value in stay.items():
        monkeypatch.setenv(name, value)
    kept = submit_environment()
    assert {name: kept.get(name) for name in stay} == stay


def test_a_job_submitted_by_a_rank_gets_nothing_of_the_copy_that_the_rank_runs_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On another node the place of the copy is free, and another user could put programs there."""
    copy = "/tmp/hpc_trainer-7/env-1-2-3"
    monkeypatch.setenv("PATH", f"{copy}/bin:/usr/bin:{copy}-other/bin")
    monkeypatch.setenv("VIRTUAL_ENV", copy)
    monkeypatch.setenv("HPC_TRAINER_STAGED", copy)
    monkeypatch.setenv("HPC_TRAINER_STAGE_KEY", "1-2")
    monkeypatch.setenv("HPC_TRAINER_BY_TORCHRUN", "1")
    kept = submit_environment()
    assert kept["PATH"] == f"/usr/bin:{copy}-other/bin"
    assert not {"VIRTUAL_ENV", "HPC_TRAINER_STAGED", "HPC_TRAINER_STAGE_KEY", "HPC_TRAINER_BY_TORCHRUN"} & kept.keys()
