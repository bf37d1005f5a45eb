"""Runs that follow others: the names of the followed runs, their states, and the decision of a waiting run.

A run that follows others (`after`, or an `init_from` whose source is not complete) looks at them once when its job
starts, and records its decision in its own folder (`after.json`). A sweep that is followed has the names of its
followers in `followers/`, so that `why` and `retry` find them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_trainer.config.schema.output import compared_by, is_best_small, kept_best
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError, UntrustedFileError, did_you_mean
from hpc_trainer.record.files import make_folder, write_json, write_marker
from hpc_trainer.record.known_runs import known_by_files
from hpc_trainer.record.layout import RunPaths, SweepPaths, sweep_folder
from hpc_trainer.record.reading import Faults, is_finite, is_there, list_folder, read_json
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import AFTER_CANCELLED, CANCEL, DONE, RunState
from hpc_trainer.record.status import SweepStatus, read_status

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import OnFailure, TrainConfig

BEST = "best:"
"""Beginning of a source of `init_from` that is the best run of a sweep."""
LOOK_AGAIN_S = 600
"""Seconds until a job looks again if the runs that it follows wait too and have no job; each look is a start of the
job."""
MOST_AWAITED = 1000
"""Most jobs that one dependency names, because it is one argument of a command; the newest jobs end last."""
_SHOWN = 3
_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Planned:
    """Sweeps of a chain that are planned together, before any of them is submitted."""

    sweeps: Mapping[Path, Mapping[str, RunSpec]] = field(default_factory=dict)
    """Runs of each sweep by its folder."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a stage -> name of its sweep."""
    later: frozenset[str] = frozenset()
    """Names of this stage and of later ones, which it cannot follow."""


PLANNED: ContextVar[Planned] = ContextVar("PLANNED", default=Planned())  # noqa: B039  (frozen, never changed)
"""Sweeps that count as submitted while a chain is planned."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A followed run, or a followed sweep with all its runs."""

    folder: Path
    """Folder of the sweep."""
    run_id: str | None = None
    """None: all runs of the sweep."""

    @property
    def sweep(self) -> SweepPaths:
        """Paths of the sweep."""
        return SweepPaths(self.folder)

    def text(self, runs_dir: Path) -> str:
        """Return the name as `after.runs` has it: SWEEP or SWEEP/RUN, with the folder if it is not in `runs_dir`."""
        sweep = self.folder.name if self.folder.parent == runs_dir else str(self.folder)
        return sweep if self.run_id is None else f"{sweep}/{self.run_id}"


@dataclass(frozen=True, slots=True)
class Stand:
    """State of a followed run that is not complete."""

    name: str
    """SWEEP/RUN."""
    state: RunState
    job: str | None = None
    """Id of its Slurm job, if the job is certainly its own."""

    @property
    def has_failed(self) -> bool:
        """True if the run has failed, was cancelled, or is gone: `after.on_failure` decides."""
        return self.state.has_failed or self.state in (RunState.CANCELLED, RunState.GONE)

    def __str__(self) -> str:
        return f"{self.name}, which is {self.state.value}"


def told(stands: Sequence[Stand]) -> str:
    """Return the first few of these runs with their states, and the number of the others."""
    more = f" and {len(stands) - _SHOWN} more" if len(stands) > _SHOWN else ""
    return "; ".join(map(str, stands[:_SHOWN])) + more


# Names, as users type them.


def find_awaited(text: str, runs_dir: Path, key: str = "after=") -> Awaited:
    """Return the sweep or run named by SWEEP, SWEEP/RUN or a folder; a run by its id, or the beginning or end of it.

    Args:
        text: the name.
        runs_dir: folder of sweeps.
        key: what the user typed before `text`, for messages.

    Raises:
        ConfigError: there is no such sweep or run, the name fits several runs, or the sweep is another user's.
    """
    planned = PLANNED.get()
    sweep_name, _, run = text.partition("/")
    if sweep_name in planned.later:
        earlier = f"earlier stages only: {', '.join(planned.names)}" if planned.names else "earlier stages only"
        raise ConfigError(f"{key}{text}: a stage follows {earlier}. Change the order of the stages, or the name.")
    folder = sweep_folder(runs_dir, planned.names.get(sweep_name, sweep_name))
    if text.startswith(("/", "~", "./", "../")):
        place = Path(text).expanduser().absolute()
        is_run = not SweepPaths(place).exists and SweepPaths(place.parent).exists
        folder, run = (place.parent, place.name) if is_run else (place, "")
    if folder not in planned.sweeps:
        _check_sweep(text, folder, key)
    if not run:
        return Awaited(folder)
    specs = specs_of(folder)
    fitting = [run] if run in specs else [name for name in specs if name.startswith(run) or name.endswith(run)]
    if len(fitting) == 1:
        return Awaited(folder, fitting[0])
    names = ", ".join((fitting or list(specs))[:_NAMES_SHOWN])
    if fitting:
        raise ConfigError(f"{key}{text} may be {names}. Write more of the id.")
    raise ConfigError(
        f"{key}{text}: no run of {folder.name} is named {run}. {did_you_mean(run, specs)}Its runs: {names or 'none'}."
    )


