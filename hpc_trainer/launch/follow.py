"""Runs that follow others, at submit: names are frozen, jobs get dependencies, and held jobs are released.

Slurm starts a waiting array when the jobs of the followed runs have ended (`afterany`): `afterok` does not survive
requeues, and a successor job has another id. So each run looks once more when its job starts (worker/follow.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.program import followed_places
from hpc_trainer.config.schema.train import AfterConfig
from hpc_trainer.errors import HpcTrainerError, SlurmError
from hpc_trainer.launch.pools import asks_for_pool
from hpc_trainer.record.chain import (
    LOOK_AGAIN_S,
    MOST_AWAITED,
    Awaited,
    Stand,
    Waits,
    awaited_of,
    cancel_follower,
    digest_of,
    find_awaited,
    find_cycle,
    followers_of,
    held_reason,
    look_at,
    on_failure_of,
    read_decision,
    run_named,
    specs_of,
    told,
    write_decision,
)
from hpc_trainer.record.layout import RunPaths, SweepPaths, default_runs_dir
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import AFTER_HELD, CANCEL, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.slurm.jobs import release_jobs, update_job

_DIGITS = 10  # digits of the digest, at the end of a run's id
# Runs that follow different ones need arrays of their own; above this number one array waits for all of them.
_MOST_GROUPS = 16
_ACTIVE = "followed runs wait or work"
_NO_POOL = (
    "pool.jobs: a run that waits for others would keep a slot of the pool busy. Leave out pool.jobs, or submit when "
    "what the runs follow is complete."
)
# The local queue looks at followed runs again after so many seconds.
_QUEUE_AGAIN_S, _HELD_AGAIN_S, _SLURM_AGAIN_S, _SAME_LOOK_S = 2.0, 10.0, 60.0, 1.0


# Frozen names.


def with_after(after: AfterConfig, command: str | None, runs_dir: str | None) -> AfterConfig:
    """Return the section with full names, and the digest of the runs whose checkpoints the command names.

    Raises:
        ConfigError: a name is not that of a sweep or run of the user, or a placeholder does not name one followed run.
    """
    names = dict.fromkeys(name for name, _ in followed_places(command or "").values())
    if not after.runs and not names:
        return after
    folder = (Path(runs_dir).expanduser() if runs_dir else default_runs_dir()).absolute()
    awaited = [find_awaited(name, folder) for name in after.runs]
    named = [run_named(name, awaited) for name in names]
    specs = [specs_of(followed.folder)[str(followed.run_id)] for followed in named]
    return dataclasses.replace(
        after,
        runs=list(dict.fromkeys(followed.text(folder) for followed in awaited)),
        content=digest_of("command", specs) if specs else None,
    )


def by_awaited_names(sweep: SweepPaths, specs: dict[str, RunSpec], known: Mapping[str, RunSpec]) -> dict[str, RunSpec]:
    """Return the runs under the ids that they have if they were submitted before their sources were complete.

    The same command would otherwise make another run as soon as the source is complete and has a digest.
    """
    digests = {spec.digest: spec for spec in known.values()}
    named = (_as_submitted(sweep, spec, digests) for spec in specs.values())
    return {spec.run_id: spec for spec in named}


def _as_submitted(sweep: SweepPaths, spec: RunSpec, known: Mapping[str, RunSpec]) -> RunSpec:
    source = spec.config.get("init_from") or {}
    place = Path(str(source.get("path")))
    if not source.get("digest") or place.parent.name != "checkpoints" or spec.digest in known:
        return spec
    origin, runs_dir = place.parent.parent, sweep.folder.parent
    with contextlib.suppress(HpcTrainerError, OSError):
        followed = Awaited(origin.parent, origin.name)
        awaits = digest_of(f"run, {source['checkpoint']}", [specs_of(followed.folder)[origin.name]])
        before = {**source, "path": followed.text(runs_dir), "digest": None, "awaits": awaits}
        config = {**spec.config, "init_from": before}
        earlier = known.get(config_digest(config))
        if earlier is not None:
            return dataclasses.replace(spec, run_id=earlier.run_id, digest=earlier.digest, config=config)
    return spec


# Dependencies.


@dataclass(frozen=True, slots=True)
class Follows:
    """Jobs in Slurm's queue that the runs of an array wait for, or True for `is_held` if they wait for a user."""

    jobs: tuple[str, ...] = ()
    is_held: bool = False
    reason: str = ""
    """Reason why the runs wait; "" if they wait for nothing."""

    @property
    def options(self) -> list[str]:
        """Options of sbatch besides a dependency: a job without one would start at once and be requeued."""
        if self.is_held:
            return ["--hold"]
        return [f"--begin=now+{LOOK_AGAIN_S}"] if self.reason and not self.jobs else []


