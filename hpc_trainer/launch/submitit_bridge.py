"""The only file that touches submitit, and the private parts of it that arrays without pickles need.

submitit's own path pickles a function for each point, guesses causes from elapsed time and checkpoints inside the
signal handler. Here it renders and submits the batch script, and starts local tasks; what runs is a plain command.
tests/unit/launch/test_submitit_bridge.py is the contract: it fails if a submitit release changes these parts.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.spec import Shape
from hpc_trainer.slurm.queue import job_name

# submitit's local controller ends tasks at a time limit; runs on one's own machine have none.
_LOCAL_TIMEOUT_MIN = 60 * 24 * 365


def worker_command(sweep_dir: Path, which: list[str], python: str | None = None) -> str:
    """The shell command of one rank."""
    program = python or shlex.quote(sys.executable)
    return f"{program} -u -m hpc_trainer.worker --sweep-dir {shlex.quote(str(sweep_dir))} {shlex.join(which)}"


def top_up_command(sweep_dir: Path, python: str | None = None) -> str:
    """The shell command of a top-up job."""
    program = python or shlex.quote(sys.executable)
    return f"{program} -u -m hpc_trainer top-up {shlex.quote(str(sweep_dir))}"


class ArrayExecutor(SlurmExecutor):  # type: ignore[misc]
    """Submits one command as a job array; element i finds its run by SLURM_ARRAY_TASK_ID."""

    @classmethod
    def affinity(cls) -> int:
        """Always usable: a plan is shown on machines without Slurm too."""
        return 2


def slurm_parameters(
    shape: Shape, cluster: Mapping[str, Any], *, paths: SweepPaths, uuid: str, array_parallelism: int | None = None
) -> dict[str, Any]:
    """`shape` and `cluster` in submitit's words; None means the flag is not given.

    Args:
        uuid: of the submission; the job carries it in its comment and, in short, in its name.
        array_parallelism: elements that may run at once; None for a single job.
    """
    # One file an element for the batch shell and all tasks: ranks write logs of their own in the run's folder.
    pattern = "/%j.out" if array_parallelism is None else "/%A_%a.out"
    output = str(paths.scripts).replace("%", "%%") + pattern
    gpus: str | int | None = None
    if shape.gpus_per_node:
        gpus = f"{shape.gpu_type}:{shape.gpus_per_node}" if shape.gpu_type else shape.gpus_per_node
    parameters = {
        "job_name": job_name(paths.name, uuid),
        "comment": uuid,
        "time": shape.time_limit_min,
        "nodes": shape.num_nodes,
        "ntasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cpus_per_task,
        "gpus_per_node": gpus,
        "mem": _megabytes(shape.mem_gb_per_node),
        "mem_per_gpu": _megabytes(shape.mem_gb_per_gpu),
        "mem_per_cpu": _megabytes(shape.mem_gb_per_cpu),
        "partition": shape.partition,
        "qos": shape.qos,
        "constraint": shape.constraint,
        "exclude": shape.exclude,
        "account": shape.account,
        "signal_delay_s": shape.signal_lead_s,
        "array_parallelism": array_parallelism,
        "stderr_to_stdout": True,
        # Sites that enforce wckeys refuse submitit's default one.
        "wckey": None,
        "additional_parameters": {"requeue": True, "output": output},
        # Slurm 22.05 to 23.02: srun does not take over --cpus-per-task of the job by itself.
        "setup": ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", *cluster["setup"]],
        "srun_args": [
            "--output",
            output,
            "--open-mode=append",
            "--kill-on-bad-exit=1",
            *cluster["srun_args"],
        ],
    }
    return {key: value for key, value in parameters.items() if value is not None or key == "wckey"}


def _megabytes(gigabytes: float | None) -> str | None:
    return None if gigabytes is None else f"{round(gigabytes * 1024)}M"


def render_script(folder: Path, parameters: Mapping[str, Any], command: str, num_elements: int | None) -> str:
    """The text of the batch script: of an array of `num_elements`, or of a single job if that is None."""
    return str(_array_executor(folder, parameters, num_elements)._make_submission_file_text(command, "script"))


def _array_executor(folder: Path, parameters: Mapping[str, Any], num_elements: int | None) -> ArrayExecutor:
    executor = ArrayExecutor(folder=folder)
    executor.parameters = {**parameters, **({} if num_elements is None else {"map_count": num_elements})}
    return executor


def start_local(folder: Path, command: str, shape: Shape, visible_gpus: list[int]) -> subprocess.Popen[bytes]:
    """Starts one task a rank on this machine, under submitit's local controller, and returns the controller.

    The controller forwards SIGTERM to its tasks and ends when they have ended.
    """
    executor = LocalExecutor(folder=folder)
    executor.update_parameters(
        tasks_per_node=shape.tasks_per_node,
        gpus_per_node=shape.gpus_per_node,
        visible_gpus=visible_gpus,
        timeout_min=_LOCAL_TIMEOUT_MIN,
        stderr_to_stdout=True,
    )
    process: subprocess.Popen[bytes] = executor._submit_command(command)._process
    return process
