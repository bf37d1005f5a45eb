"""Use of a cluster by sweeps: GPU- and core-hours that were requested, used, redone and idle, and hours in the queue.

The accounting (`sacct -D`) counts what Slurm gave; runs without a job of Slurm, and sites without accounting, are
counted from the runs' own journals. One sacct is called for all sweeps.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.errors import ConfigError, SlurmError, valid
from hpc_trainer.record.journal import Journal, read_heartbeat
from hpc_trainer.record.known_runs import known_by_files
from hpc_trainer.record.layout import SUBMISSIONS, RunPaths, SweepPaths, journals_in
from hpc_trainer.record.ledger import Kind, ledger_of
from hpc_trainer.record.reading import Faults, list_folder
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.submissions import Submission, read_ledger
from hpc_trainer.record.turns import Turns, is_slot
from hpc_trainer.slurm.commands import user_name
from hpc_trainer.slurm.queue import JobUse, array_of, ask_uses

GROUPS = ("sweep", "person", "account", "month")
"""Columns by which `usage` may group."""
AMOUNTS = ("requested", "used", "redone", "idle")
_HOUR_S = 3600.0


@dataclass(kw_only=True)
class Use:
    """Use of the cluster by one group of jobs, in hours of GPUs and of cores."""

    jobs: int = 0
    """Starts of jobs, each restart counted."""
    hours: dict[str, float] = field(default_factory=dict)
    """`gpu_requested`, `core_used` and so on, in hours."""
    waiting_h: float = 0.0
    """Hours in the queue, summed over jobs."""
    is_by_slurm: bool = True

    def add(self, what: str, gpus: float, cores: float, seconds: float) -> None:
        """Add the hours of some GPUs and cores."""
        for unit, count in (("gpu", gpus), ("core", cores)):
            key = f"{unit}_{what}"
            self.hours[key] = self.hours.get(key, 0.0) + count * seconds / _HOUR_S

    def row(self) -> dict[str, Any]:
        """Return the figures by their names in JSON."""
        figures = {f"{unit}_hours_{what}": round(self.hours.get(f"{unit}_{what}", 0.0), 6)
                   for unit in ("gpu", "core") for what in AMOUNTS}  # fmt: skip
        return {"jobs": self.jobs, **figures, "waiting_h": round(self.waiting_h, 6), "is_by_slurm": self.is_by_slurm}


def usage(sweeps: Sequence[SweepPaths], by: Sequence[str], notes: list[str]) -> list[dict[str, Any]]:
    """Return a row for each group with its keys and figures, in the order of the keys.

    Args:
        sweeps: the sweeps to count.
        by: columns of `GROUPS`.
        notes: gets a note if Slurm did not answer or has forgotten jobs.
    """
    uses_by_group: dict[tuple[str, ...], Use] = {}

    def group(sweep: str, person: str, account: str, month: str) -> Use:
        values = dict(zip(GROUPS, (sweep, person, account, month), strict=True))
        return uses_by_group.setdefault(tuple(values[name] for name in by), Use())

    read = [_Sweep(paths) for paths in sweeps]
    jobs = {job: sweep for sweep in read for job in sweep.arrays}
    since = min((sweep.since for sweep in read if sweep.arrays), default=time.time())
    uses: list[JobUse] = []
    try:
        uses = ask_uses(jobs, since) if jobs else []
    except SlurmError as error:
        notes.append(f"sacct did not answer ({error}): hours are from the runs' own files.")
    owners = {array_of(use.job_id): (use.user, use.account) for use in uses}
    for use in uses:
        each = jobs.get(array_of(use.job_id))
        if each is not None:
            _add(use, each, functools.partial(group, each.name, use.user, use.account))
    for each in read:
        each.add_own(owners, functools.partial(group, each.name))
    untold = sorted(job for job in jobs if job not in owners)
    if untold and not notes:
        notes.append(
            f"The accounting does not know {len(untold)} of {len(jobs)} arrays, such as {untold[0]}: their hours are "
            "from the runs' own files."
        )
    return [{**dict(zip(by, key, strict=True)), **uses_by_group[key].row()} for key in sorted(uses_by_group)]


def checked_groups(keys: Sequence[str], option: str = "--by ") -> list[str]:
    """Return the columns to group by. Raises ConfigError if one is not of `GROUPS`, or there is none."""
    wrong = next((key for key in keys if key not in GROUPS), None if keys else "")
    if wrong is not None:
        raise ConfigError(f"{option}{wrong}: {valid(wrong, GROUPS)}")
    return [*keys]


def total(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> dict[str, Any]:
    """Return the sum of the rows; the first key is `all`."""
    names = {name: "all" if index == 0 else "" for index, name in enumerate(by)}
    figures = [name for name in rows[0] if name not in (*by, "is_by_slurm")]
    return {**names, **{name: sum(row[name] for row in rows) for name in figures}}


_OfMonth = Callable[[str], Use]
_OfSweep = Callable[[str, str, str], Use]


def _add(use: JobUse, sweep: _Sweep, group: _OfMonth) -> None:
    """Add one start of a job to the groups of the months in which it ran."""
    whose = sweep.whose(use.job_id)
    first = group(_month(use.start_time or use.submit_time))
    first.jobs += 1
    first.waiting_h += use.waited_s / _HOUR_S
    if use.is_newest:
        first.add("requested", use.gpus, use.cores, use.limit_s)
    for month, seconds in _by_month(use.start_time, use.elapsed_s):
        group(month).add("used", use.gpus, use.cores, seconds)
        if whose is not None:
            gpus, cores = _asked(whose)
            group(month).add("idle", max(0.0, use.gpus - gpus), max(0.0, use.cores - cores), seconds)
        elif sweep.is_slot(use.job_id):
            group(month).add("idle", use.gpus, use.cores, seconds)


class _Sweep:
    """A sweep with its jobs, and the times recorded in its own files."""

    def __init__(self, paths: SweepPaths) -> None:
        self.paths, self.name, self._faults = paths, paths.name, Faults()
        self._ledger, self._specs = known_by_files(paths)
        on_slurm = [
            submission
            for submission in self._ledger.submissions
            if submission.executor == "slurm" and submission.job_id is not None
        ]
        self._arrays: dict[str, Submission] = {str(submission.job_id): submission for submission in on_slurm}
        self._singles: dict[str, str] = {}
        self._names = {run_id: list_folder(paths.run(run_id).folder, self._faults) or () for run_id in self._specs}
        for run_id, names in self._names.items():
            for submission in read_ledger(paths.run(run_id)).submissions if SUBMISSIONS in names else ():
                if submission.job_id is not None and submission.executor == "slurm":
                    self._singles[submission.job_id] = run_id
        self.since = min((submission.time for submission in on_slurm), default=time.time())

    @property
    def arrays(self) -> list[str]:
        """Ids of the sweep's jobs on Slurm; an array counts as one job."""
        return [*self._arrays, *self._singles]

    def whose(self, job_id: str) -> RunSpec | None:
        """Return the run of a job; None for a slot of a pool, and for a job without a run."""
        array, _, element = job_id.partition("_")
        if array in self._singles:
            return self._specs.get(self._singles[array])
        submission = self._arrays.get(array)
        if submission is None or submission.is_pool or not element.isdecimal():
            return None
        index = int(element)
        return self._specs.get(submission.run_ids[index]) if index < len(submission.run_ids) else None

    def is_slot(self, job_id: str) -> bool:
        """Return True if a job is a slot of a pool."""
        submission = self._arrays.get(array_of(job_id))
        return submission is not None and submission.is_pool

    def add_own(self, told: Mapping[str, tuple[str, str]], group: _OfSweep) -> None:
        """Add times that only the sweep's own files record: repeated steps, idle slots, jobs unknown to the accounting.

        Args:
            told: array id -> (user, account) for the jobs in Slurm's accounting.
            group: returns the group of a user, an account and a month.
        """
        for run_id, spec in self._specs.items():
            if journals_in(self._names[run_id]):
                self._add_run(self.paths.run(run_id), spec, told, group)
        pools = {pool.uuid: (pool, told[job]) for job, pool in self._arrays.items() if pool.is_pool and job in told}
        if pools:
            self._take_turns(pools, group)

    def _add_run(self, run: RunPaths, spec: RunSpec, told: Mapping[str, tuple[str, str]], group: _OfSweep) -> None:
        attempts = Journal(run).read(self._faults)
        of_run, cores = _asked(spec)
        ledger = ledger_of(run, attempts, num_gpus=0, faults=self._faults)
        by_attempt = {} if ledger is None else {item.attempt: item for item in ledger.attempts}
        for number, attempt in enumerate(attempts):
            item = by_attempt.get(attempt.attempt)
            job = array_of(attempt.job_id)
            whose = told.get(job, (user_name(), spec.shape.account or "-"))
            use = group(*whose, _month(attempt.start_time))
            gpus = of_run / attempt.per_gpu
            if item is not None:
                use.add("redone", gpus, cores, item.seconds.get(Kind.redone, 0.0))
            if job in told:
                continue
            is_last = number + 1 == len(attempts)
            later = _last_sign(run, attempt.start_time) if is_last else attempts[number + 1].start_time
            end = attempt.end_time or later
            use.jobs += 1
            use.is_by_slurm = False
            use.add("requested", gpus, cores, spec.shape.time_limit_min * 60.0 if number == 0 else 0.0)
            for month, seconds in _by_month(attempt.start_time, max(0.0, end - attempt.start_time)):
                group(*whose, month).add("used", gpus, cores, seconds)

    def _take_turns(self, pools: Mapping[str, tuple[Submission, tuple[str, str]]], group: _OfSweep) -> None:
        """Subtract the turns of runs from the idle time of the slots, which begins as their whole time.

        Of runs that share a GPU each has its share, so a GPU is idle in part if only some of its places have a run.
        """
        turns = Turns(self.paths)
        slots = [name for name in list_folder(self.paths.folder, self._faults) or () if is_slot(name)]
        for end in turns.all_ends(slots):
            spec = self._specs.get(end.run_id)
            if spec is not None and end.uuid in pools:
                gpus, cores = _asked(spec)
                pool, whose = pools[end.uuid]
                group(*whose, _month(end.time)).add("idle", -gpus / max(1, pool.per_gpu), -cores, end.seconds)


def _asked(spec: RunSpec) -> tuple[float, float]:
    shape = spec.shape
    return (
        float(shape.num_nodes * shape.gpus_per_node),
        float(shape.num_nodes * shape.tasks_per_node * shape.cpus_per_task),
    )


def _last_sign(run: RunPaths, begin: float) -> float:
    return max(begin, float(read_heartbeat(run.heartbeat).get("time", begin)))


def _month(seconds: float) -> str:
    return time.strftime("%Y-%m", time.localtime(seconds))


def _by_month(start: float, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield (month, seconds in it) of a period, by the clock of this machine."""
    end = start + seconds
    while start < end:
        begin = datetime.datetime.fromtimestamp(start)
        following = begin.replace(day=1, hour=0, minute=0, second=0, microsecond=0) + datetime.timedelta(days=32)
        bound = min(end, following.replace(day=1).timestamp())
        yield _month(start), bound - start
        start = bound
