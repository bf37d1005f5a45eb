"""Grid -> frozen runs -> arrays, compared with what exists. Writes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.config.compose import Composer
from hpc_trainer.config.grid import expand
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.script_words import folder_problem
from hpc_trainer.config.user import read_user_config
from hpc_trainer.config.validate import validate
from hpc_trainer.errors import ConfigError
from hpc_trainer.runs.layout import SweepPaths, default_runs_dir
from hpc_trainer.runs.spec import RunSpec, Shape, freeze
from hpc_trainer.runs.states import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The frozen runs of one command line, in the order of its axes, duplicates merged."""

    sweep: SweepPaths
    executor: Executor
    specs: tuple[RunSpec, ...]
    num_duplicates: int
    max_parallel: int
    group_readable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """Runs of one shape that will be submitted together."""

    hardware: str
    shape: Shape
    specs: tuple[RunSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What `submit` will do, precisely: `arrays` are submitted, nothing else is touched."""

    grid: Grid
    states: Mapping[str, RunState]
    arrays: tuple[ArrayPlan, ...]
    no_longer_in_grid: tuple[str, ...]

    @property
    def gpu_hours_max(self) -> float:
        """GPU-hours if every run to be submitted takes one attempt of full length."""
        return sum(array.shape.gpu_hours * len(array.specs) for array in self.arrays)

    @property
    def num_to_submit(self) -> int:
        """Runs that will be submitted."""
        return sum(len(array.specs) for array in self.arrays)


def freeze_grid(overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), trust: Sequence[str] = ()) -> Grid:
    """Composes, validates and freezes every point of the grid.

    Raises:
        ConfigError: any point is wrong (each problem once), or points disagree about where the sweep lives.
    """
    problems: dict[str, None] = {}
    specs: dict[str, RunSpec] = {}
    configs: list[TrainConfig] = []
    with Composer(config_dirs) as composer:
        points = expand(composer, overrides)
        for point in points:
            config = composer.compose(point.overrides)
            _check_trust(config)
            config.trust = [*config.trust, *trust]
            try:
                validate(config)
            except ConfigError as error:
                problems.update(dict.fromkeys(str(error).splitlines()))
                continue
            spec = freeze(config, axes=point.axes, overrides=point.overrides)
            if specs.setdefault(spec.run_id, spec).digest != spec.digest:
                problems[f"two points share the run id {spec.run_id} by chance: split the grid in two."] = None
            configs.append(config)
    if problems:
        raise ConfigError("\n".join(problems))
    first = configs[0]
    _check_one_place(configs)
    runs_dir = Path(first.paths.runs_dir).expanduser() if first.paths.runs_dir else default_runs_dir()
    for problem in folder_problem(str(runs_dir.absolute())):  # it becomes a line of a batch script
        raise ConfigError(problem)
    return Grid(
        sweep=SweepPaths(runs_dir.absolute() / (first.sweep_name or first.experiment_name)),
        executor=first.cluster.executor,
        specs=tuple(specs.values()),
        num_duplicates=len(points) - len(specs),
        max_parallel=first.local.max_parallel,
        group_readable=first.paths.group_readable,
    )


def _check_trust(config: TrainConfig) -> None:
    """A configuration file must not put its own code on the list of what may be built."""
    own = read_user_config().get("trust") or []
    if config.trust and config.trust != own:
        raise ConfigError(
            f"trust={config.trust} cannot be set by a configuration. Say it yourself: "
            + " ".join(f"--trust {prefix}" for prefix in config.trust)
        )


def _check_one_place(configs: Sequence[TrainConfig]) -> None:
    places = {(config.sweep_name or config.experiment_name) for config in configs}
    if len(places) > 1:
        raise ConfigError(
            f"the points of one grid belong to one sweep, and these name {', '.join(sorted(places))}. "
            "Add sweep_name=NAME."
        )
    if len({config.cluster.executor for config in configs}) > 1 or len({config.cluster.name for config in configs}) > 1:
        raise ConfigError("cluster is one for a whole grid: submit each cluster's part by a command of its own.")


def build_plan(grid: Grid, states: Mapping[str, RunState], *, retry_failed: bool = False) -> SweepPlan:
    """Sorts the grid's runs into arrays, one for each shape, leaving out what is done, at work, or failed.

    Args:
        states: state of every run that the sweep knows; runs that are not in it are new.
        retry_failed: submit FAILED and OUT_OF_MEMORY runs too; they go on from their newest checkpoint.
    """
    wanted = {spec.run_id: states.get(spec.run_id, RunState.NEW) for spec in grid.specs}
    failed = (RunState.FAILED, RunState.OUT_OF_MEMORY)
    arrays: dict[tuple[str, Shape], list[RunSpec]] = {}
    for spec in grid.specs:
        state = wanted[spec.run_id]
        if state.needs_submit or (retry_failed and state in failed):
            arrays.setdefault((_array_environment(spec), spec.shape), []).append(spec)
    return SweepPlan(
        grid=grid,
        states=wanted,
        arrays=tuple(
            ArrayPlan(hardware=specs[0].hardware, shape=shape, specs=tuple(specs))
            for (_, shape), specs in arrays.items()
        ),
        no_longer_in_grid=tuple(run_id for run_id in states if run_id not in wanted),
    )


def _array_environment(spec: RunSpec) -> str:
    # One array is one script: runs whose setup lines or srun arguments differ cannot share it.
    cluster = spec.config["cluster"]
    return repr([cluster[key] for key in ("setup", "python", "srun_args", "array_parallelism")])


def specs_to_write(plan: SweepPlan, known: Mapping[str, RunSpec]) -> list[RunSpec]:
    """Specs that the sweep's file does not hold yet, or holds with another shape (a longer time limit, say)."""
    planned = [spec for array in plan.arrays for spec in array.specs]
    return [
        spec
        for spec in planned
        if spec.run_id not in known or dataclasses.replace(spec, axes={}, overrides=()) != _bare(known[spec.run_id])
    ]


def _bare(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, axes={}, overrides=())
