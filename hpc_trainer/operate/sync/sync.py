"""Runs of a sweep to their trackers, one after the other. Whatever happens here, no training notices."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.tracker import SYNCED, TrackerConfig, TrackerName
from hpc_trainer.config.trackers import missing_package
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError, SubmitError
from hpc_trainer.operate.find import prepare_to_write, select
from hpc_trainer.operate.sync.logged import Destination, read_logged
from hpc_trainer.operate.sync.to_mlflow import ToMlflow
from hpc_trainer.operate.sync.to_wandb import ToWandb
from hpc_trainer.runs.files import check_trusted, write_json
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.lock import file_lock
from hpc_trainer.runs.reading import read_json
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.status import RunStatus, SweepStatus

DESTINATIONS: dict[TrackerName, Callable[[TrackerConfig, Path], Destination]] = {
    TrackerName.wandb: lambda config, runs_dir: ToWandb(config),
    TrackerName.mlflow: ToMlflow,
}
# So many runs in a row that a tracker does not take: it takes none, and each may wait for a minute.
_MOST_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """One run, as it is in its tracker now."""

    run_id: str
    tracker: str
    state: RunState
    step: int | None
    """The last one that is there."""
    num_new: int
    """Steps that this sync added."""
    where: str


@dataclass(slots=True)
class SyncResult:
    """What a sync did."""

    synced: list[Synced] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Run id -> what its tracker, or its package, said."""
    num_not_begun: int = 0
    has_given_up: bool = False


def tracker_named(name: str, option: str) -> TrackerName:
    """The tracker of this name. Raises ConfigError: none is synced so; `option` is how it was asked for."""
    if name not in (each.value for each in SYNCED):
        raise ConfigError(f"{option}{name}: it is {' or '.join(each.value for each in SYNCED)}.")
    return TrackerName(name)


def sync_named(
    runs_dir: Path, names: Sequence[str], sweep: str | None, to: TrackerName | None
) -> tuple[SweepStatus, SyncResult]:
    """As `sync_runs`, of what a person names (`operate/find.py`)."""
    status, run_ids = select(runs_dir, names, sweep, is_look=True)
    return status, sync_runs(status, run_ids, to)


def sync_runs(status: SweepStatus, run_ids: Sequence[str], to: TrackerName | None) -> SyncResult:
    """Tells each run's tracker what it does not have of it yet.

    Args:
        to: the tracker, also for runs that have none.

    Raises:
        ConfigError: no run has a tracker for this, its package is not installed, or it has no key.
        RunStateError: another sync works on this sweep, or its tracker cannot be reached at all.
        UntrustedFileError: others may write the sweep's folder, or that of one of the runs.
    """
    chosen = {run_id: found for run_id in run_ids if (found := _tracker(status, run_id, to)).name.is_synced}
    if not chosen:
        raise ConfigError(
            f"no run here has {' or '.join(f'tracker={each.value}' for each in SYNCED)}. Name one for all: "
            f"hpc-trainer sync {status.sweep.name} --to {SYNCED[0].value}"
        )
    prepare_to_write(status.sweep, chosen)
    result = SyncResult()
    with _only_one(status.sweep), contextlib.ExitStack() as stack:
        open_ones: dict[str, Destination] = {}
        failures = 0
        for run_id, config in chosen.items():
            run = status.run(run_id)
            if not run.attempts:
                result.num_not_begun += 1
                continue
            if str(config) not in open_ones:
                open_ones[str(config)] = _open(config, status.sweep.folder.parent)
                stack.callback(open_ones[str(config)].close)
            try:
                result.synced.append(_sync(status.sweep, run, config, open_ones[str(config)]))
                failures = 0
            except Exception as error:
                if isinstance(error, HpcTrainerError):
                    raise
                result.failed[run_id] = f"{type(error).__name__}: {error}"
                failures += 1
                if failures == _MOST_FAILURES:
                    result.has_given_up = True
                    break
    return result


def _tracker(status: SweepStatus, run_id: str, to: TrackerName | None) -> TrackerConfig:
    known = status.specs[run_id].config.get("tracker") or {}
    config = TrackerConfig(**{**known, "name": TrackerName(known.get("name", "none"))})
    return config if to is None or to is config.name else TrackerConfig(name=to, project=config.project)


def _open(config: TrackerConfig, runs_dir: Path) -> Destination:
    missing = missing_package(config.name)
    if missing is not None:
        raise ConfigError(f"{missing}, into the environment of hpc-trainer: {sys.prefix}")
    try:
        return DESTINATIONS[config.name](config, runs_dir)
    except HpcTrainerError:
        raise
    except Exception as error:
        raise RunStateError(f"tracker={config.name.value} cannot be reached: {error}") from error


def _sync(sweep: SweepPaths, run: RunStatus, config: TrackerConfig, destination: Destination) -> Synced:
    paths = sweep.run(run.run_id)
    memory: dict[str, Any] = read_json(paths.tracker) or {}
    place = f"{destination.where} {config.project or ''}"
    known = memory.get(config.name.value) or {}
    known = known if known.get("place") == place and known.get("began") == run.attempts[0].start_time else {}
    told = Synced(
        run_id=run.run_id, tracker=config.name.value, state=run.state, step=known.get("step"), num_new=0,
        where=str(known.get("where", "")),
    )  # fmt: skip
    if known.get("state") == run.state.value == RunState.COMPLETED.value:
        return told
    logged = read_logged(sweep, run)
    if known and (logged.state.value, logged.last_step, len(run.attempts)) == (
        known.get("state"), known.get("step"), known.get("attempts"),
    ):  # fmt: skip
        return told
    sent = known.get("step")
    done = destination.send(logged, sent)
    last = max((each for each in (sent, logged.last_step) if each is not None), default=None)
    memory[config.name.value] = {
        "place": place, "began": logged.start_time, "step": last, "state": run.state.value,
        "attempts": len(run.attempts), "where": done.where,
    }  # fmt: skip
    write_json(paths.tracker, memory)
    destination.settle(logged, last)
    return Synced(
        run_id=run.run_id, tracker=config.name.value, state=run.state, step=last, num_new=done.num_steps,
        where=done.where,
    )  # fmt: skip


@contextlib.contextmanager
def _only_one(sweep: SweepPaths) -> Iterator[None]:
    """Hold the sweep for this sync: two at a time would both add what is missing.

    Raises:
        RunStateError: another sync holds it.
        UntrustedFileError: the lock file is a link, or another user's.
    """
    if os.path.lexists(sweep.sync_lock):
        check_trusted(sweep.sync_lock)
    try:
        with file_lock(sweep.sync_lock, "sync"):
            yield
    except SubmitError as error:
        raise RunStateError(str(error)) from error
