"""A command line -> the frozen runs of its grid. Writes nothing."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_trainer.config.compose.fast_compose import Composed, GridComposer
from hpc_trainer.config.compose.grid import Point, expand_grid
from hpc_trainer.config.compose.point_values import PointValues
from hpc_trainer.config.compose.project import Project, read_project
from hpc_trainer.config.compose.user import read_user_config
from hpc_trainer.config.identity import SeedDigests, build_run_id, config_digest, had_another_name, run_id_of, run_label
from hpc_trainer.config.memo import Memo
from hpc_trainer.config.program import is_one_a_node
from hpc_trainer.config.rules.code_names import unread_params
from hpc_trainer.config.rules.command_rules import unread_overrides
from hpc_trainer.config.rules.validate import MAX_SEED, validate
from hpc_trainer.config.schema.budget import BudgetConfig
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.script_words import folder_problem
from hpc_trainer.errors import ConfigError
from hpc_trainer.runs.layout import SweepPaths, default_runs_dir
from hpc_trainer.runs.shape import resources
from hpc_trainer.runs.spec import RunSpec, read_specs

_DUPLICATES_KEPT = 5
_Split = tuple[int, tuple[str, ...]]
"""The seed of a point, and its other overrides."""


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
    num_excluded: int = 0
    """Points that a condition of `sweep.exclude` left out."""
    duplicates: tuple[tuple[Mapping[str, str], Mapping[str, str]], ...] = ()
    """The first few merged pairs: the axes of the point that stays, and of the one that comes to the same run."""
    compose_counts: Mapping[str, int] = field(default_factory=dict)
    """Points by the way they were composed: fast, hydra (0.1 s each: Hydra's own compose)."""
    notes: tuple[str, ...] = ()
    """What a person should know of where configuration and code may come from."""
    changes: tuple[str, ...] = ()
    """Overrides that these runs had not when they were submitted before; a retry's."""


def freeze_grid(overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), trust: Sequence[str] = ()) -> Grid:
    """Composes, validates and freezes every point of the grid.

    What the project file names comes after `config_dirs` and `trust` (`config/compose/project.py`).

    Raises:
        ConfigError: any point is wrong (each problem once), or points disagree about where the sweep lives.
    """
    project = read_project()
    try:
        grid = _freeze_grid(overrides, [*config_dirs, *project.config_dirs], [*trust, *project.trust])
        return dataclasses.replace(grid, notes=project.notes if _has_news(project, grid.sweep) else ())
    except ConfigError as error:
        if project.unused is None:
            raise
        raise ConfigError(f"{error}\n{project.unused}") from error  # what is missing may be what that file names


def _has_news(project: Project, sweep: SweepPaths) -> bool:
    """Return True if the notes of a project file must be shown: they are new, or the file trusts more than before."""
    if project.unused is not None or not project.notes or not sweep.exists:
        return True
    newest = next(reversed(read_specs(sweep).values()), None)
    return newest is None or not set(project.trust) <= {*newest.config.get("trust", ())}


