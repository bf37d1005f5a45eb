"""The contract with submitit: the private parts that launch/submitit_bridge.py uses exist and behave."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submitit.local import local as submitit_local
from submitit.slurm.slurm import SlurmExecutor

from hpc_trainer.errors import RefusedError, SubmitError
from hpc_trainer.launch.batch_job import BatchJob, top_up_command, worker_command
from hpc_trainer.launch.submitit_bridge import BatchExecutor, render_script, start_local
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.runtime.start import START
from hpc_trainer.slurm.shape import Shape
from tests.unit.launch.scripts import read_script
from tests.unit.record.builders import make_spec
from tests.unit.slurm.fake_slurm import FakeSlurm

# What the local controller is told, besides CUDA_VISIBLE_DEVICES and SUBMITIT_EXECUTOR.
LOCAL_WORDS = {
    f"SUBMITIT_LOCAL_{name}="
    for name in ("NTASKS", "COMMAND", "TIMEOUT_S", "SIGNAL_DELAY_S", "NODEID", "JOB_NUM_NODES", "WITH_SHELL",
                 "LOCALID", "GLOBALID", "JOB_ID")
}  # fmt: skip


def _job(folder: Path, count: int = 1, shape: Shape | None = None) -> BatchJob:
    return BatchJob(
        shape=shape or make_spec("cluster=slurm").shape,
        sweep=SweepPaths(folder.parent),
        uuid="abc123",
        num_elements=count,
        array_parallelism=4,
        setup=(),
        srun_args=(),
        command=worker_command(folder.parent, ["--array", "abc123"], ["python3"]),
    )


def test_the_private_parts_exist() -> None:
    for name in ("_make_submission_file_text", "_submit_command", "_internal_update_parameters"):
        assert callable(getattr(SlurmExecutor, name)), name
    assert isinstance(SlurmExecutor._submitit_command_str, property)
    assert "_submit_command(self._submitit_command_str)" in inspect.getsource(SlurmExecutor), "how it submits an array"
    source = inspect.getsource(submitit_local)
    assert set(re.findall(r"SUBMITIT_LOCAL_\w+=", source)) == LOCAL_WORDS, "what start_controller tells the controller"
    assert issubclass(BatchExecutor, SlurmExecutor)


def test_every_parameter_of_ours_is_one_of_submitits(tmp_path: Path) -> None:
    """submitit refuses names that it does not know; `parameters` set by hand would pass them on in silence."""
    executor = BatchExecutor(_job(tmp_path, shape=make_spec("cluster=slurm", "hardware=gpu_x16").shape))
    parameters = {key: value for key, value in executor.parameters.items() if key != "map_count"}
    assert set(parameters) <= set(SlurmExecutor._valid_parameters())
    executor._internal_update_parameters(**parameters)


def test_the_script_is_made_without_slurm_and_without_a_file(tmp_path: Path, no_slurm: None) -> None:
    folder = tmp_path / "slurm"
    text = render_script(_job(folder, 3))
    assert text.startswith("#!/bin/bash\n")
    assert "#SBATCH --array=0-2%3" in text
    assert f"start(path)' hpc_trainer.worker --sweep-dir {tmp_path} --array abc123\ncode=$?\n" in text
    assert not folder.exists()


def test_a_single_job_has_no_array(tmp_path: Path) -> None:
    command = top_up_command(tmp_path, "python3")
    job = dataclasses.replace(_job(tmp_path / "slurm"), num_elements=None, array_parallelism=None, command=command)
    text = render_script(job)
    assert "--array" not in text
    assert f"#SBATCH --output={tmp_path}/slurm/%j.out" in text
    assert f" python3 -u -c {shlex.quote(START)} hpc_trainer top-up {tmp_path}\ncode=$?\n" in text
    assert read_script(text).array is None


# --- the executor submits what it wrote ---


def test_the_executor_hands_its_script_to_sbatch(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    folder = tmp_path / "sweep" / "slurm"
    folder.mkdir(parents=True)
    job = _job(folder, 3)
    assert BatchExecutor(job, ["--begin=now+60"]).submit_job() == "101"
    assert fake_slurm.calls() == [f"sbatch --begin=now+60 {folder}/abc123.sh"]
    assert fake_slurm.script("101") == (folder / "abc123.sh").read_text() == render_script(job)
    assert [path.name for path in folder.iterdir()] == ["abc123.sh"], "no pickle, no link, nothing else of submitit's"
    fake_slurm.answer("sbatch", error="sbatch: error: Batch job submission failed: Invalid account\n", code=1)
    with pytest.raises(RefusedError):
        BatchExecutor(job).submit_job()


CHANGES = [
    ("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --new-thing=1\n", "#SBATCH --new-thing=1"),
    ("#SBATCH --requeue\n", "#SBATCH --requeue\n#BSUB -q other\n", "#BSUB -q other"),
    ("#SBATCH --requeue\n", "", "#SBATCH --requeue"),
    ("#SBATCH --nodes=1\n", "#SBATCH --nodes=2\n", "#SBATCH --nodes="),
    ("--array=0-2%3\n", "--array=0-2\n", "#SBATCH --array="),
    ("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --requeue\n", "#SBATCH --requeue"),
    ("set +e\n", "set +e\nmodule purge\n", "module purge"),
    ("set +e\n", "", "set "),
    ("set +e\n\n# command\n", "\n# command\nset +e\nx=1\n", "x=1"),
    (" -- python3", " python3", "srun "),
    ("srun --unbuffered ", "srun --unbuffered --export=NONE ", "srun "),
    (" --kill-on-bad-exit=1 ", " ", "srun "),
]


@pytest.mark.parametrize(("old", "new", "said"), CHANGES, ids=range(len(CHANGES)))
def test_another_submitit_that_writes_something_else_is_found_out(
    old: str, new: str, said: str, tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = SlurmExecutor._make_submission_file_text

    def of_another_release(self: SlurmExecutor, command: str, uid: str) -> str:
        text = str(render(self, command, uid))
        assert text.count(old) == 1
        return text.replace(old, new)

    monkeypatch.setattr(SlurmExecutor, "_make_submission_file_text", of_another_release)
    folder = tmp_path / "sweep" / "slurm"
    with pytest.raises(SubmitError, match=rf"another batch script than was asked for \({said}.*Nothing was submitted"):
        BatchExecutor(_job(folder, 3)).submit_job()
    assert not folder.exists()
    assert fake_slurm.calls() == []


def test_the_signal_does_not_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit reads SUBMITIT_PREEMPT_SIGNAL when it is imported; a job started by submitit may have it."""
    text = render_script(_job(tmp_path / "slurm"))
    monkeypatch.setattr("submitit.slurm.slurm.SlurmJobEnvironment.USR_SIG", "USR1")
    assert render_script(_job(tmp_path / "slurm")) == text


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