@dataclass(frozen=True, slots=True)
class Followed:
    """Runs that a grid follows, with their present states."""

    of_run: Mapping[str, Follows]
    """Run id -> what it waits for; runs that wait for nothing are absent."""
    problems: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    """Lines for the user: which runs or sweeps the runs follow, and their states."""


def read_followed(sweep: SweepPaths, specs: Sequence[RunSpec], grid: Sequence[RunSpec] = ()) -> Followed:
    """Look at the runs that these runs follow; each followed sweep is read once.

    Args:
        sweep: the sweep of the runs.
        specs: the runs to submit.
        grid: all runs of the grid, none of which may wait for itself.
    """
    runs_dir = sweep.folder.parent
    cycle = find_cycle(grid, sweep)
    awaited = {spec.run_id: awaited_of(spec.config, runs_dir) for spec in specs}
    if cycle is None and not any(awaited.values()):
        return NOBODY
    if cycle is not None:
        return Followed({}, problems=(cycle,))
    stands = {followed: look_at([followed]) for followed in dict.fromkeys(itertools.chain(*awaited.values()))}
    of_run, problems = dict[str, Follows](), dict[str, None]()
    for spec in specs:
        waits = list(dict.fromkeys(stand for followed in awaited[spec.run_id] for stand in stands[followed]))
        follows, problem = _follows(spec, waits)
        if problem is not None:
            problems[problem] = None
        if follows is not None:
            of_run[spec.run_id] = follows
        if follows is not None and asks_for_pool(spec):
            problems[_NO_POOL] = None
    lines = tuple(_line(followed, runs_dir, stands[followed]) for followed in stands)
    return Followed(_in_few_groups(of_run), tuple(problems), lines)


NOTHING = Follows()
NOBODY = Followed({})


def _follows(spec: RunSpec, waits: Sequence[Stand]) -> tuple[Follows | None, str | None]:
    """Return the jobs that a run waits for, or None; and the problem with the followed runs, or None."""
    sorted_waits = Waits.of(waits, on_failure_of(spec))
    if sorted_waits.is_cancelled:
        return None, (
            f"after.on_failure=cancel, and {spec.run_id} follows {told(sorted_waits.failed)}: it would be cancelled at "
            f"once. Restart that run first (hpc-trainer retry {sorted_waits.failed[0].name}), or use "
            "after.on_failure=wait or start."
        )
    if sorted_waits.idle:
        return Follows(is_held=True, reason=held_reason(sorted_waits.idle)), None
    jobs = tuple(dict.fromkeys(stand.job for stand in sorted_waits.active if stand.job is not None))
    return (Follows(jobs=jobs[-MOST_AWAITED:], reason=_ACTIVE) if sorted_waits.active else None), None


def _in_few_groups(of_run: Mapping[str, Follows]) -> dict[str, Follows]:
    waiting = {follows for follows in of_run.values() if not follows.is_held}
    if len(waiting) <= _MOST_GROUPS:
        return dict(of_run)
    jobs = tuple(dict.fromkeys(job for follows in of_run.values() for job in follows.jobs))[-MOST_AWAITED:]
    return {
        run_id: follows if follows.is_held else Follows(jobs=jobs, reason=_ACTIVE) for run_id, follows in of_run.items()
    }


def _line(followed: Awaited, runs_dir: Path, stands: Sequence[Stand]) -> str:
    name = followed.text(runs_dir)
    if not stands:
        return f"{name}, which is complete"
    if followed.run_id is not None:
        return str(stands[0])
    states = ", ".join(sorted({stand.state.value for stand in stands}))
    return f"{name}, of which {len(stands)} run(s) are not complete ({states})"


# Held jobs of followers go on after a retry.