def specs_of(folder: Path) -> Mapping[str, RunSpec]:
    """Return the specs of a sweep by run id: of a planned sweep if there is one, else from the sweep's files."""
    return PLANNED.get().sweeps.get(folder) or known_by_files(SweepPaths(folder))[1]


def _check_sweep(text: str, folder: Path, key: str) -> None:
    """Check that the folder is a sweep of this user. Raises ConfigError."""
    planned = PLANNED.get()
    if not SweepPaths(folder).exists:
        names = [path.name for path in _folders(folder.parent) if SweepPaths(path).exists]
        if planned.names:
            names = [*planned.names, *names]
        there = f"Sweeps there: {', '.join(sorted(names)[:_NAMES_SHOWN])}." if names else "There is none yet."
        raise ConfigError(
            f"{key}{text}: there is no sweep {folder.name} in {folder.parent}. "
            f"{did_you_mean(folder.name, names)}{there} Submit it first, or name the folder of a sweep elsewhere."
        )
    try:
        owner = folder.stat().st_uid
    except OSError as error:
        raise ConfigError(f"{key}{text}: {folder} cannot be read: {error}.") from error
    if owner not in (os.getuid(), 0):
        raise ConfigError(
            f"{key}{text}: the sweep {folder} is another user's (uid {owner}), who may change or delete it while runs "
            "wait. Follow a sweep of your own; weights of others are taken by init_from=FOLDER once they are complete."
        )
    try:
        known_by_files(SweepPaths(folder))
    except (UntrustedFileError, OSError) as error:
        raise ConfigError(f"{key}{text}: {error}") from error


def _folders(runs_dir: Path) -> list[Path]:
    try:
        return sorted(runs_dir.iterdir())
    except OSError:
        return []


def run_named(name: str, awaited: Sequence[Awaited]) -> Awaited:
    """Return the one followed run that {after.NAME.checkpoint} means.

    NAME is a sweep with one run, a stage, or the beginning or end of a run's id.

    Raises:
        ConfigError: no followed run is named so, or several are.
    """
    runs: list[Awaited] = []
    for source in awaited:
        run_ids = list(specs_of(source.folder)) if source.run_id is None else [source.run_id]
        is_sweep = name == source.folder.name or source.folder.name.endswith(f"-{name}")
        fitting = run_ids if is_sweep else [run for run in run_ids if run.startswith(name) or run.endswith(name)]
        runs += [Awaited(source.folder, run_id) for run_id in fitting]
    runs = list(dict.fromkeys(runs))
    if len(runs) == 1:
        return runs[0]
    followed = ", ".join(f"{other.folder.name}{f'/{other.run_id}' if other.run_id else ''}" for other in awaited)
    if not runs:
        raise ConfigError(
            f"{{after.{name}.checkpoint}} names no run that this one follows. It follows {followed or 'none'}: add "
            f"after={name}, or write {{after.NAME.checkpoint}} with one of these names."
        )
    raise ConfigError(
        f"{{after.{name}.checkpoint}} means one run, and {name} is {len(runs)}: "
        f"{', '.join(str(run.run_id) for run in runs[:3])}. Follow one: after={runs[0].folder.name}/"
        f"{runs[0].run_id}."
    )


def awaited_of(config: Mapping[str, Any], runs_dir: Path) -> tuple[Awaited, ...]:
    """Return the runs that a run follows by its frozen configuration; () if it follows none.

    Args:
        config: the frozen configuration; specs of older versions lack the keys.
        runs_dir: folder of the run's sweep, to which names are relative.
    """
    names = [*(config.get("after") or {}).get("runs", ())]
    source = config.get("init_from") or {}
    if source.get("awaits"):
        names.append(str(source["path"]).removeprefix(BEST))
    return tuple(dict.fromkeys(_frozen(name, runs_dir) for name in names))


