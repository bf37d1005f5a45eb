"""The only file that touches submitit, and the private parts of it that arrays without pickles need.

submitit's own path pickles a function for each point, guesses causes from elapsed time and checkpoints inside the
signal handler. Here it renders the batch script, and starts local tasks; what runs is a plain command.
tests/unit/launch/test_submitit_bridge.py is the contract: it fails if a submitit release changes these parts.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from hpc_trainer.config.script_words import split_python
from hpc_trainer.launch.script import (
    EXPORT_CPUS,
    EXPORT_START,
    GO_ON,
    SRUN_OPTIONS,
    TOP_UP,
    WORKER,
    ScriptRequest,
    check_script,
    megabytes,
)
from hpc_trainer.runs.spec import Shape
from hpc_trainer.runtime.start import start_words

# submitit's local controller ends tasks at a time limit; runs on one's own machine have none.
_LOCAL_TIMEOUT_S = 365 * 24 * 3600


def worker_command(
    sweep_dir: Path, which: Sequence[str], python: str | None = None, archive: Path | None = None
) -> list[str]:
    """The words of one rank's command. `python` (cluster.python) is a program and its arguments, not shell.

    Args:
        archive: the frozen code to start from; None: the hpc_trainer that is installed.
    """
    program = split_python(python) if python else [sys.executable]
    start = WORKER if archive is None else ("-u", str(archive))
    return [*program, *start, "--sweep-dir", str(sweep_dir), *which]


def top_up_command(sweep_dir: Path, python: str | None = None) -> list[str]:
    """The words of a top-up job's command."""
    program = split_python(python) if python else [sys.executable]
    return [*program, *TOP_UP, str(sweep_dir)]


class ScriptExecutor(SlurmExecutor):  # type: ignore[misc]
    """Renders the batch script of one command; element i of an array finds its run by SLURM_ARRAY_TASK_ID."""

    def __init__(self, request: ScriptRequest) -> None:
        super().__init__(folder=request.folder)
        self.request = request
        self.parameters = slurm_parameters(request)
        if request.num_elements is not None:
            self.parameters["map_count"] = request.num_elements

    @classmethod
    def affinity(cls) -> int:
        """Always usable: a plan is shown on machines without Slurm too."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """What submitit writes for sbatch: no script leaves this place unread."""
        text = "\n".join([str(super()._make_submission_file_text(command, uid)).rstrip("\n"), *self.request.tail, ""])
        check_script(text, self.request)
        return text


def slurm_parameters(request: ScriptRequest) -> dict[str, Any]:
    """`request` in submitit's words; None means the flag is not given."""
    shape = request.shape
    gpus = None
    if shape.gpus_per_node:
        gpus = f"{shape.gpu_type}:{shape.gpus_per_node}" if shape.gpu_type else str(shape.gpus_per_node)
    is_gres = shape.gpu_request == "gres"
    parameters = {
        "job_name": request.job_name,
        "comment": request.uuid,
        "time": shape.time_limit_min,
        "nodes": shape.num_nodes,
        "ntasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cpus_per_task,
        "gpus_per_node": None if is_gres else gpus,
        "gres": f"gpu:{gpus}" if is_gres and gpus else None,
        "mem": _memory(shape.mem_gb_per_node),
        "mem_per_gpu": _memory(shape.mem_gb_per_gpu),
        "mem_per_cpu": _memory(shape.mem_gb_per_cpu),
        "partition": shape.partition,
        "qos": shape.qos,
        "constraint": shape.constraint,
        "exclude": shape.exclude,
        "account": shape.account,
        "array_parallelism": request.array_parallelism,
        "stderr_to_stdout": True,
        # Sites that enforce wckeys refuse submitit's default one.
        "wckey": None,
        # submitit takes the signal's name from SUBMITIT_PREEMPT_SIGNAL, which a surrounding job may have set.
        "additional_parameters": {"requeue": True, "output": request.output, "signal": f"USR2@{shape.signal_lead_s}"},
        "setup": [EXPORT_CPUS, EXPORT_START, *request.setup, GO_ON],
        # "--" ends srun's options: one that lacks its value cannot swallow the worker's program.
        "srun_args": ["--output", request.output, *SRUN_OPTIONS, *request.srun_args, "--"],
    }
    return {key: value for key, value in parameters.items() if value is not None or key == "wckey"}


def _memory(gigabytes: float | None) -> str | None:
    return None if gigabytes is None else f"{megabytes(gigabytes)}M"


def render_script(request: ScriptRequest) -> str:
    """The text of the batch script, checked, without submitting anything.

    Raises:
        SubmitError: submitit rendered something else than was asked for.
    """
    return ScriptExecutor(request)._make_submission_file_text(shlex.join(request.command), "script")


def start_local(
    folder: Path, command: Sequence[str], shape: Shape, visible_gpus: list[int], setup: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts one task a rank on this machine, under submitit's local controller, and returns the controller.

    The controller forwards SIGTERM to its tasks and ends when they have ended. submitit's own `start_controller`
    does the same by `python -m`, with the current folder first on the path.

    Args:
        setup: lines of cluster.setup, run by bash before each task, which then takes bash's place.
    """
    if setup:
        command = ["bash", "-c", "\n".join([*setup, GO_ON, 'exec "$@"']), "bash", *command]
    folder.mkdir(parents=True, exist_ok=True)
    environ = {
        "SUBMITIT_LOCAL_NTASKS": shape.tasks_per_node,
        "SUBMITIT_LOCAL_COMMAND": shlex.join(command),
        "SUBMITIT_LOCAL_TIMEOUT_S": _LOCAL_TIMEOUT_S,
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": 30,
        "SUBMITIT_LOCAL_NODEID": 0,
        "SUBMITIT_LOCAL_JOB_NUM_NODES": 1,
        "SUBMITIT_STDERR_TO_STDOUT": 1,
        "SUBMITIT_EXECUTOR": "local",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, visible_gpus[: shape.gpus_per_node])),
        "SUBMITIT_LOCAL_WITH_SHELL": "",
    }
    return subprocess.Popen(
        [sys.executable, *start_words("submitit.local._local"), str(folder)],
        env={**os.environ, **{name: str(value) for name, value in environ.items()}},
    )
