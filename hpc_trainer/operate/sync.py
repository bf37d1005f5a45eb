"""`hpc-trainer sync`: the records that runs have logged are sent to W&B and MLflow (docs/trackers.md).

metrics.jsonl has each step once, over all attempts and rollbacks. MLflow may be a folder (its file store), a database
or a server; W&B gets the steps at once or, with WANDB_MODE=offline, by folders for `wandb sync`. Trainings are not
affected.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpc_trainer.config.load import hyperparameters
from hpc_trainer.config.packages import missing_package
from hpc_trainer.config.schema.output import SYNCED, TrackerConfig, TrackerName
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError, SubmitError
from hpc_trainer.operate.find import prepare_to_write, select
from hpc_trainer.record.files import make_folder, rename, write_json
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.processes import file_lock
from hpc_trainer.record.reading import is_there, read_json
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import leaves
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.record.trust import check_trusted


@dataclass(frozen=True, slots=True)
class Step:
    """Values of one step."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Logged data of a run, as a tracker gets them."""

    paths: RunPaths
    key: str
    """Key of the run in the tracker, the same for all attempts; another one after `--fresh`."""
    sweep: str
    state: RunState
    start_time: float
    end_time: float | None
    config: Mapping[str, Any]
    tags: Mapping[str, str]
    steps: Sequence[Step]

    @property
    def last_step(self) -> int | None:
        """Last logged step; None if the run has logged nothing."""
        return self.steps[-1].step if self.steps else None


@dataclass(frozen=True, slots=True)
class Done:
    """Result of sending one run."""

    num_steps: int
    """Number of new steps in the tracker."""
    where: str


class Destination(Protocol):
    """Interface of a tracker for `sync`."""

    where: str
    """Place that distinguishes trackers of one kind: runs that are complete there are not sent again."""

    def send(self, logged: Logged, sent: int | None) -> Done:
        """Send the steps that the tracker lacks.

        Args:
            logged: the run.
            sent: the last step that was sent to the same place before; None: none was, or it is not known.
        """

    def settle(self, logged: Logged, sent: int | None) -> None:
        """Finish a transfer after the sync has recorded the steps up to `sent` as sent."""

    def close(self) -> None:
        """End everything that the tracker's client has started."""


def read_logged(sweep: SweepPaths, run: RunStatus) -> Logged:
    """Return what a tracker gets of a run, which must have begun."""
    paths, attempts = sweep.run(run.run_id), run.attempts
    start_time = attempts[0].start_time
    code = (read_json(sweep.sweep) or {}).get("code")
    revision = code.get("git_revision") if isinstance(code, Mapping) else None
    tags = {"sweep": sweep.name, "run_id": run.run_id, "hardware": run.spec.hardware, "attempts": str(len(attempts))}
    return Logged(
        paths=paths,
        key=hashlib.sha256(f"{sweep.name}/{run.run_id}/{start_time!r}".encode()).hexdigest()[:24],
        sweep=sweep.name,
        state=run.state,
        start_time=start_time,
        end_time=attempts[-1].end_time,
        config=hyperparameters(run.spec.config),
        tags={**tags, **({"git_revision": str(revision)} if revision else {})},
        steps=_steps(paths, is_whole=not run.state.is_active),
    )


def _steps(paths: RunPaths, *, is_whole: bool) -> list[Step]:
    """Merge the records of each step: an evaluation has a record of its own.

    Args:
        paths: the run.
        is_whole: True if no record follows. Otherwise the last step is left out: it may get another record.
    """
    steps: list[Step] = []
    for record in read_metrics(paths.metrics):
        values = {
            key: float(value) for key, value in record.items() if key not in ("step", "time") and value is not None
        }
        if steps and steps[-1].step == record["step"]:
            values = {**steps.pop().values, **values}
        steps.append(Step(record["step"], float(record.get("time") or 0.0), values))
    return steps if is_whole else steps[:-1]