def _frozen(name: str, runs_dir: Path) -> Awaited:
    """Return the sweep or run that a name in a frozen configuration means; `Awaited.text` wrote the name."""
    if not name.startswith("/"):
        sweep, _, run_id = name.partition("/")
        return Awaited(sweep_folder(runs_dir, sweep), run_id or None)
    place = Path(name)
    return Awaited(place) if SweepPaths(place).exists else Awaited(place.parent, place.name)


# States of followed runs.


def look_at(awaited: Iterable[Awaited]) -> list[Stand]:
    """Return the followed runs that are not complete, each once; [] if all are.

    Slurm is asked at most once for each sweep, and only about runs whose files do not record an end.
    """
    wanted: dict[Path, set[str] | None] = {}
    for followed in awaited:
        names = wanted.setdefault(followed.folder, set())
        if followed.run_id is None:
            wanted[followed.folder] = None
        elif names is not None and not is_there(followed.sweep.run(followed.run_id).marker(DONE)):
            names.add(followed.run_id)
    return [stand for folder, run_ids in wanted.items() for stand in _stands(folder, run_ids)]


def _stands(folder: Path, run_ids: Collection[str] | None) -> Iterator[Stand]:
    """Yield the runs of a sweep that are not complete, among those with these ids, or all."""
    if run_ids is not None and not run_ids:
        return
    if (planned := PLANNED.get().sweeps.get(folder)) is not None and not SweepPaths(folder).exists:
        yield from (
            Stand(f"{folder.name}/{name}", RunState.PENDING) for name in planned if not run_ids or name in run_ids
        )
        return
    try:
        status = read_status(SweepPaths(folder), is_look=True)
    except RunStateError:  # the folder was deleted, with all that is known of its runs
        yield Stand(folder.name, RunState.GONE)
        return
    planned_anew = PLANNED.get().sweeps.get(folder, {})
    is_search = run_ids is None and status.ledger.is_search
    if is_search:
        yield from _search_stand(status)
    for run_id in status.specs if run_ids is None else sorted(run_ids):
        if run_id not in status.specs:
            yield Stand(f"{folder.name}/{run_id}", RunState.PENDING if run_id in planned_anew else RunState.GONE)
        elif is_search and status.states[run_id] is RunState.PAUSED:
            continue  # `_search_stand` says whether it may still be promoted
        elif (state := status.states[run_id]) is not RunState.COMPLETED:
            will_go = run_id in planned_anew and state.needs_submit
            job = _job_of(status.open_runs[run_id])
            yield Stand(f"{folder.name}/{run_id}", RunState.PENDING if will_go else state, job)


def _search_stand(status: SweepStatus) -> Iterator[Stand]:
    """Yield the search of a sweep if it has trials left to draw, to promote or to end."""
    for states_of in contributions("search_ends"):
        with contextlib.suppress(HpcTrainerError):
            if states_of(status.sweep) != {}:
                return
    pool = status.pools[-1].submission if status.pools else None
    job_id = pool.job_id if pool is not None and pool.executor == "slurm" else None
    yield Stand(status.sweep.name, RunState.NEW if pool is None else RunState.PENDING, job_id)


