"""Conversion of a command line into the frozen runs of its grid. Writes nothing."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.condition import PointValues
from hpc_trainer.config.compose.fast_compose import Composed, GridComposer
from hpc_trainer.config.compose.grid import FIRST, Point, expand_grid, list_of
from hpc_trainer.config.compose.own_files import Project, config_dirs_of, read_project, read_user_config
from hpc_trainer.config.identity import SeedDigests, build_run_id, config_digest, had_another_name, run_id_of, run_label
from hpc_trainer.config.load import Memo, to_plain
from hpc_trainer.config.program import is_one_a_node, unread_overrides
from hpc_trainer.config.rules.cluster_rules import site_notes
from hpc_trainer.config.rules.validate import MAX_SEED, validate
from hpc_trainer.config.schema.cluster import BudgetConfig, Executor
from hpc_trainer.config.schema.key import PASSED_OVER, Identity
from hpc_trainer.config.schema.train import Sampler, TrainConfig
from hpc_trainer.config.script_words import folder_problem
from hpc_trainer.config.store import KEYS
from hpc_trainer.config.targets import unread_params
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.follow import by_awaited_names, with_after
from hpc_trainer.record.layout import SweepPaths, default_runs_dir, sweep_folder
from hpc_trainer.record.spec import RunSpec, join_shapes, leaves, read_specs
from hpc_trainer.slurm.shape import resources

_DUPLICATES_KEPT = 5
_DIFFERENCES_SHOWN = 4
_DIGITS = 10  # digits of the digest, at the end of a run's id
_Split = tuple[int, tuple[str, ...]]
"""Seed of a point, and its other overrides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Frozen runs of one command line, in the order of its axes, with duplicates merged."""

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
    """First few merged pairs: the axes of the point that stays, and of the point that leads to the same run."""
    compose_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of points by the way they were composed: fast, hydra (Hydra's own compose, 0.1 s each)."""
    notes: tuple[str, ...] = ()
    """Notes for the user on the sources of configuration and code."""
    unsettled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Configuration of each run of a search, by run id, before rules filled in values that follow from others."""
    changes: tuple[str, ...] = ()
    """Overrides of a retry that these runs did not have at their earlier submit."""


def freeze_grid(
    overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), is_search: bool = False
) -> Grid:
    """Compose, validate and freeze every point of the grid.

    Folders and prefixes of the project file come after `config_dirs` and `trust`, and the site's folders last
    (`config/compose/own_files.py`).

    Args:
        overrides: overrides of the command line.
        config_dirs: folders of the user's configurations.
        trust: prefixes of the user's code.
        is_search: the points are samples of a search's space; without it a search is refused.

    Raises:
        ConfigError: a point is wrong (each problem once), or the points name different sweeps, executors or clusters.
    """
    project = read_project()
    try:
        trusted = [*trust, *project.trust]
        grid = _freeze_grid(overrides, config_dirs_of(config_dirs, project), trusted, is_search=is_search)
        notes = project.notes if _has_news(project, grid.sweep) else ()
        return dataclasses.replace(grid, notes=(*notes, *grid.notes))
    except ConfigError as error:
        if project.unused is None:
            raise
        raise ConfigError(f"{error}\n{project.unused}") from error  # that file may name what is missing


def _has_news(project: Project, sweep: SweepPaths) -> bool:
    """Return True if the notes of a project file must be shown: they are new, or the file trusts more than before."""
    if project.unused is not None or not project.notes or not sweep.exists:
        return True
    newest = next(reversed(read_specs(sweep).values()), None)
    return newest is None or not set(project.trust) <= {*newest.config.get("trust", ())}


def _chosen_profiles(specs: Iterable[RunSpec]) -> Iterator[str]:
    """Yield the hardware profiles that the user named, each once."""
    texts = dict.fromkeys(
        spec.axes.get("hardware") or next((word for word in spec.overrides if word.startswith("hardware=")), "")
        for spec in specs
    )
    named = [text.removeprefix("hardware=") for text in texts]
    yield from dict.fromkeys(name for text in named for name in list_of("hardware", text) or [text] if name)


def _freeze_grid(
    overrides: Sequence[str], config_dirs: Sequence[Path], trust: Sequence[str], *, is_search: bool
) -> Grid:
    specs: dict[str, RunSpec] = {}
    duplicates: list[tuple[Mapping[str, str], Mapping[str, str]]] = []
    num_duplicates = 0
    with GridComposer(config_dirs) as composer:
        expansion = expand_grid(composer, overrides)
        composer.counts.clear()  # count only the points, not the compositions that read the grid
        points = _Points(composer, trust, is_search=is_search)
        for spec in points.freeze(expansion.points):
            kept = specs.setdefault(spec.run_id, spec)
            if kept.digest != spec.digest:
                points.tell(f"two points share the run id {spec.run_id} by chance: split the grid in two.")
            if kept is not spec:
                num_duplicates += 1
                points.tell(_lost_shape(kept, spec))
                if len(duplicates) < _DUPLICATES_KEPT:
                    duplicates.append((kept.axes, spec.axes))
        counts = dict(composer.counts + points.twins.counts)
        twins = [*composer.unread_twins("hardware", _chosen_profiles(specs.values()))]
    num_excluded = expansion.num_excluded + points.num_excluded
    if points.problems:
        raise ConfigError("\n".join(points.problems))
    if not specs:
        raise ConfigError(f"sweep.exclude leaves out all {num_excluded} points of the grid.")
    _check_one_place(list(points.places))
    first = next(iter(points.places.values()))
    sweep = _sweep_paths(first)
    specs = by_known_names(sweep, specs)
    if any(spec.config["init_from"]["path"] for spec in specs.values()):
        specs = by_awaited_names(sweep, specs, read_specs(sweep))
    return Grid(
        sweep=sweep,
        executor=first.cluster.executor,
        specs=tuple(specs.values()),
        num_duplicates=num_duplicates,
        max_parallel=first.local.max_parallel,
        group_readable=first.paths.group_readable,
        budget=first.budget,
        num_excluded=num_excluded,
        notes=(*points.notes, *twins),
        duplicates=tuple(duplicates),
        compose_counts=counts,
        unsettled=points.unsettled,
    )


class _Points:
    """Points of a grid while they are frozen, with the problems and notes found so far."""

    def __init__(self, composer: GridComposer, trust: Sequence[str], *, is_search: bool) -> None:
        self._composer, self._trust, self._is_search = composer, trust, is_search
        self._own_trust = read_user_config().get("trust") or []
        self._memo = Memo()
        self.twins = _Twins(self._memo)
        self.problems: dict[str, None] = {}
        """Problems of the points, each once."""
        self.places: dict[tuple[str, str, str], TrainConfig] = {}
        """First configuration of each place (`_place`)."""
        self.notes: dict[str, None] = {}
        """Notes on the points' sites, each once."""
        self.num_excluded = 0
        """Number of points that a condition left out."""
        self.unsettled: dict[str, Mapping[str, Any]] = {}
        """Value of `Grid.unsettled`, filled as points are made."""

    def tell(self, problem: str | None) -> None:
        """Add a problem to the list; do nothing for None."""
        if problem is not None:
            self.problems[problem] = None

    def freeze(self, points: Iterable[Point]) -> Iterator[RunSpec]:
        """Yield the run of each point, without points that are left out or have problems."""
        for point in points:
            num_problems = len(self.problems)
            on_each = [spec for spec in map(self._frozen, point.on_each()) if spec is not None]
            if not on_each:
                self.num_excluded += len(self.problems) == num_problems
            elif len(on_each) == 1:
                yield on_each[0]
            else:
                spec, problem = _on_first(on_each)
                self.tell(problem)
                yield spec

    def _frozen(self, point: Point) -> RunSpec | None:
        """Return the run of a point; None if a condition leaves the point out, or it has problems."""
        split = _without_seed(point)
        spec = self.twins.freeze(point, split)
        if spec is not None:
            return spec
        composed = self._composer.compose_point(point.overrides, point.num_fixed)
        config = composed.config
        if point.exclude and _is_excluded(self._composer, point, composed):
            return None
        _check_trust(config, self._own_trust)
        config.trust = self._memo.of(self._with_trust, config.trust)
        plain = to_plain(config) if self._is_search else {}
        try:
            validate(config, self._memo)
            config.after = self._memo.of(with_after, config.after, config.train.command, config.paths.runs_dir)
        except ConfigError as error:
            self.problems.update(dict.fromkeys(str(error).splitlines()))
            return None
        self.problems.update(dict.fromkeys(_unread(self._composer, config, point)))
        if config.search.sampler is not Sampler.none and not self._is_search:
            self.tell(_search_not_read(config.search.sampler))
        self.notes.update(dict.fromkeys(self._memo.of(site_notes, config.hardware, config.cluster)))
        spec = freeze(config, axes=point.axes, overrides=point.overrides, memo=self._memo)
        if composed.is_seed_alone and not point.exclude:
            self.twins.keep(split, config, spec)
        self.places.setdefault(_place(config), config)
        if self._is_search:
            self.unsettled[spec.run_id] = plain
        return spec

    def _with_trust(self, of_file: list[str]) -> list[str]:
        return [*dict.fromkeys((*of_file, *self._trust))]


