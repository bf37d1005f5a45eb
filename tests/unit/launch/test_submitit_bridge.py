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

from submitit.local import local as submitit_local
from submitit.slurm.slurm import SlurmExecutor

from hpc_trainer.launch.script import ScriptRequest, parse_script
from hpc_trainer.launch.submitit_bridge import (
    ScriptExecutor,
    render_script,
    slurm_parameters,
    start_local,
    top_up_command,
    worker_command,
)
from hpc_trainer.runs.spec import Shape
from hpc_trainer.runtime.start import START
from tests.unit.runs.builders import make_spec

# What the local controller is told, besides CUDA_VISIBLE_DEVICES and SUBMITIT_EXECUTOR.
LOCAL_WORDS = {
    f"SUBMITIT_LOCAL_{name}="
    for name in ("NTASKS", "COMMAND", "TIMEOUT_S", "SIGNAL_DELAY_S", "NODEID", "JOB_NUM_NODES", "WITH_SHELL",
                 "LOCALID", "GLOBALID", "JOB_ID")
}  # fmt: skip


def _request(folder: Path, count: int = 1, shape: Shape | None = None) -> ScriptRequest:
    return ScriptRequest(
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
    for name in ("_make_submission_file_text", "_internal_update_parameters"):
        assert callable(getattr(SlurmExecutor, name)), name
    source = inspect.getsource(submitit_local)
    assert set(re.findall(r"SUBMITIT_LOCAL_\w+=", source)) == LOCAL_WORDS, "what start_controller tells the controller"
    assert issubclass(ScriptExecutor, SlurmExecutor)


def test_every_parameter_of_ours_is_one_of_submitits(tmp_path: Path) -> None:
    """submitit refuses names that it does not know; `parameters` set by hand would pass them on in silence."""
    request = _request(tmp_path, shape=make_spec("cluster=slurm", "hardware=gpu_x16").shape)
    parameters = slurm_parameters(request)
    assert set(parameters) <= set(SlurmExecutor._valid_parameters())
    ScriptExecutor(request)._internal_update_parameters(**parameters)


def test_the_script_is_made_without_slurm_and_without_a_file(tmp_path: Path, no_slurm: None) -> None:
    folder = tmp_path / "slurm"
    text = render_script(_request(folder, 3))
    assert text.startswith("#!/bin/bash\n")
    assert "#SBATCH --array=0-2%3" in text
    assert f"start(path)' hpc_trainer.worker --sweep-dir {tmp_path} --array abc123\ncode=$?\n" in text
    assert not folder.exists()


def test_a_single_job_has_no_array(tmp_path: Path) -> None:
    command = tuple(top_up_command(tmp_path, "python3"))
    request = dataclasses.replace(
        _request(tmp_path / "slurm"), num_elements=None, array_parallelism=None, command=command
    )
    text = render_script(request)
    assert "--array" not in text
    assert f"#SBATCH --output={tmp_path}/slurm/%j.out" in text
    assert f" python3 -u -c {shlex.quote(START)} hpc_trainer top-up {tmp_path}\ncode=$?\n" in text
    assert parse_script(text) == request.as_rendered()


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
