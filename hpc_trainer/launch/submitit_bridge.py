"""The only file that touches submitit, and the private parts of it that arrays without pickles need.

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

from hpc_trainer.config.rules.sbatch_options import sbatch_flags
from hpc_trainer.config.script_words import DIRECTIVES
from hpc_trainer.errors import ConfigError, MissingCommandError, RefusedError, SlurmError, SubmitError
from hpc_trainer.launch.batch_job import BatchJob, setup_lines
from hpc_trainer.launch.settle import look_once
from hpc_trainer.runs.files import write_atomic
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.spec import Shape
from hpc_trainer.runtime.start import start_words
from hpc_trainer.slurm.accounting import find_ended
from hpc_trainer.slurm.sbatch import megabytes, submit_script
from hpc_trainer.state.submissions import Book, Submission, write_confirmation, write_doubt, write_dropped

_SRUN_OPTIONS = ("--open-mode=append", "--kill-on-bad-exit=1")
# slurm.conf: SchedulerParameters=max_script_size, 4 MiB by default.
_MAX_SCRIPT_BYTES = 4 * 2**20
# submitit's local controller ends tasks at a time limit; runs on one's own machine have none.
_LOCAL_TIMEOUT_S = 365 * 24 * 3600


class BatchExecutor(SlurmExecutor):  # type: ignore[misc]
    """submitit's executor for one job whose ranks are a plain command.

    It differs from its parent in what the script ends with, in the name of the script's file, by which a later command
    finds an sbatch that is still at work, and in how sbatch is run: bounded in time, without the variables of a job
    that we may be inside of, and with an error that says what is known of the job.
    """

    def __init__(self, job: BatchJob, options: Sequence[str] = ()) -> None:
        """`options`: of sbatch, besides what the script says.

        Raises:
            ConfigError: the job holds what no script may hold.
        """
        problems = list(job.problems())
        if problems:
            raise ConfigError("\n".join(problems))
        super().__init__(folder=job.sweep.scripts)
        self.job, self.options = job, options
        self._flags = _flags(job)
        self._more = {
            **sbatch_flags(job.sbatch),
            "requeue": True,
            "output": job.output,
            "signal": f"USR2@{job.shape.signal_lead_s}",
        }
        self.parameters = {
            **self._flags,
            # Sites that enforce wckeys refuse submitit's default one.
            "wckey": None,
            "stderr_to_stdout": True,
            # submitit takes the signal's name from SUBMITIT_PREEMPT_SIGNAL, which a surrounding job may have set.
            "additional_parameters": self._more,
            "setup": job.before,
            # "--" ends srun's options: one that lacks its value cannot swallow the worker's program.
            "srun_args": ["--output", job.output, *_SRUN_OPTIONS, *job.srun_args, "--"],
        }
        if job.num_elements is not None:
            self.parameters |= {"map_count": job.num_elements, "array_parallelism": job.array_parallelism}

    @classmethod
    def affinity(cls) -> int:
        """Always usable: a plan is shown on machines without Slurm too."""
        return 2

    def submit_job(self) -> str:
        """Submits the job by one sbatch and returns its id.

        Raises:
            ConfigError: its script is too long; SubmitError: submitit wrote something else than was asked for.
            RefusedError, MissingCommandError: Slurm does not have it. Any other SlurmError: it may have.
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
        """Stops at a submitit release that writes something else: a flag with a default of its own, for example."""
        flags = {**self._flags, **self._more, "open-mode": "append"}
        if self.job.num_elements is not None:
            most = min(self.job.num_elements, self.job.array_parallelism or 1)
            flags["array"] = f"0-{self.job.num_elements - 1}%{most}"
        log = self.job.output.removesuffix(".out") + "_%t_log.out"  # our own --output comes later: the last one counts
        srun = shlex.join(["srun", "--unbuffered", "--output", log, *self.parameters["srun_args"]])
        commands = [*self.job.before, "export SUBMITIT_EXECUTOR=slurm", f"{srun} {command}"]
        wanted = [*sorted(_directive(key, value) for key, value in flags.items()), *filter(_is_read, commands)]
        lines = text.split("\n")
        found = [*sorted(line for line in lines if line.startswith(DIRECTIVES)), *filter(_is_read, lines)]
        if found != wanted:
            differs = next((each for each in [*found, *wanted] if found.count(each) != wanted.count(each)), "the order")
            raise SubmitError(
                f"submitit {submitit.__version__} writes another batch script than was asked for ({differs[:200]}). "
                "Nothing was submitted. constraints.txt names a release that hpc_trainer was tested with."
            )