def _search_not_read(sampler: Sampler) -> str:
    if not contributions("grid_kinds"):
        return f"search={sampler.value} is read by no part of this installation. Leave it out."
    return f"search={sampler.value} is for `plan` and `submit`, among their overrides. Elsewhere name one run."


def _unread(composer: GridComposer, config: TrainConfig, point: Point) -> Iterator[str]:
    """Yield a line for each override of a point that changes nothing."""
    if config.train.command is not None:
        yield from unread_overrides(config, point.overrides, point.axes)
    else:
        is_taken_from = functools.partial(composer.is_interpolated, "params", point.overrides)
        yield from unread_params(config, point.overrides, point.axes, is_taken_from)


def _on_first(specs: Sequence[RunSpec]) -> tuple[RunSpec, str | None]:
    """Return the one run of a list of hardware (`hardware=first:a,b`), and the problem with the list or None.

    The run may start on any item, so the items must make the same run. Types of GPUs may differ if the run may resume
    with other ranks; the run id then counts all the types of the list.
    """
    types = sorted({spec.shape.gpu_type or "" for spec in specs})
    if len(types) > 1 and "" not in types and specs[0].config["parallel"].get("elastic"):
        specs = [_with_gpu_types(spec, types) for spec in specs]
    first = specs[0]
    if Executor(first.config["cluster"]["executor"]) is not Executor.slurm:
        return first, (
            f"{FIRST}: a list of hardware is for jobs in Slurm's queue, and cluster={first.config['cluster']['name']} "
            "starts runs on this machine. Name one, or choose a cluster."
        )
    other = next((spec for spec in specs if spec.digest != first.digest), None)
    if other is None:
        return join_shapes(specs), None
    before, now = (dict(leaves(spec.config, without=PASSED_OVER)) for spec in (first, other))
    keys = [key for key in now if before.get(key) != now[key] and _counts(key)]
    listed = ", ".join(f"{key} {before.get(key)} and {now[key]}" for key in keys[:_DIFFERENCES_SHOWN])
    way = "parallel.elastic=true lets a run have other ranks and GPUs (docs/queue.md)"
    if first.config["train"].get("logical_ranks"):
        way = "train.logical_ranks keeps the bits, and another type of GPU rounds differently"
    elif first.config["parallel"].get("elastic"):
        way = "parallel.elastic=true allows other ranks and types of GPUs, but each profile must name its gpu_type"
    return first, (
        f"{FIRST}{first.hardware},{other.hardware}: the first job that starts executes the run, so all must make the "
        f"same run, but these differ in {listed or 'what the run id counts'}. {way}. For one run of each, leave out "
        f"{FIRST}"
    )


