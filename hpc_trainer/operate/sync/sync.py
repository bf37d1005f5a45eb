"""Transfer of a sweep's runs to their trackers, one after the other. An error here never affects a training."""

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
# Consecutive failures after which a sync stops: the tracker accepts no run, and each try may wait for a minute.
_MOST_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """State of one run in its tracker after the sync."""

    run_id: str
    tracker: str
    state: RunState
    step: int | None
    """Last step in the tracker."""
    num_new: int
    """Steps that this sync added."""
    where: str


@dataclass(slots=True)
class SyncResult:
    """Result of a sync."""

    synced: list[Synced] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Run id -> error of its tracker or of the tracker's package."""
    num_not_begun: int = 0
    has_given_up: bool = False


def tracker_named(name: str, option: str) -> TrackerName:
    """Return the tracker of this name; `option` is the option's text for the message.

    Raises:
        ConfigError: no tracker of this name can be synced.
    """
    if name not in (tracker.value for tracker in SYNCED):
        raise ConfigError(f"{option}{name}: it is {' or '.join(tracker.value for tracker in SYNCED)}.")
    return TrackerName(name)


def sync_named(
    runs_dir: Path, names: Sequence[str], sweep: str | None, to: TrackerName | None
) -> tuple[SweepStatus, SyncResult]:
    """Sync the runs that the user's names mean (`operate/find.py`); the rest is as in `sync_runs`."""
    status, run_ids = select(runs_dir, names, sweep, is_look=True)
    return status, sync_runs(status, run_ids, to)


def sync_runs(status: SweepStatus, run_ids: Sequence[str], to: TrackerName | None) -> SyncResult:
    """Send each run's tracker the steps that it lacks.

    Args:
        status: the sweep.
        run_ids: the runs.
        to: the tracker, also for runs without one; None: the tracker of each run.

    Raises:
        ConfigError: no run has a tracker that can be synced, its package is not installed, or it has no key.
        RunStateError: another sync is working on this sweep, or a tracker cannot be reached at all.
        UntrustedFileError: others may write the sweep's folder, or the folder of one of the runs.
    """
    chosen = {run_id: own for run_id in run_ids if (own := _tracker(status, run_id, to)).name.is_synced}
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
    own = status.specs[run_id].config.get("tracker") or {}
    config = TrackerConfig(**{**own, "name": TrackerName(own.get("name", "none"))})
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
    before = memory.get(config.name.value) or {}
    before = before if before.get("place") == place and before.get("began") == run.attempts[0].start_time else {}
    unchanged = Synced(
        run_id=run.run_id, tracker=config.name.value, state=run.state, step=before.get("step"), num_new=0,
        where=str(before.get("where", "")),
    )  # fmt: skip
    if before.get("state") == run.state.value == RunState.COMPLETED.value:
        return unchanged
    logged = read_logged(sweep, run)
    if before and (logged.state.value, logged.last_step, len(run.attempts)) == (
        before.get("state"), before.get("step"), before.get("attempts"),
    ):  # fmt: skip
        return unchanged
    sent = before.get("step")
    done = destination.send(logged, sent)
    last = max((step for step in (sent, logged.last_step) if step is not None), default=None)
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
    """Hold the sweep for this sync: two syncs at a time would both add the missing steps.

    Raises:
        RunStateError: another sync holds the sweep.
        UntrustedFileError: the lock file is a link, or another user's.
    """
    if os.path.lexists(sweep.sync_lock):
        check_trusted(sweep.sync_lock)
    try:
        with file_lock(sweep.sync_lock, "sync"):
            yield
    except SubmitError as error:
        raise RunStateError(str(error)) from error
