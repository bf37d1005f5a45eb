"""A command line -> the frozen runs of its grid. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_trainer.config.compose import Composer
from hpc_trainer.config.grid import expand
from hpc_trainer.config.schema.budget import BudgetConfig
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.script_words import folder_problem
from hpc_trainer.config.user import read_user_config
from hpc_trainer.config.validate import validate
from hpc_trainer.errors import ConfigError
from hpc_trainer.runs.layout import SweepPaths, default_runs_dir
from hpc_trainer.runs.spec import RunSpec, freeze


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The frozen runs of one command line, in the order of its axes, duplicates merged."""

    sweep: SweepPaths
    executor: Executor
    specs: tuple[RunSpec, ...]
    num_duplicates: int
    max_parallel: int
    group_readable: bool
    budget: BudgetConfig = field(default_factory=BudgetConfig)


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
        budget=first.budget,
    )


def grid_of_specs(sweep: SweepPaths, specs: Sequence[RunSpec]) -> Grid:
    """Runs that were frozen before, to be submitted again; at least one."""
    config = specs[0].config
    return Grid(
        sweep=sweep,
        executor=Executor(config["cluster"]["executor"]),
        specs=tuple(specs),
        num_duplicates=0,
        max_parallel=int(config["local"]["max_parallel"]),
        group_readable=bool(config["paths"]["group_readable"]),
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