def _with_gpu_types(spec: RunSpec, types: Sequence[str]) -> RunSpec:
    config = {**spec.config, "hardware": {**spec.config["hardware"], "gpu_types": list(types)}}
    digest = config_digest(config)
    return dataclasses.replace(spec, config=config, digest=digest, run_id=f"{spec.run_id[:-_DIGITS]}{digest[:_DIGITS]}")


def _counts(key: str) -> bool:
    return key not in KEYS or KEYS[key].identity is not Identity.apart


def _lost_shape(kept: RunSpec, merged: RunSpec) -> str | None:
    """Return the problem with two points that are one run but ask for other resources; None if there is none.

    The plan reports merged points. Here, however, one of the two requests would be dropped: an axis of a key that
    does not make another run, such as `hardware.partition=a,b`.
    """
    axes = [axis for axis in merged.axes if axis.partition(".")[0] == "hardware"]
    axes = [axis for axis in axes if kept.axes.get(axis) != merged.axes[axis]]
    if not axes or kept.on_each() == merged.on_each() or kept.shape == merged.shape:
        return None
    axis = axes[0]
    values = [kept.axes.get(axis, "..").removeprefix(FIRST), merged.axes[axis].removeprefix(FIRST)]
    return (
        f"{axis}={','.join(values)}: both values make the same run, {kept.run_id}, and only one of them could be "
        f"submitted. For one run on whichever starts first: {axis}={FIRST}{','.join(values)}. For a run on each: "
        f"submit {axis}={values[1]} with another sweep_name."
    )


