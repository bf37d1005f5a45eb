"""Actions of our launcher on a batch of points: write them for `--app`, or submit their runs and wait if needed.

An app that Python started by its script or module is started in the same way for each run, and nothing is pickled. Only
a task that no command starts, such as one in a notebook or a test, is pickled (hydra_apps/pickled.py).
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra import version
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.errors import CompactHydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from hpc_trainer.config.compose.hydra_parts import own_hydra
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.hydra_apps.pickled import pickle_of, start_of_pickled, store
from hpc_trainer.hydra_apps.points import PointComposer, plain_configs
from hpc_trainer.hydra_apps.returns import returned_value
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.grids import submit_grid
from hpc_trainer.launch.hydra_app import (
    POINTS,
    AppPoint,
    HydraApp,
    freeze_app,
    specs_of,
    split_flags,
    start_of,
    told_points,
)
from hpc_trainer.operate.waits import looks
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.states import DONE, RunState
from hpc_trainer.record.status import SweepStatus

log = logging.getLogger(__name__)

# Our override's key by the key of `hydra.launcher`.
_KEYS = {
    "hardware": "hardware", "cluster": "cluster", "sweep_name": "sweep_name", "partition": "hardware.partition",
    "account": "cluster.account", "time_limit_min": "hardware.time_limit_min",
}  # fmt: skip
# Hydra overrides that only a multirun has, and those that a run's command sets itself.
_NOT_OF_A_RUN = re.compile(r"[+~]*hydra[/.](launcher|sweeper|sweep|mode|run\.dir)\b")
_DEFAULT_DIR = "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}"


def launch(
    context: HydraContext, task: TaskFunction, config: DictConfig, keys: Mapping[str, Any],
    job_overrides: Sequence[Sequence[str]], first: int,
) -> list[JobReturn]:  # fmt: skip
    """Submit a run for each list of overrides, and return the results; only runs that are done have a value.

    Raises:
        CompactHydraException: a problem of the runs, with our message.
    """
    setup_globals()
    composer = PointComposer(context.config_loader, config)
    hydra_words = (word for word in _words(config.hydra.overrides.hydra) if not _NOT_OF_A_RUN.match(word))
    more = (*split_flags(sys.argv[1:])[0], *hydra_words)
    if POINTS in os.environ:
        points = _points(config, job_overrides, first, composer.plain(job_overrides))
        Path(os.environ[POINTS]).write_text(told_points(config.hydra.job.name, more, points))
        sys.exit(0)
    configs = composer.whole(job_overrides)
    for number, composed in enumerate(configs, start=first):
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
    points = _points(config, job_overrides, first, plain_configs(configs), map(_output, configs))
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)  # sweepers write their results there
    try:
        wait = _waits(config, keys.get("wait"))
        batch = _Batch(points, configs, more, task, context)
        with own_hydra():
            grid, run_ids = _submit(batch, config.hydra.job.name, keys)
        status = _last_look(grid, run_ids) if wait else None
    except HpcTrainerError as error:
        raise CompactHydraException(f"hpc_trainer: {error}") from error
    return [
        _return_of(grid.sweep.run(run_id), status, composed, point)
        for run_id, composed, point in zip(run_ids, configs, points, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Batch:
    points: tuple[AppPoint, ...]
    configs: list[DictConfig]
    more: tuple[str, ...]
    task: TaskFunction
    context: HydraContext


def _submit(batch: _Batch, name: str, keys: Mapping[str, Any]) -> tuple[Grid, list[str]]:
    """Submit the new and interrupted runs of a batch, and return the grid and each point's run id."""
    ours, start, more = list(_our_words(keys)), _start(batch.task, sys.modules["__main__"]), batch.more
    pickle: str | None = None
    content = b""
    if start is None:
        configs = {point.number: composed for point, composed in zip(batch.points, batch.configs, strict=True)}
        start, more = start_of_pickled(batch.task), ()
        pickle, content = pickle_of(batch.task, batch.context, configs)
        ours += _packages_of(batch.task, ours)
    app = HydraApp(name=name, start=start, more=more, points=batch.points, pickle=pickle)
    grid = freeze_app(app, ours)
    if len(grid.specs) > len(batch.points):
        raise ConfigError(
            "hydra.launcher names one hardware for all runs. A grid over hardware is hpc-trainer submit hardware=A,B "
            "--app APP."
        )
    if pickle is not None:
        store(grid.sweep, pickle, content)
    fresh = bool(keys.get("fresh"))
    done = submit_grid(grid, fresh=fresh, retry_failed=fresh, command_line=["python", *sys.argv])
    num_runs = len(grid.specs)
    log.info(f"{num_runs} runs in {grid.sweep.folder}: {done.num_submitted} submitted, {done.num_already} before")
    for note in (*done.plan.notes, *done.outcome.notes, f"See: hpc-trainer status {grid.sweep.name}"):
        log.info(note)
    # Specs with the app's own values, made from the first run's spec: points that lead to the same run have one id.
    names = {spec.digest: spec.run_id for spec in grid.specs}
    return grid, [names[spec.digest] for spec in specs_of(app, grid.specs[0])]


def _words(listed: ListConfig) -> list[str]:
    """Return overrides as the user typed them, with their interpolations."""
    overrides: Any = OmegaConf.to_container(listed, resolve=False)
    return [str(word) for word in overrides]


