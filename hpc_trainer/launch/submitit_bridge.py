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

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from hpc_trainer.errors import SubmitError
from hpc_trainer.runs.spec import Shape
from hpc_trainer.slurm.commands import clean_submit_environment

# sbatch says these when the controller may have accepted before the answer was lost.
_UNCLEAR = ("timed out", "Zero Bytes")


class UnclearSubmitError(SubmitError):
    """Nobody knows whether the scheduler has the job."""


# submitit's local controller ends tasks at a time limit; runs on one's own machine have none.
_LOCAL_TIMEOUT_MIN = 60 * 24 * 365


def worker_command(sweep_dir: Path, which: list[str], python: str | None = None, archive: Path | None = None) -> str:
    """The shell command of one rank; `archive` is the frozen code to start from."""
    program = python or shlex.quote(sys.executable)
    start = "-m hpc_trainer.worker" if archive is None else shlex.quote(str(archive))
    return f"{program} -u {start} --sweep-dir {shlex.quote(str(sweep_dir))} {shlex.join(which)}"


class ArrayExecutor(SlurmExecutor):  # type: ignore[misc]
    """Submits one command as a job array; element i finds its run by SLURM_ARRAY_TASK_ID."""

    @classmethod
    def affinity(cls) -> int:
        """Always usable: a plan is shown on machines without Slurm too."""
        return 2


def slurm_parameters(
    shape: Shape, cluster: Mapping[str, Any], *, folder: Path, job_name: str, comment: str
) -> dict[str, Any]:
    """`shape` and `cluster` in submitit's words; None means the flag is not given."""
    # One file an element for the batch shell and all tasks: ranks write logs of their own in the run's folder.
    output = str(folder).replace("%", "%%") + "/%A_%a.out"
    gpus: str | int | None = None
    if shape.gpus_per_node:
        gpus = f"{shape.gpu_type}:{shape.gpus_per_node}" if shape.gpu_type else shape.gpus_per_node
    parameters = {
        "job_name": job_name,
        "comment": comment,
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
        "array_parallelism": cluster["array_parallelism"],
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


def array_script(folder: Path, parameters: Mapping[str, Any], command: str, num_elements: int) -> str:
    """The text of the batch script, without submitting anything."""
    return str(_array_executor(folder, parameters, num_elements)._make_submission_file_text(command, "script"))


def submit_array(folder: Path, parameters: Mapping[str, Any], command: str, num_elements: int) -> str:
    """Submits the array by one sbatch and returns its job id.

    Raises:
        SubmitError: sbatch refused, or answered what cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    executor = _array_executor(folder, parameters, num_elements)
    try:
        with clean_submit_environment():
            return str(executor._submit_command(command).job_id)
    except FailedSubmissionError as error:
        raise UnclearSubmitError(f"sbatch answered what cannot be read: {_last_words(error)}") from error
    except (FailedJobError, subprocess.CalledProcessError) as error:
        words = _last_words(error)
        if any(sign in words for sign in _UNCLEAR):
            raise UnclearSubmitError(
                f"sbatch did not hear from the controller: {words}. It may have the job all the same: give the same "
                "command again in a minute, it submits only what is missing."
            ) from error
        raise SubmitError(
            f"sbatch did not accept the job: {words}. Nothing of this array was submitted. (Without a working Slurm "
            "here, cluster=local runs on this machine.)"
        ) from error
    except FileNotFoundError as error:
        raise SubmitError("sbatch is not on PATH. Is this a login node? cluster=local runs here.") from error


def _array_executor(folder: Path, parameters: Mapping[str, Any], num_elements: int) -> ArrayExecutor:
    executor = ArrayExecutor(folder=folder)
    executor.parameters = {**parameters, "map_count": num_elements}
    return executor


def _last_words(error: Exception) -> str:
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    lines = [line.strip() for line in text.splitlines() if "sbatch: error" in line or "error:" in line]
    return " ".join(lines) or text.strip()


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