def _freeze_grid(overrides: Sequence[str], config_dirs: Sequence[Path], trust: Sequence[str]) -> Grid:
    problems: dict[str, None] = {}
    specs: dict[str, RunSpec] = {}
    places: dict[tuple[str, str, str], TrainConfig] = {}
    duplicates: list[tuple[Mapping[str, str], Mapping[str, str]]] = []
    num_duplicates = 0
    memo = Memo()

    def with_trust(of_file: list[str]) -> list[str]:
        return [*dict.fromkeys((*of_file, *trust))]

    own_trust = read_user_config().get("trust") or []
    with GridComposer(config_dirs) as composer:
        expansion = expand_grid(composer, overrides)
        num_excluded = expansion.num_excluded
        composer.counts.clear()  # of the points alone, not of what was composed to read the grid
        twins = _Twins(memo)
        for point in expansion.points:
            split = _without_seed(point)
            spec = twins.freeze(point, split)
            if spec is None:
                composed = composer.compose_point(point.overrides, point.num_fixed)
                config = composed.config
                if point.exclude and _is_excluded(composer, point, composed):
                    num_excluded += 1
                    continue
                _check_trust(config, own_trust)
                config.trust = memo.of(with_trust, config.trust)
                try:
                    validate(config, memo)
                except ConfigError as error:
                    problems.update(dict.fromkeys(str(error).splitlines()))
                    continue
                problems.update(dict.fromkeys(_unread(composer, config, point)))
                spec = freeze(config, axes=point.axes, overrides=point.overrides, memo=memo)
                if composed.is_seed_alone and not point.exclude:
                    twins.keep(split, config, spec)
                places.setdefault(_place(config), config)
            kept = specs.setdefault(spec.run_id, spec)
            if kept.digest != spec.digest:
                problems[f"two points share the run id {spec.run_id} by chance: split the grid in two."] = None
            if kept is not spec:
                num_duplicates += 1
                if len(duplicates) < _DUPLICATES_KEPT:
                    duplicates.append((kept.axes, spec.axes))
        counts = dict(composer.counts + twins.counts)
    if problems:
        raise ConfigError("\n".join(problems))
    if not specs:
        raise ConfigError(f"sweep.exclude leaves out all {num_excluded} points of the grid.")
    _check_one_place(list(places))
    first = next(iter(places.values()))
    sweep = _sweep_paths(first)
    specs = by_known_names(sweep, specs)
    return Grid(
        sweep=sweep,
        executor=first.cluster.executor,
        specs=tuple(specs.values()),
        num_duplicates=num_duplicates,
        max_parallel=first.local.max_parallel,
        group_readable=first.paths.group_readable,
        budget=first.budget,
        num_excluded=num_excluded,
        duplicates=tuple(duplicates),
        compose_counts=counts,
    )


def _unread(composer: GridComposer, config: TrainConfig, point: Point) -> Iterator[str]:
    """Overrides of a point that change nothing, a line each."""
    if config.train.command is not None:
        yield from unread_overrides(config, point.overrides, point.axes)
    else:
        is_taken_from = functools.partial(composer.is_interpolated, "params", point.overrides)
        yield from unread_params(config, point.overrides, point.axes, is_taken_from)


def by_known_names(sweep: SweepPaths, specs: dict[str, RunSpec], *, hangs_on_grid: bool = False) -> dict[str, RunSpec]:
    """Return the runs under the ids by which the sweep has them.

    Args:
        sweep: the sweep.
        specs: run id -> run, as this version names them. Other versions named some otherwise.
        hangs_on_grid: a run's name hangs on what other runs are in the grid, as that of an app's point.
    """
    if not (hangs_on_grid or any(had_another_name(each.config) for each in specs.values())):
        return specs
    known = {each.digest: run_id for run_id, each in read_specs(sweep).items()}
    named = (dataclasses.replace(each, run_id=known.get(each.digest, each.run_id)) for each in specs.values())
    return {each.run_id: each for each in named}


def freeze(
    config: TrainConfig, *, axes: Mapping[str, str], overrides: tuple[str, ...], memo: Memo | None = None
) -> RunSpec:
    """A validated configuration as a frozen run. With a `memo`, runs share what their sections share."""
    from hpc_trainer.config.load import to_plain

    memo = memo or Memo()
    plain = to_plain(config, memo)
    digest = config_digest(plain, memo)
    return RunSpec(
        run_id=build_run_id(config, digest),
        digest=digest,
        axes=axes,
        overrides=overrides,
        shape=memo.of(resources, config.hardware, config.cluster, is_one_a_node(config)),
        hardware=config.hardware.name,
        num_steps=config.train.num_steps,
        config=plain,
    )