def _flags(job: BatchJob) -> dict[str, Any]:
    """What the job asks of sbatch, in submitit's words."""
    shape = job.shape
    gpus = f"{shape.gpu_type}:{shape.gpus_per_node}" if shape.gpu_type else str(shape.gpus_per_node)
    is_gres = shape.gpu_request == "gres"
    flags = {
        "job_name": job.job_name,
        "comment": job.uuid,
        "time": shape.time_limit_min,
        "nodes": shape.num_nodes,
        "ntasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cpus_per_task,
        "gpus_per_node": gpus if shape.gpus_per_node and not is_gres else None,
        "gres": f"gpu:{gpus}" if shape.gpus_per_node and is_gres else None,
        "mem": _memory(shape.mem_gb_per_node),
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
    """True for a line that bash reads."""
    return bool(line) and line[0] != "#"


def _memory(gigabytes: float | None) -> str | None:
    return None if gigabytes is None else f"{megabytes(gigabytes)}M"


def _directive(key: str, value: object) -> str:
    flag = f"#SBATCH --{key.replace('_', '-')}"
    return flag if value is True else f"{flag}={shlex.quote(str(value))}"


def render_script(job: BatchJob) -> str:
    """The batch script that `hand_over` would submit; writes nothing.

    Raises:
        ConfigError: it holds what no script may hold; SubmitError: submitit wrote something else than was asked for.
    """
    return BatchExecutor(job)._make_submission_file_text(shlex.join(job.command), job.uuid)


def hand_over(
    paths: SweepPaths, intent: Submission, job: BatchJob, options: Sequence[str] = (), book: Book | None = None
) -> str:
    """Submits the job of an intent and returns its id; the reply, a refusal or a doubt is recorded.

    Killed anywhere, the job is found by the intent's uuid.

    Args:
        options: of sbatch, besides what the script says.
        book: where the intent was written; None: in the sweep's submissions.jsonl.

    Raises:
        RefusedError: refused; NoRoomError if it may come in later.
        ConfigError, SubmitError, MissingCommandError: nothing was handed over.
        SlurmError: nobody knows whether it was accepted; a later command finds out.
    """
    book = book or paths
    try:
        job_id = BatchExecutor(job, options).submit_job()
    except (ConfigError, SubmitError, MissingCommandError, RefusedError) as error:
        write_dropped(book, intent, str(error))
        raise
    except SlurmError:
        # "Socket timed out" may come after the controller accepted, and it may accept minutes later: what is not
        # seen now stays in doubt, and a later command finds out.
        write_doubt(book, intent)
        found = None
        with contextlib.suppress(SlurmError):
            found = look_once(intent) or find_ended(paths.name, intent.uuid, intent.time)
        if found is None:
            raise
        job_id = found
    write_confirmation(book, intent, job_id)
    return job_id


def start_local(
    folder: Path, command: Sequence[str], shape: Shape, visible_gpus: list[int], setup: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts one task a rank on this machine, under submitit's local controller, and returns the controller.

    The controller forwards SIGTERM to its tasks and ends when they have ended. submitit's own `start_controller`
    does the same by `python -m`, with the current folder first on the path.

    Args:
        setup: lines of cluster.setup, run by bash before each task, which then takes bash's place; the first that
            fails ends the task.
    """
    if setup or shutil.which(command[0]) is None:  # of what is not there only bash writes into the rank's log
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
