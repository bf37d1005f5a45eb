"""One job for sbatch: its resources, the arguments of its command, and the values that its script may contain.

Each value is checked against a pattern (config/script_words.py), twice. Validation refuses a bad value that a user
types. `problems` refuses a bad value from another source: a spec that another user wrote, or a sweep's folder that was
renamed. A value that passes is one word of a directive or a command, which sbatch and bash do not interpret further.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config import script_words as words
from hpc_trainer.config.environment import Start, environment_of, runs_dir_problem, start_of
from hpc_trainer.config.rules.cluster_rules import sbatch_problems
from hpc_trainer.errors import ConfigError
from hpc_trainer.record.last_words import SETUP_ENDED
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.states import CANCEL
from hpc_trainer.runtime.pace import JOB_START
from hpc_trainer.runtime.start import start_words
from hpc_trainer.slurm.queue import job_name
from hpc_trainer.slurm.shape import Shape

# Slurm 22.05 to 23.02: srun does not use the job's --cpus-per-task by itself.
_EXPORT_CPUS = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"
# Slurm 22.05 does not tell a job its start time, and the worker must know when the job will end.
_EXPORT_START = f"export {JOB_START}=$(date +%s)"
# sbatch --export=NONE, also where a site forces it, is srun's default too: the ranks would get none of the variables
# that the lines of this script set (sbatch(1), --export).
_EXPORT_ALL = "export SLURM_EXPORT_ENV=ALL"
_LATER_JOBS = "hpc_trainer.launch.later_jobs"
AT_WORK_ONLY = "--at-work"
"""Argument of later_jobs: no successor if Slurm refused the requeue because the job is not at work."""
_GO_ON = "set +e"
"""Line that undoes `set -e` of a user's setup: bash must reach the lines after srun."""
# bash's ERR trap runs for a failed command that no `if` or `||` tests; its DEBUG trap runs at each line. A failure
# inside a function or a sourced file is left to it: only its last status counts.
_GUARD = (
    'hpc_trainer_ends() { [ -z "$hpc_trainer_line" ] || '
    f'echo "{SETUP_ENDED} $((hpc_trainer_at - hpc_trainer_line)): exit status ${{hpc_trainer_code:-$1}}" >&2; }}',
    'hpc_trainer_fails() { [ -z "$hpc_trainer_line" ] || [ "$2" -gt "$hpc_trainer_depth" ] || '
    "{ hpc_trainer_code=$1; exit $(($1 > 128 ? $1 : 1)); }; }",
    "trap 'hpc_trainer_ends $?' EXIT",
    "trap 'hpc_trainer_fails $? ${#BASH_SOURCE[@]}' ERR",
    "hpc_trainer_line=$LINENO hpc_trainer_depth=${#BASH_SOURCE[@]}; "
    "trap '[ $LINENO -le $hpc_trainer_line ] || hpc_trainer_at=$LINENO' DEBUG",
)
_GUARD_ENDS = "trap - DEBUG; hpc_trainer_line="  # in this order: the trap compares with the number

