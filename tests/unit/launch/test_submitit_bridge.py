"""The contract with submitit: the private parts that launch/submitit_bridge.py uses exist and behave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from hpc_trainer.errors import SubmitError
from hpc_trainer.launch.script import ArrayRequest
from hpc_trainer.launch.submitit_bridge import (
    ArrayExecutor,
    UnclearSubmitError,
    array_script,
    slurm_parameters,
    start_local,
    submit_array,
    worker_command,
)
from hpc_trainer.runs.spec import Shape
from tests.unit.runs.builders import make_spec
from tests.unit.slurm.fake_slurm import FakeSlurm


def _request(folder: Path, count: int = 1, shape: Shape | None = None) -> ArrayRequest:
    return ArrayRequest(
        shape=shape or make_spec("cluster=slurm").shape,
        folder=folder,
        job_name="sweep",
        uuid="abc123",
        num_elements=count,
        array_parallelism=4,
        setup=(),
        srun_args=(),
        command=tuple(worker_command(folder.parent, ["--array", "abc123"], "python3")),
    )


def test_the_private_parts_exist() -> None:
    for name in ("_make_submission_file_text", "_submit_command", "_internal_update_parameters"):
        assert callable(getattr(SlurmExecutor, name)), name
    assert callable(LocalExecutor._submit_command)
    assert issubclass(ArrayExecutor, SlurmExecutor)


def test_every_parameter_of_ours_is_one_of_submitits(tmp_path: Path) -> None:
    """submitit refuses names that it does not know; `parameters` set by hand would pass them on in silence."""
    request = _request(tmp_path, shape=make_spec("cluster=slurm", "hardware=gpu_x16").shape)
    parameters = slurm_parameters(request)
    assert set(parameters) <= set(SlurmExecutor._valid_parameters())
    ArrayExecutor(request)._internal_update_parameters(**parameters)


def test_the_script_is_made_without_slurm_and_without_a_file(tmp_path: Path, no_slurm: None) -> None:
    folder = tmp_path / "slurm"
    text = array_script(_request(folder, 3))
    assert text.startswith("#!/bin/bash\n")
    assert "#SBATCH --array=0-2%3" in text
    assert text.rstrip().splitlines()[-1].endswith(f" -m hpc_trainer.worker --sweep-dir {tmp_path} --array abc123")
    assert not folder.exists()


def test_one_sbatch_and_its_job_id(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    folder = tmp_path / "slurm"
    assert submit_array(_request(folder, 3)) == "101"
    assert len(fake_slurm.calls()) == 1
    assert fake_slurm.script("101").rstrip("\n") == array_script(_request(folder, 3)).rstrip()
    assert not list(folder.rglob("*.pkl")), "nothing is pickled"
    assert (folder / "101_submission.sh").exists()


def test_a_file_that_cannot_be_renamed_after_sbatch_accepted_is_unclear_and_not_refused(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """Called refused, the array would be submitted again."""
    folder = tmp_path / "slurm"
    (folder / "101_submission.sh").mkdir(parents=True)  # what submitit renames the script to
    with pytest.raises(UnclearSubmitError, match="may be submitted"):
        submit_array(_request(folder))
    assert len(fake_slurm.calls("sbatch")) == 1


def test_sbatch_does_not_see_the_surrounding_job(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SBATCH_ACCOUNT", "SLURM_CONF", "SUBMITIT_EXECUTOR"):
        monkeypatch.setenv(name, "leaked")
    submit_array(_request(tmp_path))
    assert fake_slurm.seen_environment("sbatch") == ["SLURM_CONF"]
    assert os.environ["SLURM_JOB_ID"] == "leaked"


@pytest.mark.parametrize(
    "error",
    [
        "sbatch: error: Batch job submission failed: Invalid job array specification",
        "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: x",
        "error: Unable to allocate resources",
    ],
)
def test_what_sbatch_refuses_is_said(
    tmp_path: Path, fake_slurm: FakeSlurm, error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sbatch", error=f"{error}\n", code=1)
    with pytest.raises(SubmitError, match="sbatch did not accept the job") as caught:
        submit_array(_request(tmp_path))
    for line in error.splitlines():
        assert line in str(caught.value)


def test_an_answer_that_cannot_be_read_is_an_error(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sbatch", "Welcome to the cluster!\n")
    with pytest.raises(SubmitError, match="Welcome to the cluster"):
        submit_array(_request(tmp_path))


def test_an_answer_with_a_banner_and_a_cluster_is_read(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sbatch", "Note: maintenance on Monday\nSubmitted batch job 4711 on cluster big\n")
    assert submit_array(_request(tmp_path)) == "4711"


@pytest.mark.usefixtures("no_slurm")
def test_no_sbatch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match=r"sbatch is not on PATH\. .*cluster=local runs here"):
        submit_array(_request(tmp_path))


# --- the local controller ---

_TASK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
names = ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_JOB_ID", "CUDA_VISIBLE_DEVICES")
with open(sys.argv[1] + "." + os.environ[names[0]], "w") as file:
    file.write(" ".join(os.environ[name] or "-" for name in names) + "\\n")
if len(sys.argv) > 2:
    signal.pause()
"""


def _start(tmp_path: Path, shape: Shape, gpus: list[int], *more: str) -> subprocess.Popen[bytes]:
    (tmp_path / "task.py").write_text(_TASK)
    command = [sys.executable, "-S", str(tmp_path / "task.py"), str(tmp_path / "rank"), *more]
    return start_local(tmp_path / "local", command, shape, gpus)


def _read(tmp_path: Path, rank: int) -> list[str]:
    deadline = time.monotonic() + 60
    path = tmp_path / f"rank.{rank}"
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text().split()
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} did not start")


def test_the_local_controller_starts_a_task_a_rank(tmp_path: Path) -> None:
    shape = make_spec("hardware=cpu_x2").shape
    controller = _start(tmp_path, shape, [])
    assert controller.wait(timeout=60) == 0
    for rank in (0, 1):
        assert _read(tmp_path, rank) == [str(rank), "2", str(controller.pid), "-"]


def test_the_local_controller_forwards_sigterm_and_ends_with_its_tasks(tmp_path: Path) -> None:
    shape = make_spec("hardware=gpu_x2", "cluster=local").shape
    controller = _start(tmp_path, shape, [2, 3], "wait")
    try:
        for rank in (0, 1):
            assert _read(tmp_path, rank) == [str(rank), "2", str(controller.pid), "2,3"]
        controller.send_signal(signal.SIGTERM)
        controller.wait(timeout=60)
    finally:
        controller.kill()
        controller.wait()