def _job_of(run: RunStatus) -> str | None:
    """Return the job after whose end a run is over or has another job; for a run of a pool the array of all slots."""
    pool = run.submission if run.submission is not None and run.submission.is_pool else None
    if pool is None or pool.executor != "slurm" or run.state not in (
        RunState.PENDING, RunState.RUNNING, RunState.REQUEUED
    ):  # fmt: skip
        return run.own_job
    return pool.job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Goal of the search of a sweep: its metric, the direction, and the runs of which all trials are variants."""

    metric: str
    is_max: bool
    bases: tuple[RunSpec, ...]


def goal_of(folder: Path) -> Goal | None:
    """Return the goal of a sweep's search; None if the sweep is no search.

    Raises:
        RunStateError: the search cannot be read.
    """
    goals: Iterator[Goal | None] = (find(SweepPaths(folder)) for find in contributions("search_goals"))
    return next((goal for goal in goals if goal is not None), None)


def metric_of(specs: Iterable[RunSpec], goal: Goal | None) -> str | None:
    """Return the metric by which the best run of a sweep is chosen; None if it is not known before the runs end.

    It is the metric of the sweep's search, else `checkpoint.keep_best` of the runs, else a metric of their task, as
    `results` chooses.
    """
    if goal is not None:
        return goal.metric
    for spec in specs:
        if spec.is_lost:
            continue
        kept = kept_best(spec.config["checkpoint"])
        if kept.keep_best is not None:
            return kept.keep_best
        if not (spec.is_program or spec.is_own_loop):
            return compared_by(kept, spec.typed().task.evaluated)
    return None


def best_of(folder: Path) -> tuple[RunStatus, str]:
    """Return the best complete run of a sweep, and the metric that decides.

    Raises:
        ConfigError: no complete run has the metric.
    """
    status = read_status(SweepPaths(folder), is_look=True)
    done = [run for run in status.runs if run.state is RunState.COMPLETED]
    return _best(done, folder)


def _best(done: Sequence[RunStatus], folder: Path) -> tuple[RunStatus, str]:
    kept = kept_best(done[0].spec.config["checkpoint"] if done else {})
    goal = goal_of(folder)
    known = {name for run in done for name in run.metrics}
    metric = metric_of((run.spec for run in done), goal) or compared_by(kept, known)
    if metric is None:
        raise ConfigError(f"no complete run of {folder} has a metric by which the best is known. Name a run.")
    is_small = is_best_small(kept, metric) if goal is None else not goal.is_max
    sign = -1.0 if is_small else 1.0
    scores = [(sign * float(run.metrics[metric]), run) for run in done if is_finite(run.metrics.get(metric))]
    if not scores:
        raise ConfigError(f"no complete run of {folder} has a finite {metric}. Name a run.")
    return max(scores, key=lambda pair: pair[0])[1], metric


def digest_of(kind: str, specs: Iterable[RunSpec]) -> str:
    """Return a SHA-256 (64 hex digits) to use in place of that of content which these runs do not have yet."""
    return hashlib.sha256("\n".join([kind, *sorted(spec.digest for spec in specs)]).encode()).hexdigest()


# Decision of a waiting run, in its own folder.


def on_failure_of(spec: RunSpec) -> OnFailure:
    """Return the reaction of a run to a failure of a run that it follows; specs of older versions lack the key."""
    from hpc_trainer.config.schema.train import OnFailure

    return OnFailure((spec.config.get("after") or {}).get("on_failure", OnFailure.wait.value))


@dataclass(frozen=True, slots=True)
class Waits:
    """Followed runs that are not complete, sorted by their effect on the run that follows them."""

    failed: tuple[Stand, ...] = ()
    """Runs that failed or were cancelled, unless they do not count (`after.on_failure=start`)."""
    idle: tuple[Stand, ...] = ()
    """Runs that nothing restarts automatically, also failed ones: only the user can let the waiting run start."""
    active: tuple[Stand, ...] = ()
    """Runs that wait or work."""
    is_cancelled: bool = False
    """True if the waiting run is to be cancelled."""

    @classmethod
    def of(cls, stands: Sequence[Stand], on_failure: OnFailure) -> Waits:
        """Sort these runs by their effect on the run that follows them, under a reaction to failures."""
        from hpc_trainer.config.schema.train import OnFailure

        failed = tuple(stand for stand in stands if stand.has_failed and on_failure is not OnFailure.start)
        idle = tuple(stand for stand in stands if not stand.state.is_active and not stand.has_failed)
        active = tuple(stand for stand in stands if stand.state.is_active)
        return cls(failed, (*failed, *idle), active, is_cancelled=bool(failed) and on_failure is OnFailure.cancel)

    @property
    def may_start(self) -> bool:
        """True if the waiting run may start."""
        return not self.idle and not self.active


def held_reason(stands: Sequence[Stand]) -> str:
    """Return why a run is held, with the command that releases it."""
    first = stands[0]
    by = f"hpc-trainer retry {first.name}"
    if first.state is RunState.NEW:  # also a search with trials left to draw, which `retry` does not know
        by = f"the same `hpc-trainer submit` of {first.name.partition('/')[0]}"
    return f"follows {told(stands)}; {by} lets it start"


def cancel_follower(paths: RunPaths, failed: Sequence[Stand]) -> None:
    """Cancel a run whose `after.on_failure=cancel` says so."""
    make_folder(paths.folder)
    write_decision(paths, AFTER_CANCELLED, reason=f"after.on_failure=cancel: it follows {told(failed)}")
    write_marker(paths.marker(CANCEL))


def write_decision(paths: RunPaths, decision: str, **facts: Any) -> None:
    """Record what a run has decided; rank 0 of its job or its local queue writes, and `submit` before the first job."""
    make_folder(paths.folder)
    write_json(paths.after, {"decision": decision, "time": time.time(), **facts})


def read_decision(paths: RunPaths) -> Mapping[str, Any]:
    """Return the newest decision of a run; {} if it has made none."""
    return read_json(paths.after, Faults()) or {}


def started(config: TrainConfig, paths: RunPaths) -> TrainConfig:
    """Return the configuration with the source of weights that the run found when it started."""
    found = read_decision(paths).get("init_from") if config.init_from.awaits else None
    if not isinstance(found, Mapping):
        return config
    source = dataclasses.replace(config.init_from, path=str(found["path"]), digest=str(found["digest"]))
    return dataclasses.replace(config, init_from=source)


# Stages of a chain.


def write_chain(sweep: SweepPaths, name: str, stages: Sequence[str]) -> None:
    """Record in the folder of a stage's sweep which chain it belongs to."""
    if read_json(sweep.chain, Faults()) != (record := {"chain": name, "stages": list(stages)}):
        write_json(sweep.chain, record)