class SeedTwins:
    """Freezes runs that are alike in all but their seed, after the first of them: 10 µs each, and 60 with `freeze`."""

    def __init__(self, config: TrainConfig, first: RunSpec, memo: Memo) -> None:
        self._first = first
        self._label = run_label(config)
        self._digests = SeedDigests(first.config, memo)

    def freeze(self, seed: int, *, axes: Mapping[str, str], overrides: tuple[str, ...]) -> RunSpec:
        """What `freeze` makes of the configuration with this seed."""
        first, digest = self._first, self._digests.of(seed)
        return RunSpec(
            run_id=run_id_of(self._label, seed, digest), digest=digest, axes=axes, overrides=overrides,
            shape=first.shape, hardware=first.hardware, num_steps=first.num_steps,
            config={**first.config, "seed": seed},
        )  # fmt: skip


class _Twins:
    """Points that differ from an earlier one in their seed alone, and need not be composed for it.

    That is certain where nothing in the earlier one hangs on the seed.
    """

    def __init__(self, memo: Memo) -> None:
        self.counts: Counter[str] = Counter()
        """Of those that were frozen here, as `GridComposer.counts`."""
        self._memo = memo
        self._known: dict[tuple[str, ...], SeedTwins] = {}

    def freeze(self, point: Point, split: _Split | None) -> RunSpec | None:
        """The run of a point; None of one that is to be composed."""
        twins = None if split is None else self._known.get(split[1])
        if twins is None or split is None:
            return None
        self.counts["fast"] += 1
        return twins.freeze(split[0], axes=point.axes, overrides=point.overrides)

    def keep(self, split: _Split | None, config: TrainConfig, spec: RunSpec) -> None:
        """Remembers a point that was composed, checked and frozen, and that no condition looks at."""
        if split is not None:
            self._known[split[1]] = SeedTwins(config, spec, self._memo)


_SEED = re.compile(r"seed=(0|[1-9][0-9]{0,9})")


def _without_seed(point: Point) -> _Split | None:
    """The seed of a point that names one once, as a number that may be, and its other overrides; else None."""
    named = [index for index, line in enumerate(point.overrides) if line.startswith("seed=")]
    found = _SEED.fullmatch(point.overrides[named[0]]) if len(named) == 1 else None
    if found is None or int(found[1]) > MAX_SEED:
        return None
    return int(found[1]), (*point.overrides[: named[0]], *point.overrides[named[0] + 1 :])


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


def _sweep_paths(config: TrainConfig) -> SweepPaths:
    runs_dir = Path(config.paths.runs_dir).expanduser() if config.paths.runs_dir else default_runs_dir()
    for problem in folder_problem(str(runs_dir.absolute())):  # it becomes a line of a batch script
        raise ConfigError(problem)
    return SweepPaths(runs_dir.absolute() / (config.sweep_name or config.experiment_name))


def _is_excluded(composer: GridComposer, point: Point, composed: Composed) -> bool:
    @functools.cache
    def choices() -> Mapping[str, str | None]:
        return composer.choices_made(point.overrides) if composed.choices is None else composed.choices

    values = PointValues(composed.config, choices)
    return any(condition.holds(values) for condition in point.exclude)


def _check_trust(config: TrainConfig, own: Sequence[str]) -> None:
    """A configuration file must not put its own code on the list of what may be built."""
    if config.trust and config.trust != own:
        raise ConfigError(
            f"trust={config.trust} cannot be set by a configuration. Say it yourself: "
            + " ".join(f"--trust {prefix}" for prefix in config.trust)
            + f", or `trust: [{', '.join(map(str, config.trust))}]` in the project file (docs/configure.md)."
        )


def _place(config: TrainConfig) -> tuple[str, str, str]:
    """Name of the sweep, executor, cluster."""
    return (config.sweep_name or config.experiment_name, config.cluster.executor.value, config.cluster.name)


def _check_one_place(places: Sequence[tuple[str, str, str]]) -> None:
    names = sorted({name for name, *_ in places})
    if len(names) > 1:
        raise ConfigError(
            f"the points of one grid belong to one sweep, and these name {', '.join(names)}. Add sweep_name={names[0]}."
        )
    if len(places) > 1:
        raise ConfigError("cluster is one for a whole grid: submit each cluster's part by a command of its own.")