_KEY = "hpc_trainer.key"
# Largest number of items that one call accepts, and of letters of a metric's name (mlflow/utils/validation.py).
_MOST_METRICS, _MOST_PARAMS, _LONGEST_NAME = 1000, 100, 250
_ILLEGAL = re.compile(r"[^\w\-./: ]")
_STATUS = {
    RunState.PENDING: "SCHEDULED", RunState.REQUEUED: "SCHEDULED", RunState.HELD: "SCHEDULED",
    RunState.RUNNING: "RUNNING", RunState.UNKNOWN: "RUNNING", RunState.COMPLETED: "FINISHED",
    RunState.CANCELLED: "KILLED", RunState.PREEMPTED: "KILLED",
}  # fmt: skip
_Item = TypeVar("_Item")


class ToMlflow:
    """Store that `tracker.uri` names. The store reports its own steps, so a killed sync continues where it stopped."""

    def __init__(self, config: TrackerConfig, runs_dir: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Without this variable, MLflow 3.13 and later refuses a folder; it prefers a database, which NFS does not suit.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities = importlib.import_module("mlflow.entities")
        uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        is_folder = ":" not in uri and uri != "databricks"
        self.where = (runs_dir.absolute() / Path(uri).expanduser()).as_uri() if is_folder else uri
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=self.where)
        self._project = config.project

    def send(self, logged: Logged, sent: int | None) -> Done:
        """Send the steps that each metric lacks; metrics may differ, as MLflow does not write a batch atomically."""
        run = self._run(logged)
        run_id = run.info.run_id
        new = [(key, value) for key, value in leaves(logged.config) if key not in run.data.params]
        for part in _parts(new, _MOST_PARAMS):
            self._client.log_batch(run_id, params=[self._entities.Param(key, str(value)) for key, value in part])
        last = {name: self._last_step(run_id, name) for name in run.data.metrics}
        names = legal_names(name for step in logged.steps for name in step.values)
        metrics = [
            self._entities.Metric(name, value, round(step.time * 1000), step.step)
            for step in logged.steps
            for name, value in ((names[key], value) for key, value in step.values.items())
            if step.step > last.get(name, -1)
        ]
        for part in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(run_id, metrics=part)
        for key in ("attempts", "state"):
            self._client.set_tag(run_id, f"hpc_trainer.{key}", {**logged.tags, "state": logged.state.value}[key])
        self._tell_state(run_id, logged)
        return Done(len({metric.step for metric in metrics}), self.where)

    def settle(self, logged: Logged, sent: int | None) -> None:
        """Do nothing: `send` has written everything."""

    def close(self) -> None:
        """Do nothing: `send` has written everything."""

    def _run(self, logged: Logged) -> Any:
        name = self._project or logged.sweep
        existing = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{_KEY}` = '{logged.key}'")
        if runs:
            return runs[0]
        return self._client.create_run(
            experiment,
            start_time=round(logged.start_time * 1000),
            run_name=logged.paths.run_id,
            tags={_KEY: logged.key, **{f"hpc_trainer.{key}": value for key, value in logged.tags.items()}},
        )

    def _last_step(self, run_id: str, name: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(run_id, name)), default=-1)

    def _tell_state(self, run_id: str, logged: Logged) -> None:
        status = _STATUS.get(logged.state, "FAILED")
        if logged.state.is_active:
            self._client.update_run(run_id, status=status)
        else:
            end_time = None if logged.end_time is None else round(logged.end_time * 1000)
            self._client.set_terminated(run_id, status=status, end_time=end_time)


def legal_names(names: Iterable[str]) -> dict[str, str]:
    """Return MLflow's name of each metric, all different: `_` stands for what MLflow refuses.

    A folder of MLflow's has a file for each metric, so a name must be no way out of the folder, and none may be a
    folder of another one's file, as `loss` beside `loss/train`.
    """
    legal = {name: _ILLEGAL.sub("_", name) for name in names}
    taken = {*legal.values()}
    for name, written in legal.items():
        folders = {written[:place] for place, letter in enumerate(written) if letter == "/"}
        leads_out = os.path.normpath(written) != written or written == "." or written.startswith(("/", ".."))
        if leads_out or folders & taken:
            legal[name] = re.sub(r"/|^\.+", "_", written)
    count = Counter(legal.values())
    for name, written in legal.items():
        if len(written) > _LONGEST_NAME or (written != name and count[written] > 1):
            legal[name] = f"{written[: _LONGEST_NAME - 9]}-{zlib.crc32(name.encode()):08x}"
    return legal


def _parts(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


_ENDED_BADLY = (RunState.FAILED, RunState.OUT_OF_MEMORY, RunState.TIMEOUT, RunState.NODE_FAIL, RunState.CANCELLED)
_WHOLE = "whole.json"
# No facts about this machine or process: the training ran in another one.
_SETTINGS = {
    "console": "off", "silent": True, "disable_git": True, "disable_code": True, "program": "hpc-trainer",
    "x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True, "x_save_requirements": False,
}  # fmt: skip


class ToWandb:
    """Destination that keeps one W&B run for each run.

    W&B appends all data, also data that it has already. So an online sync sends only the steps after the last one that
    the server reports, and a folder for `wandb sync` holds no step of an earlier folder.
    """

    def __init__(self, config: TrackerConfig) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb: Any = importlib.import_module("wandb")
        settings = self._wandb.setup().settings
        self.is_offline = settings.mode in ("offline", "dryrun")
        if not self.is_offline and not self._wandb.login(prompt=False, verify=False):
            self.close()
            raise ConfigError(
                f"W&B has no API key for {settings.base_url} here. Run: wandb login. Without the internet: "
                "WANDB_MODE=offline hpc-trainer sync"
            )
        self._config = config
        self.where = f"{'offline' if self.is_offline else settings.base_url}:{config.entity or ''}"

    def send(self, logged: Logged, sent: int | None) -> Done:
        """Send the steps after the last one that W&B has."""
        work = logged.paths.wandb_work
        self.settle(logged, sent)
        shutil.rmtree(work, ignore_errors=True)  # the rest of a killed sync
        make_folder(work)
        run = self._wandb.init(
            entity=self._config.entity, project=self._config.project or logged.sweep, group=logged.sweep,
            id=logged.key, name=logged.paths.run_id, config={**logged.config, "hpc_trainer": dict(logged.tags)},
            resume="allow", reinit="create_new", dir=str(work), settings=self._wandb.Settings(**_SETTINGS),
        )  # fmt: skip
        first = (-1 if sent is None else sent) + 1 if self.is_offline else run.starting_step
        new = [step for step in logged.steps if step.step >= first]
        for step in new:
            run.log({**step.values, "_timestamp": step.time}, step=step.step)
        run.summary["state"] = logged.state.value
        folder, url = Path(run.settings.sync_dir), run.url
        run.finish(exit_code=int(logged.state in _ENDED_BADLY))
        if self.is_offline:
            write_json(work / _WHOLE, {"step": logged.last_step})
            return Done(len(new), str(logged.paths.wandb / folder.name))
        shutil.rmtree(work, ignore_errors=True)
        # The server now has the steps of the offline folders; `wandb sync` would add them once more.
        shutil.rmtree(logged.paths.wandb, ignore_errors=True)
        return Done(len(new), url)

    def settle(self, logged: Logged, sent: int | None) -> None:
        """Move a complete folder to its place once its steps are recorded as sent; a kill in between loses no step."""
        work, place = logged.paths.wandb_work, logged.paths.wandb
        whole = read_json(work / _WHOLE)
        if whole is None or sent is None or (whole["step"] or 0) > sent:
            return
        make_folder(place)
        for folder in (work / "wandb").glob("offline-run-*"):
            name = folder.name
            while is_there(place / name):  # two syncs in one second
                name += "-next"
            rename(folder, place / name)
        shutil.rmtree(work, ignore_errors=True)

    def close(self) -> None:
        """End W&B's own process."""
        self._wandb.teardown()


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
    """Sync the runs that the user's names mean (`operate/find.py`), with the errors of `sync_runs`."""
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
            f"no run here has {' or '.join(f'tracker={tracker.value}' for tracker in SYNCED)}. Name one for all: "
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