def _points(
    base: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, plain: Sequence[Mapping[str, Any]],
    outputs: Iterable[str | None] = itertools.repeat(None),
) -> tuple[AppPoint, ...]:  # fmt: skip
    """Return the points of a batch.

    Args:
        base: the configuration of the sweep as a whole.
        job_overrides: the overrides of each point.
        first: the number of the first point.
        plain: the configuration of each point.
        outputs: the output folder of each point; None for the folder of its run.
    """
    given = set(_words(base.hydra.overrides.task))
    numbers = itertools.count(first)
    return tuple(
        AppPoint(words=tuple(overrides), axes=_axes(overrides, given), config=config, number=number, output=output)
        for overrides, config, number, output in zip(job_overrides, plain, numbers, outputs, strict=False)
    )


def _axes(overrides: Sequence[str], given: Set[str]) -> dict[str, str]:
    """Return the values that the sweeper chose, by key. An override that deletes a key is left out."""
    mine = [word for word in filter_overrides(overrides) if word not in given and not word.startswith("~")]
    chosen = [word.lstrip("+").partition("=") for word in mine]
    return {key.partition("@")[0].replace("/", "."): value for key, _, value in chosen}


def _output(composed: DictConfig) -> str | None:
    """Return the output folder that the app or its overrides name; None for the folder of our run."""
    raw: Any = OmegaConf.to_container(composed.hydra.sweep, resolve=False)
    if raw["dir"] == _DEFAULT_DIR or POINTS in os.environ:
        return None
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(composed)
    try:
        return str(Path(composed.hydra.sweep.dir, composed.hydra.sweep.subdir).absolute())
    finally:
        HydraConfig.instance().cfg = before


def _our_words(keys: Mapping[str, Any]) -> Iterator[str]:
    for key, ours in _KEYS.items():
        if keys.get(key) is not None:
            yield f"{ours}={keys[key]}"
    yield from keys.get("overrides") or ()


def _waits(config: DictConfig, wait: bool | None) -> bool:
    """Return True if the launcher waits for the runs. Raises ConfigError if the sweeper needs their return values."""
    target = str(config.hydra.sweeper.get("_target_"))
    is_plain = target.endswith(".BasicSweeper")
    if wait is False and not is_plain:
        raise ConfigError(
            f"hydra.launcher.wait=false, but {target.rpartition('.')[2]} chooses the next points by the returned "
            "values. Leave out hydra.launcher.wait, or use hydra/sweeper=basic."
        )
    return not is_plain if wait is None else wait


def _packages_of(task: TaskFunction, given: Sequence[str]) -> list[str]:
    """Return the override that freezes the code of a task that is pickled by its module's name."""
    module = str(getattr(task, "__module__", "__main__")).partition(".")[0]
    is_said = any(word.startswith("snapshot") for word in given)
    return [] if module == "__main__" or is_said else [f"snapshot.packages=[{module}]"]


def _start(task: TaskFunction, main: ModuleType) -> tuple[str, ...] | None:
    """Return the command that starts the app of this task; None if no command has started it."""
    file = getattr(main, "__file__", None)
    if getattr(task, "__module__", None) != "__main__" or file is None:
        return None
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return start_of(spec.name.removesuffix(".__main__"))
    path, here = Path(file).absolute(), Path.cwd()
    return start_of(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _last_look(grid: Grid, run_ids: Sequence[str]) -> SweepStatus:
    try:
        *_, last = looks(grid.sweep, set(run_ids))
    except KeyboardInterrupt:
        message = f"hpc_trainer: no longer waiting; the runs continue. See: hpc-trainer status {grid.sweep.name}"
        raise CompactHydraException(message) from None
    return last


def _return_of(paths: RunPaths, status: SweepStatus | None, composed: DictConfig, point: AppPoint) -> JobReturn:
    """Return the value that Hydra's own launcher would return; `status` is None if the launcher does not wait."""
    result = JobReturn(overrides=_words(composed.hydra.overrides.task), task_name=composed.hydra.job.name)
    output = point.output or str(paths.output)
    result.hydra_cfg = OmegaConf.masked_copy(composed, "hydra")
    result.cfg = copy.deepcopy(composed)
    runtime = result.hydra_cfg.hydra.runtime
    with read_write(result.cfg), open_dict(result.cfg), read_write(runtime), open_dict(runtime):
        del result.cfg["hydra"]
        runtime.output_dir = output
    changes_folder = composed.hydra.job.chdir
    if changes_folder is None:
        changes_folder = not version.base_at_least("1.2")
    result.working_dir = output if changes_folder else str(Path.cwd())
    run = status.run(paths.run_id) if status is not None else None
    if run is not None and run.state is not RunState.COMPLETED:
        said = str(run.error.get("output", "")).splitlines()[-1:]
        message = ": ".join((f"{run.run_id} is {run.state.value}", run.reason or "see its logs", *said))
        result.return_value = CompactHydraException(f"hpc_trainer: {message}. Read: hpc-trainer why {run.run_id}")
        result.status = JobStatus.FAILED
    else:
        is_done = run is not None or is_there(paths.marker(DONE))
        result.return_value = returned_value(paths) if is_done else None
        result.status = JobStatus.COMPLETED
    return result