def by_known_names(sweep: SweepPaths, specs: dict[str, RunSpec], *, hangs_on_grid: bool = False) -> dict[str, RunSpec]:
    """Return the runs under the ids that they have in the sweep.

    Args:
        sweep: the sweep.
        specs: runs by the id that this version gives them. Other versions named some runs differently.
        hangs_on_grid: a run's name depends on the other runs of the grid, as the name of an app's point does.
    """
    if not (hangs_on_grid or any(had_another_name(spec.config) for spec in specs.values())):
        return specs
    run_ids = {spec.digest: run_id for run_id, spec in read_specs(sweep).items()}
    named = (dataclasses.replace(spec, run_id=run_ids.get(spec.digest, spec.run_id)) for spec in specs.values())
    return {spec.run_id: spec for spec in named}


def freeze(
    config: TrainConfig, *, axes: Mapping[str, str], overrides: tuple[str, ...], memo: Memo | None = None
) -> RunSpec:
    """Freeze a validated configuration as a run. With a `memo`, runs share the values of equal sections."""
    memo = memo or Memo()
    plain = to_plain(config, memo)
    plain["cluster"] = memo.of(_without_site, plain["cluster"])
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


def _without_site(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section without the site's facts, which no rank reads: they would be a third of each spec's line."""
    return {key: value for key, value in cluster.items() if key != "site"}


class SeedTwins:
    """Frozen runs that equal a first run except for their seed: 10 µs a run, instead of 60 µs with `freeze`."""

    def __init__(self, config: TrainConfig, first: RunSpec, memo: Memo) -> None:
        self._first = first
        self._label = run_label(config)
        self._digests = SeedDigests(first.config, memo)

    def freeze(self, seed: int, *, axes: Mapping[str, str], overrides: tuple[str, ...]) -> RunSpec:
        """Return the run that `freeze` would return for the configuration with this seed."""
        first, digest = self._first, self._digests.of(seed)
        return RunSpec(
            run_id=run_id_of(self._label, seed, digest), digest=digest, axes=axes, overrides=overrides,
            shape=first.shape, hardware=first.hardware, num_steps=first.num_steps,
            config={**first.config, "seed": seed},
        )  # fmt: skip


class _Twins:
    """Points that differ from an earlier point only in their seed, so that they need not be composed.

    This is certain if nothing in the earlier point depends on the seed.
    """

    def __init__(self, memo: Memo) -> None:
        self.counts: Counter[str] = Counter()
        """Number of points frozen here, in the form of `GridComposer.counts`."""
        self._memo = memo
        self._known: dict[tuple[str, ...], SeedTwins] = {}

    def freeze(self, point: Point, split: _Split | None) -> RunSpec | None:
        """Return the run of a point; None if the point has to be composed."""
        twins = None if split is None else self._known.get(split[1])
        if twins is None or split is None:
            return None
        self.counts["fast"] += 1
        return twins.freeze(split[0], axes=point.axes, overrides=point.overrides)

    def keep(self, split: _Split | None, config: TrainConfig, spec: RunSpec) -> None:
        """Remember a point that was composed, checked and frozen, and that no condition reads."""
        if split is not None:
            self._known[split[1]] = SeedTwins(config, spec, self._memo)


_SEED = re.compile(r"seed=(0|[1-9][0-9]{0,9})")


def _without_seed(point: Point) -> _Split | None:
    """Split a point into its seed and its other overrides; None unless it names exactly one valid seed."""
    named = [index for index, line in enumerate(point.overrides) if line.startswith("seed=")]
    match = _SEED.fullmatch(point.overrides[named[0]]) if len(named) == 1 else None
    if match is None or int(match[1]) > MAX_SEED:
        return None
    return int(match[1]), (*point.overrides[: named[0]], *point.overrides[named[0] + 1 :])


def grid_of_specs(sweep: SweepPaths, specs: Sequence[RunSpec]) -> Grid:
    """Return a grid of runs that were frozen before, to submit them again; at least one run."""
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
    for problem in folder_problem(str(runs_dir.absolute())):  # the folder becomes a line of a batch script
        raise ConfigError(problem)
    return SweepPaths(sweep_folder(runs_dir.absolute(), config.sweep_name or config.experiment_name))


def _is_excluded(composer: GridComposer, point: Point, composed: Composed) -> bool:
    @functools.cache
    def choices() -> Mapping[str, str | None]:
        return composer.choices_made(point.overrides) if composed.choices is None else composed.choices

    values = PointValues(composed.config, choices)
    return any(condition.holds(values) for condition in point.exclude)


def _check_trust(config: TrainConfig, own: Sequence[str]) -> None:
    """Refuse a configuration file that puts its own code on the list of code that may be built.

    Raises:
        ConfigError: the configuration sets `trust` to another value than the user's own configuration.
    """
    if config.trust and config.trust != own:
        raise ConfigError(
            f"trust={config.trust} cannot be set by a configuration. Set it on the command line: "
            + " ".join(f"--trust {prefix}" for prefix in config.trust)
            + f", or `trust: [{', '.join(map(str, config.trust))}]` in the project file (docs/configure.md)."
        )


def _place(config: TrainConfig) -> tuple[str, str, str]:
    """Return the sweep's name, the executor and the cluster's name."""
    return (config.sweep_name or config.experiment_name, config.cluster.executor.value, config.cluster.name)


def _check_one_place(places: Sequence[tuple[str, str, str]]) -> None:
    names = sorted({name for name, *_ in places})
    if len(names) > 1:
        raise ConfigError(
            f"the points of one grid belong to one sweep, and these name {', '.join(names)}. Add sweep_name={names[0]}."
        )
    if len(places) > 1:
        clusters = " and ".join(dict.fromkeys(name for *_, name in places))
        raise ConfigError(
            f"cluster is one for a whole grid, and the points of this one are on {clusters}: submit each cluster's "
            "part by a command of its own."
        )