def stages_of(runs_dir: Path, name: str) -> list[SweepPaths]:
    """Return the sweeps of a chain's stages, in order; [] if there is no chain of this name."""
    for folder in _folders(runs_dir):
        if not folder.name.startswith(f"{name}-"):
            continue
        record = read_json(SweepPaths(folder).chain, Faults()) or {}
        stages = record.get("stages")
        if record.get("chain") == name and isinstance(stages, list):
            sweeps = [SweepPaths(runs_dir.absolute() / str(stage)) for stage in stages]
            return [sweep for sweep in sweeps if sweep.exists]
    return []


# Followers of a sweep.


def note_followers(sweep: SweepPaths, specs: Iterable[RunSpec]) -> None:
    """Record in each followed sweep that runs of `sweep` follow it."""
    folders = {followed.folder for spec in specs for followed in awaited_of(spec.config, sweep.folder.parent)}
    for folder in folders - {sweep.folder}:
        with contextlib.suppress(OSError):  # a full disk: the waiting runs look by themselves
            followed = SweepPaths(folder)
            make_folder(followed.followers)
            name = hashlib.sha256(str(sweep.folder).encode()).hexdigest()[:16]
            write_json(followed.followers / f"{name}.json", {"folder": str(sweep.folder)})


def followers_of(sweep: SweepPaths) -> list[SweepPaths]:
    """Return the sweeps that have runs which follow runs of `sweep`."""
    followers = []
    for name in list_folder(sweep.followers, Faults()) or ():
        folder = (read_json(sweep.followers / name, Faults()) or {}).get("folder")
        if isinstance(folder, str) and SweepPaths(Path(folder)).exists:
            followers.append(SweepPaths(Path(folder)))
    return sorted(followers, key=lambda follower: follower.name)


def waiting_for(follower: SweepStatus, sweep: SweepPaths, run_id: str | None = None) -> list[RunStatus]:
    """Return the runs of `follower` that have not begun and follow `sweep`, or this run of it."""
    runs_dir = follower.sweep.folder.parent
    waiting = (run for run in follower.open_runs.values() if run.state.is_active and not run.attempts)
    return [
        run
        for run in waiting
        if not run.spec.is_lost
        and any(
            followed.folder == sweep.folder and (run_id is None or followed.run_id in (None, run_id))
            for followed in awaited_of(run.spec.config, runs_dir)
        )
    ]


def find_cycle(specs: Sequence[RunSpec], sweep: SweepPaths) -> str | None:
    """Return the problem if runs of this grid wait for each other in a circle; None if none does."""
    first = {followed.folder for spec in specs for followed in awaited_of(spec.config, sweep.folder.parent)}
    if not first or (sweep.folder not in first and not followers_of(sweep)):
        return None  # nobody follows this sweep: no configuration of others need be read
    own = {(sweep.folder, spec.run_id) for spec in specs}
    seen: set[tuple[Path, str]] = set()
    left = [(followed, "") for spec in specs for followed in awaited_of(spec.config, sweep.folder.parent)]
    grid = {spec.run_id: spec for spec in specs}
    while left:
        followed, through = left.pop()
        with contextlib.suppress(HpcTrainerError):
            known = {**specs_of(followed.folder), **(grid if followed.folder == sweep.folder else {})}
            for run_id in known if followed.run_id is None else [followed.run_id]:
                if (followed.folder, run_id) in own:
                    return (
                        f"after: {sweep.name}/{run_id} would wait for itself{through}: it never starts. Follow "
                        "another sweep, or name runs that do not follow this one (SWEEP/RUN)."
                    )
                if (followed.folder, run_id) in seen or run_id not in known or known[run_id].is_lost:
                    continue
                seen.add((followed.folder, run_id))
                by = through or f" through {followed.folder.name}/{run_id}"
                left += [(more, by) for more in awaited_of(known[run_id].config, followed.folder.parent)]
    return None