def release_followers(sweep: SweepPaths, *, has_held: bool) -> list[str]:
    """Release jobs that are held for failures of followed runs, if these are no longer failed; return notes.

    Slurm is asked once for each sweep that follows `sweep`, and scontrol called twice for each that has such jobs.

    Args:
        sweep: the sweep whose runs were submitted.
        has_held: True if the sweep has held runs itself, which are included.
    """
    notes: list[str] = []
    for follower in (*([sweep] if has_held else []), *followers_of(sweep)):
        with contextlib.suppress(HpcTrainerError, OSError):  # the retry has succeeded; `why` of the waiting run says it
            notes += _release(follower)
    return notes


def _release(follower: SweepPaths) -> Iterator[str]:
    status = read_status(follower)
    held = [run for run in status.open_runs.values() if run.state is RunState.HELD and run.own_job is not None]
    held = [run for run in held if read_decision(follower.run(run.run_id)).get("decision") == AFTER_HELD]
    if not held:
        return
    followed = read_followed(follower, [run.spec for run in held])
    free = [run for run in held if not followed.of_run.get(run.run_id, NOTHING).is_held]
    jobs = [str(run.own_job) for run in free]
    if not jobs:
        return
    awaited = dict.fromkeys(job for run in free for job in followed.of_run.get(run.run_id, NOTHING).jobs)
    dependency = f"afterany:{':'.join(list(awaited)[-MOST_AWAITED:])}" if awaited else ""
    try:
        update_job(",".join(jobs), [f"Dependency={dependency}"])
        refused = release_jobs(jobs)
    except SlurmError as error:
        refused = [str(error)]
    if refused:
        yield f"{len(jobs)} held run(s) of {follower.name} were not released: {refused[0]}"
        return
    for run in free:
        write_decision(follower.run(run.run_id), "", reason="")
    yield f"{len(jobs)} held run(s) of {follower.name} continue when these are complete."


def mark_held(sweep: SweepPaths, specs: Iterable[RunSpec], reason: str) -> None:
    """Record in the folder of each run, before its first job, that it is held and why."""
    for spec in specs:
        write_decision(sweep.run(spec.run_id), AFTER_HELD, reason=reason)


# The local queue.


class Gate:
    """Check for a local queue whether a run may start; it looks at the followed runs every few seconds."""

    def __init__(self, sweep: SweepPaths) -> None:
        self._sweep = sweep
        self._next_look: dict[str, float] = {}
        self._seen: dict[tuple[Awaited, ...], tuple[float, list[Stand]]] = {}

    def is_open(self, spec: RunSpec) -> bool:
        """Return True if a run may start, or was cancelled; record if it is held or cancelled by a run it follows."""
        awaited = awaited_of(spec.config, self._sweep.folder.parent)
        if not awaited:
            return True
        now = time.monotonic()
        if now < self._next_look.get(spec.run_id, 0.0):
            return False
        paths = self._sweep.run(spec.run_id)
        if is_there(paths.marker(CANCEL)):
            return True
        waits = Waits.of(self._look(awaited, now), on_failure_of(spec))
        if waits.may_start:
            return True
        is_slurm = any(stand.job is not None for stand in waits.active)
        pause_s = _SLURM_AGAIN_S if is_slurm else _HELD_AGAIN_S if waits.idle else _QUEUE_AGAIN_S
        self._next_look[spec.run_id] = now + pause_s
        if waits.is_cancelled:
            cancel_follower(paths, waits.failed)
        elif waits.idle:
            _record(paths, AFTER_HELD, held_reason(waits.idle))
        else:
            _record(paths, "", "")
        return False

    def _look(self, awaited: tuple[Awaited, ...], now: float) -> list[Stand]:
        """Return the followed runs that are not complete, as of the last second."""
        seen = self._seen.get(awaited)
        if seen is None or now - seen[0] >= _SAME_LOOK_S:
            for followed in awaited:
                look_anew(followed.folder)
            seen = self._seen[awaited] = now, look_at(awaited)
        return seen[1]


def _record(paths: RunPaths, decision: str, reason: str) -> None:
    """Record a decision if it differs from the one before; "" takes an earlier one back."""
    before = read_decision(paths)
    if (before.get("decision", ""), before.get("reason", "")) != (decision, reason):
        write_decision(paths, decision, reason=reason)
