"""The only module that uses submitit, including the private parts that arrays without pickles need.

submitit's own path pickles a function for each point, guesses causes from elapsed time and checkpoints inside the
signal handler. Here its executor writes the batch script of a plain command and submits it, and its local controller
starts tasks on this machine. tests/unit/launch/test_submitit_bridge.py is the contract: it fails if a submitit release
changes these parts.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpc_trainer.config.rules.cluster_rules import sbatch_flags
from hpc_trainer.config.script_words import DIRECTIVES
from hpc_trainer.errors import ConfigError, MissingCommandError, RefusedError, SlurmError, SubmitError
from hpc_trainer.launch.batch_job import BatchJob, setup_lines
from hpc_trainer.launch.settle import look_once
from hpc_trainer.record.files import write_atomic
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.submissions import Book, Submission, write_confirmation, write_doubt, write_dropped
from hpc_trainer.runtime.start import start_words
from hpc_trainer.slurm.commands import megabytes, submit_script
from hpc_trainer.slurm.queue import find_ended
from hpc_trainer.slurm.shape import Shape

_SRUN_OPTIONS = ("--open-mode=append", "--kill-on-bad-exit=1")
# slurm.conf: SchedulerParameters=max_script_size, 4 MiB by default.
_MAX_SCRIPT_BYTES = 4 * 2**20
# submitit's local controller ends tasks at a time limit; runs on one's own machine have none.
_LOCAL_TIMEOUT_S = 365 * 24 * 3600


class BatchExecutor(SlurmExecutor):  # type: ignore[misc]
    """Executor of submitit for one job whose ranks are a plain command.

    It differs from its parent in three ways. The script has its own last lines. The script's file has a name by which a
    later command finds an sbatch that is still at work. sbatch runs with a time limit and without the variables of a
    surrounding job, and its error says whether Slurm may have the job.
    """

    def __init__(self, job: BatchJob, options: Sequence[str] = ()) -> None:
        """Check the job and set submitit's parameters.

        Args:
            job: the job.
            options: sbatch options besides those in the script.

        Raises:
            ConfigError: the job has a value that no script may contain.
        """
        problems = list(job.problems())
        if problems:
            raise ConfigError("\n".join(problems))
        super().__init__(folder=job.sweep.scripts)
        self.job, self.options = job, options
        self._flags = _flags(job)
        self._more = {
            **({"exclusive": True} if job.shape.whole_node else {}),
            **sbatch_flags(job.sbatch),
            **job.options,
            "requeue": True,
            "output": job.output,
            "signal": f"USR2@{job.shape.signal_lead_s}",
        }
        self.parameters = {
            **self._flags,
            # Sites that enforce wckeys refuse submitit's default wckey.
            "wckey": None,
            "stderr_to_stdout": True,
            # submitit takes the signal's name from SUBMITIT_PREEMPT_SIGNAL, which a surrounding job may have set.
            "additional_parameters": self._more,
            "setup": job.before,
            # "--" ends srun's options: an option without its value cannot take the worker's program as the value.
            "srun_args": ["--output", job.output, *_SRUN_OPTIONS, *job.srun_args, "--"],
        }
        if job.num_elements is not None:
            self.parameters |= {"map_count": job.num_elements, "array_parallelism": job.array_parallelism}

    @classmethod
    def affinity(cls) -> int:
        """Return 2, as for an executor that is usable: plans are shown on machines without Slurm too."""
        return 2

    def submit_job(self) -> str:
        """Submit the job with one sbatch call and return its id.

        Raises:
            ConfigError: the job's script is too long.
            SubmitError: submitit wrote another script than requested.
            RefusedError, MissingCommandError: Slurm does not have the job.
            SlurmError: any other failure; Slurm may have the job.
        """
        return str(self._submit_command(self._submitit_command_str).job_id)

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(self.job.command)

    def _submit_command(self, command: str) -> SlurmJob[None]:
        script = self.job.sweep.script(self.job.uuid)
        write_atomic(script, self._make_submission_file_text(command, self.job.uuid), sync=False)
        return SlurmJob(folder=self.folder, job_id=submit_script(script, options=self.options))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text = str(super()._make_submission_file_text(command, uid)).rstrip("\n")
        self._check(text, command)
        text = "\n".join([text, *self.job.tail, ""])
        if len(text.encode()) > _MAX_SCRIPT_BYTES:
            raise ConfigError(
                f"the batch script would have {len(text.encode())} bytes, and Slurm takes {_MAX_SCRIPT_BYTES} "
                "(max_script_size). Put the lines of cluster.setup into a file, and source it."
            )
        return text

    def _check(self, text: str, command: str) -> None:
        """Refuse the script of a submitit release that writes other lines, for example a flag with its own default.

        Raises:
            SubmitError: the script differs from the requested one.
        """
        flags = {**self._flags, **self._more, "open-mode": "append"}
        if self.job.num_elements is not None:
            most = min(self.job.num_elements, self.job.array_parallelism or 1)
            flags["array"] = f"0-{self.job.num_elements - 1}%{most}"
        log = self.job.output.removesuffix(".out") + "_%t_log.out"  # our --output comes later, and the last one counts
        srun = shlex.join(["srun", "--unbuffered", "--output", log, *self.parameters["srun_args"]])
        commands = [*self.job.before, "export SUBMITIT_EXECUTOR=slurm", f"{srun} {command}"]
        wanted = [*sorted(_directive(key, value) for key, value in flags.items()), *filter(_is_read, commands)]
        lines = text.split("\n")
        written = [*sorted(line for line in lines if line.startswith(DIRECTIVES)), *filter(_is_read, lines)]
        if written != wanted:
            differs = next(
                (entry for entry in [*written, *wanted] if written.count(entry) != wanted.count(entry)), "the order"
            )
            raise SubmitError(
                f"submitit {submitit.__version__} writes another batch script than was asked for ({differs[:200]}). "
                "Nothing was submitted. constraints.txt names a release that hpc_trainer was tested with."
            )


def _flags(job: BatchJob) -> dict[str, Any]:
    """Return the job's options for sbatch, under submitit's names."""
    shape = job.shape
    gpus = f"{shape.gpu_type}:{shape.gpus_per_node}" if shape.gpu_type else str(shape.gpus_per_node)
    asked_by = shape.gpu_request if shape.gpus_per_node else None
    memory = (shape.mem_gb_per_node, shape.mem_gb_per_gpu, shape.mem_gb_per_cpu)
    flags = {
        "job_name": job.job_name,
        "comment": job.uuid,
        "time": shape.time_limit_min,
        "nodes": shape.num_nodes,
        "ntasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cpus_per_task,
        "gpus_per_node": gpus if asked_by == "gpus_per_node" else None,
        "gres": f"gpu:{gpus}" if asked_by == "gres" else None,
        # 0 is all memory of a node (sbatch(1)); without the flag a job gets the site's default for its cores.
        "mem": "0" if shape.whole_node and memory == (None, None, None) else _memory(shape.mem_gb_per_node),
        "mem_per_gpu": _memory(shape.mem_gb_per_gpu),
        "mem_per_cpu": _memory(shape.mem_gb_per_cpu),
        "partition": shape.partition,
        "qos": shape.qos,
        "constraint": shape.constraint,
        "exclude": shape.exclude,
        "account": shape.account,
    }
    return {key: value for key, value in flags.items() if value is not None}


def _is_read(line: str) -> bool:
    """Return True for a line that bash executes, not a comment or an empty line."""
    return bool(line) and line[0] != "#"


def _memory(gigabytes: float | None) -> str | None:
    return None if gigabytes is None else f"{megabytes(gigabytes)}M"


def _directive(key: str, value: object) -> str:
    flag = f"#SBATCH --{key.replace('_', '-')}"
    return flag if value is True else f"{flag}={shlex.quote(str(value))}"


def render_script(job: BatchJob) -> str:
    """Return the batch script that `hand_over` would submit; write nothing.

    Raises:
        ConfigError: the job has a value that no script may contain.
        SubmitError: submitit wrote another script than requested.
    """
    return BatchExecutor(job)._make_submission_file_text(shlex.join(job.command), job.uuid)


def hand_over(
    paths: SweepPaths, intent: Submission, job: BatchJob, options: Sequence[str] = (), book: Book | None = None
) -> str:
    """Submit the job of an intent and return its id; record the reply, a refusal or a doubt.

    If this process is killed at any point, the job is found by the intent's uuid.

    Args:
        options: sbatch options besides those in the script.
        book: the record that has the intent; None: the sweep's submissions.jsonl.

    Raises:
        RefusedError: Slurm refused the job; NoRoomError if Slurm may accept it later.
        ConfigError, SubmitError, MissingCommandError: nothing was handed over.
        SlurmError: it is unknown whether Slurm accepted the job; a later command finds out.
    """
    book = book or paths
    try:
        job_id = BatchExecutor(job, options).submit_job()
    except (ConfigError, SubmitError, MissingCommandError, RefusedError) as error:
        write_dropped(book, intent, str(error))
        raise
    except SlurmError:
        # "Socket timed out" may come after the controller accepted, or minutes before it accepts: a job that is not
        # found now stays in doubt, and a later command finds out.
        write_doubt(book, intent)
        known_id = None
        with contextlib.suppress(SlurmError):
            known_id = look_once(intent) or find_ended(paths.name, intent.uuid, intent.time)
        if known_id is None:
            raise
        job_id = known_id
    write_confirmation(book, intent, job_id)
    return job_id


def start_local(
    folder: Path, command: Sequence[str], shape: Shape, visible_gpus: list[int], setup: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start one task a rank on this machine, under submitit's local controller, and return the controller.

    The controller forwards SIGTERM to its tasks and ends when they have ended. submitit's own `start_controller` does
    the same with `python -m`, which puts the current folder first on the path.

    Args:
        setup: lines of cluster.setup, which bash runs before each task; the task then replaces bash. The first failing
            line ends the task.
    """
    if setup or shutil.which(command[0]) is None:  # only bash writes a missing program into the rank's log
        command = ["bash", "-c", "\n".join([*setup_lines(setup), 'exec "$@"']), "bash", *command]
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