_WORDS = {
    "hardware.partition": words.PARTITION,
    "hardware.qos": words.QOS,
    "hardware.constraint": words.CONSTRAINT,
    "hardware.exclude": words.HOSTS,
    "hardware.gpu_type": words.GPU_TYPE,
    "cluster.account": words.ACCOUNT,
}
_COUNTS = (
    "num_nodes", "tasks_per_node", "ranks_per_task", "gpus_per_node", "cpus_per_task", "time_limit_min",
    "signal_lead_s",
)  # fmt: skip
_MEMORY = ("mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """One job array, one run's successor job, or one top-up job."""

    sweep: SweepPaths
    """Sweep of the job, with an absolute folder; `slurm` in it has the scripts and the output of batch shells."""
    shape: Shape
    uuid: str
    """Uuid of the intent: the job's comment, and the worker's --array."""
    num_elements: int | None = None
    """Elements of the array; None for a single job."""
    array_parallelism: int | None = None
    """Elements that may run at once; None for a single job."""
    facts: tuple[str, ...] = ()
    """Lines that ask for facts of the environment to record; none can fail."""
    setup: tuple[str, ...]
    """Lines of cluster.environment and cluster.setup."""
    srun_args: tuple[str, ...]
    command: tuple[str, ...]
    """Arguments of one rank's command (`worker_command`), or of a top-up job's (`top_up_command`)."""
    sbatch: Mapping[str, Any] = field(default_factory=dict)
    """Further options of sbatch (`cluster.sbatch`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of sbatch by which the environment starts."""
    successor: tuple[str, ...] = ()
    """Words that submit the successor job of a run in a container, followed by the run's folder and the job's id; ():
    the run submits it itself."""
    exit_codes: tuple[tuple[int, int], ...] = ()
    """Pairs (our exit code, its replacement) for exit codes that the site's RequeueExit uses."""

    @classmethod
    def of_runs(
        cls, sweep: SweepPaths, shape: Shape, uuid: str, cluster: Mapping[str, Any], which: Sequence[str],
        archive: Path | None, exit_codes: tuple[tuple[int, int], ...], **array: int,
    ) -> BatchJob:  # fmt: skip
        """Return the job that starts the workers of an array, or of one run.

        Args:
            sweep: sweep of the runs.
            shape: resources of each run.
            uuid: uuid of the intent.
            cluster: section `cluster` of the frozen configuration, by which the runs of an array do not differ.
            which: `--array UUID`, or `--run RUN_ID` for a single run.
            archive: frozen code to start from; None: the installed hpc_trainer.
            exit_codes: pairs as in the field.
            array: `num_elements` and `array_parallelism` of an array.

        Raises:
            ConfigError: a container cannot see the folder of the sweep by its path.
        """
        problems = list(runs_dir_problem(environment_of(cluster), str(sweep.folder)))
        if problems:
            raise ConfigError(problems[0])
        start = start_of_ranks(sweep, shape, cluster)
        is_inside = environment_of(cluster).container is not None
        return cls(
            sweep=sweep, shape=shape, uuid=uuid, exit_codes=exit_codes, facts=start.facts,
            successor=(sys.executable, *start_words(_LATER_JOBS)) if is_inside else (),
            setup=(*start.lines, *cluster["setup"]), srun_args=(*start.srun_args, *cluster["srun_args"]),
            sbatch={**(cluster.get("sbatch") or {})}, options=start.sbatch,
            command=worker_command(sweep.folder, which, start.words, archive, shape.ranks_per_task), **array,
        )  # fmt: skip

    @property
    def job_name(self) -> str:
        """Return the job's name."""
        return job_name(self.sweep.name, self.uuid)

    @property
    def output(self) -> str:
        """Return the path of the output of sbatch and srun, with Slurm's patterns.

        Each element has one file for the batch shell and all tasks; ranks write their own logs in the run's folder.
        """
        return f"{self.sweep.scripts}/{'%j.out' if self.num_elements is None else '%A_%a.out'}"

    @property
    def before(self) -> list[str]:
        """Return the lines before the line that starts the ranks."""
        return [_EXPORT_CPUS, _EXPORT_START, _EXPORT_ALL, *self.facts, *setup_lines(self.setup)]

    @property
    def tail(self) -> list[str]:
        """Return the lines after the ranks: a requeue, if a worker asked the batch shell for it, and the exit code."""
        is_array = self.num_elements is not None
        job = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if is_array else "${SLURM_JOB_ID}"
        later = f' || {shlex.join(self.successor)} "$run" "{job}" {AT_WORK_ONLY}' if self.successor else ""
        cases = "".join(f" {ours}) code={instead};;" for ours, instead in self.exit_codes)
        return [
            "code=$?",
            f'request={shlex.quote(f"{self.sweep.scripts}/requeue-")}"{job}-${{SLURM_RESTART_COUNT:-0}}"',
            # rm first: a request is only for this incarnation. It names the run's folder, whose CANCEL marker is read
            # last.
            f'if run=$(cat -- "$request" 2> /dev/null); then rm -f -- "$request"; '
            f'[ -e "$run/{CANCEL}" ] || scontrol requeue Incomplete "{job}"{later}; fi',
            *([f"case $code in{cases} esac"] if cases else []),
            "exit $code",
        ]

    def problems(self) -> Iterator[str]:
        """Yield a message for each value of the job that no batch script may contain."""
        folder = str(self.sweep.folder)
        if not words.NAME.fits(self.sweep.name):
            yield (
                f"the sweep's folder {words.shown(folder)} gives its jobs their name: letters, digits and ._- "
                "only, at most 100. Rename it."
            )
        yield from words.folder_problem(folder)
        for key, word in _WORDS.items():
            value = getattr(self.shape, key.partition(".")[2])
            yield from words.word_problem(key, None if value is None else str(value), word)
        for key in _COUNTS:
            value = getattr(self.shape, key)
            if type(value) is not int or value < 0:
                yield f"the frozen {key}={value!r} must be a whole number. Submit the run again."
        for key in _MEMORY:
            value = getattr(self.shape, key)
            # 0 MB would be all memory of the node.
            if value is not None and not (type(value) in (int, float) and 1 / 1024 <= value < math.inf):
                yield f"the frozen {key}={value!r} must be a number of GB, 1 MB or more. Submit the run again."
        for line in (*self.facts, *self.setup):
            yield from words.setup_problem(line)
        yield from sbatch_problems(self.sbatch)
        for argument in self.srun_args:
            yield from words.srun_problem(argument)
        for text in (*self.command, *self.successor):
            yield from words.argument_problem("the command of the ranks", text)


def setup_lines(setup: Sequence[str]) -> list[str]:
    """Return lines of cluster.environment and cluster.setup as bash gets them.

    The first line that fails ends the shell and is named. The shell then exits with 1, so that its code has no other
    meaning for us or the site, or with 128 + signal if a signal killed the command.
    """
    return [*_GUARD, *setup, _GUARD_ENDS, _GO_ON] if setup else [_GO_ON]


def start_of_ranks(sweep: SweepPaths, shape: Shape, cluster: Mapping[str, Any]) -> Start:
    """Return how the ranks of a run start by the section `cluster` of its frozen configuration."""
    return start_of(cluster, sweep.folder.parent.absolute(), has_gpus=shape.gpus_per_node > 0)


def worker_command(
    sweep_dir: Path, which: Sequence[str], python: Sequence[str] = (sys.executable,), archive: Path | None = None,
    ranks_per_task: int = 1,
) -> tuple[str, ...]:  # fmt: skip
    """Return the arguments of one task's command.

    Args:
        sweep_dir: folder of the sweep.
        which: `--array UUID`, or `--run RUN_ID` for a single run.
        python: command before Python's own arguments: a program and its arguments, not shell.
        archive: the frozen code to start from; None: the installed hpc_trainer.
        ranks_per_task: ranks that the task starts by torchrun, if more than one.
    """
    start = start_words("hpc_trainer.worker") if archive is None else ("-u", str(archive))
    ranks = ("--torchrun", str(ranks_per_task)) if ranks_per_task > 1 else ()
    return (*python, *start, "--sweep-dir", str(sweep_dir), *which, *ranks)


def top_up_command(sweep_dir: Path, python: str | None = None) -> tuple[str, ...]:
    """Return the arguments of a top-up job's command."""
    return (*_program(python), *start_words("hpc_trainer"), "top-up", str(sweep_dir))


def _program(python: str | None) -> list[str]:
    return shlex.split(python) if python else [sys.executable]
