"""A search from its command line: the space, the runs that trials are made from, and all problems.

Trials are frozen at submit: a slot composes no files, it sets the drawn values in a frozen run. The ends and the middle
of all axes are composed here by Hydra, to check the configurations, and to see that a drawn value changes one key only.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.overrides import override_value
from hpc_trainer.config.compose.own_files import config_dirs_of
from hpc_trainer.config.compose.search_axes import WHEN, SearchAxis, conditions_of, split_axes
from hpc_trainer.config.resume_contract import flatten
from hpc_trainer.config.rules.data_rules import of_steps
from hpc_trainer.config.schema.key import PASSED_OVER
from hpc_trainer.config.schema.task import CustomTaskConfig
from hpc_trainer.config.schema.train import Sampler, SearchConfig, SearchMode, TrainConfig
from hpc_trainer.errors import ConfigError, valid
from hpc_trainer.launch.freeze import Grid, freeze_grid
from hpc_trainer.launch.hydra_app import HydraApp, freeze_search_of_app, read_app, split_app
from hpc_trainer.record.chain import awaited_of
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import RunSpec, leaves
from hpc_trainer.search.folder import Base, Search, Trials, base_of, read_search, value_for_sampler
from hpc_trainer.search.next_run import check_packages, finite
from hpc_trainer.search.samplers import WITH_RUNGS, Told
from hpc_trainer.search.space import (
    MOST_DIMENSIONS,
    Dimension,
    Params,
    Value,
    active,
    difference,
    every_point,
    num_points,
    read_space,
)

_MOST_BASES = 64
_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer", "fid", "time_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defined:
    """A search and its place, as a command line describes them; nothing is written."""

    search: Search
    grid: Grid
    """The samples of the space that were composed; its settings hold for all trials."""

    @property
    def sweep(self) -> SweepPaths:
        """Paths of the search's sweep."""
        return self.grid.sweep


def define(
    words: Sequence[str], *, app: str | None = None, config_dirs: Sequence[Path] = (), trust: Sequence[str] = ()
) -> Defined:
    """Return the search of a command line.

    Args:
        words: our overrides, axes among them.
        app: a Hydra app and its words with its axes, as after `--app`; None without an app.
        config_dirs: folders of your own conf/ files.
        trust: packages that `_target_` and `train.main` may name.

    Raises:
        ConfigError: an axis, a key of `search` or a sample of the space is wrong.
    """
    fixed, axes = split_axes(words, config_dirs_of(config_dirs))
    if app is not None:
        return _of_app(app, fixed, axes, config_dirs=config_dirs, trust=trust)
    if not axes:
        raise ConfigError(
            "a search needs an axis to draw values for, as 'optim.lr=tag(log,interval(1e-4,1e-1))', a list as "
            "model=mlp,cnn, or 'model.width=range(32,257,32)'."
        )
    conditions = conditions_of(fixed)
    space = read_space(axes, conditions)
    groups = {axis.key for axis in axes if axis.is_group}
    _refuse_keys(axes)
    grid = freeze_grid([*fixed, *_samples(space, groups)], config_dirs=config_dirs, trust=trust, is_search=True)
    bases = tuple(_bases(grid, fixed, space, groups))
    return _finished(grid, bases, space, fixed, conditions)


def _finished(
    grid: Grid, bases: tuple[Base, ...], space: tuple[Dimension, ...], fixed: Sequence[str],
    conditions: Sequence[str], app: tuple[str, ...] = (),
) -> Defined:  # fmt: skip
    """Return the search of a space and its bases, once all its keys are right."""
    settings = _settled(bases[0].spec.typed(), bases)
    if settings.when != list(conditions):
        raise ConfigError(f"{WHEN} of a file is not read. Write it on the command line, where the axes are.")
    words_kept = tuple(word for word in fixed if not word.startswith("search."))
    search = Search(settings=settings, space=space, bases=bases, words=words_kept, app=app)
    _check(search, grid)
    check_packages(search)
    if settings.from_sweep is not None:
        before = read_search(grid.sweep)
        is_known = before is not None and before.settings.from_sweep == settings.from_sweep
        earlier = before.earlier if before is not None and is_known else _earlier(search, grid.sweep)
        search = dataclasses.replace(search, earlier=earlier)
    return Defined(search=search, grid=grid)


def _earlier(search: Search, sweep: SweepPaths) -> tuple[Told, ...]:
    """Return the trials of the search `search.from_sweep` that fit into this search's space.

    A key that is not an axis of the earlier search has the value of that search's configuration.

    Raises:
        ConfigError: there is no such search, it had another metric, or none of its trials fits.
    """
    name = search.settings.from_sweep
    rule = f"search.from={name}"
    paths = SweepPaths(sweep.folder.parent / str(name))
    old = read_search(paths)
    if old is None or paths.folder == sweep.folder:
        raise ConfigError(f"{rule} is not the sweep of another search in {sweep.folder.parent}.")
    if (old.settings.metric, old.is_max) != (search.settings.metric, search.is_max):
        was = f"{'largest' if old.is_max else 'smallest'} {old.settings.metric}"
        raise ConfigError(f"{rule}: that search looked for the {was}. Use the same search.metric and search.mode.")
    reader = Trials(paths, old)
    trials = reader.read()
    values = value_for_sampler(trials, old.settings, is_max=old.is_max)
    made: list[Told] = []
    for trial, value in zip(trials, values, strict=True):
        fixed = dict(leaves(reader.spec(trial.number).config))
        had = {dimension.key: trial.params.get(dimension.key, fixed.get(dimension.name)) for dimension in search.space}
        params, rungs = active(search.space, had), finite(trial.at_rungs)
        is_inside = all(dimension.holds(params[dimension.key]) for dimension in search.space if dimension.key in params)
        if is_inside and (value is not None or rungs):
            made.append(Told(params=params, value=value, at_rungs=rungs))
    if not made:
        raise ConfigError(
            f"{rule}: none of its {len(trials)} trials has a result and fits into this space. Leave it out, or widen "
            "the axes."
        )
    return tuple(made)


def _refuse_keys(axes: Iterable[SearchAxis]) -> None:
    for axis in axes:
        section = axis.key.partition(".")[0]
        if section in {*PASSED_OVER, "hardware", "search", "sweep", "experiment", "debug"}:
            raise ConfigError(
                f"{axis.line}: all trials of a search share {section}, because other values would not change the "
                "training. Give one value."
            )


def _samples(space: Sequence[Dimension], groups: set[str]) -> Iterator[str]:
    """Yield overrides of a grid: all choices of groups, each with the first, middle and last values of all axes.

    With conditions each choice is first composed without the axes that have one: trials in which they have no value
    are made from that.
    """
    if any(dimension.when is not None for dimension in space):
        yield f"sweep.blocks=[{','.join(_blocks(space, groups))}]"
        return
    zipped: list[str] = []
    for dimension in space:
        if dimension.key in groups:
            yield f"{dimension.key}={','.join(map(str, dimension.choices))}"
        else:
            zipped.append(f"{dimension.key}:[{','.join(map(override_value, dimension.ends))}]")
    if zipped:
        yield f"sweep.zip=[{{{','.join(zipped)}}}]"


def _blocks(space: Sequence[Dimension], groups: set[str]) -> Iterator[str]:
    """Yield items of `sweep.blocks` for a space with conditions."""
    for choices in every_point([dimension for dimension in space if dimension.key in groups]):
        of_groups = ",".join(f"{key}:[{choice}]" for key, choice in choices.items())
        always = {dimension.key: dimension.ends[0] for dimension in space if dimension.when is None}
        without = {dimension.key: None for dimension in space if _is_null_without(dimension)}
        samples = [{**without, **always, **choices}, *(_sample_at(place, space, choices) for place in range(3))]
        for sample in samples:
            values = ",".join(f"{key}:[{override_value(value)}]" for key, value in sample.items() if key not in groups)
            zipped = f",zip:[{{{values}}}]" if values else ""
            yield f"{{axes:{{{of_groups}}}{zipped}}}"


def _sample_at(place: int, space: Sequence[Dimension], choices: Params) -> dict[str, Value]:
    """Return the first, middle or last values of the axes, without those whose conditions do not hold."""
    sample = active(space, {dimension.key: choices.get(dimension.key, dimension.ends[place]) for dimension in space})
    return {
        **{dimension.key: None for dimension in space if _is_null_without(dimension) and dimension.key not in sample},
        **sample,
    }


def _is_null_without(dimension: Dimension) -> bool:
    """Return True if a key is null in trials in which its axis has no value: `params` has no defaults."""
    return dimension.when is not None and dimension.name.startswith("params.")


def _bases(grid: Grid, fixed: Sequence[str], space: Sequence[Dimension], groups: set[str]) -> Iterator[Base]:
    by_choice: dict[tuple[tuple[str, str], ...], list[RunSpec]] = {}
    for spec in grid.specs:
        key = tuple((axis, spec.axes[axis]) for axis in spec.axes if axis in groups)
        by_choice.setdefault(key, []).append(spec)
    if len(by_choice) > _MOST_BASES:
        raise ConfigError(
            f"the choices of groups have {len(by_choice)} combinations, and a search takes at most {_MOST_BASES}."
        )
    for choices, samples in by_choice.items():
        words = tuple(line for line in fixed if not line.startswith("search."))
        base = base_of(dict(choices), grid.unsettled[samples[0].run_id], words)
        _check_samples(base, samples, space)
        yield base


def _check_samples(base: Base, samples: Sequence[RunSpec], space: Sequence[Dimension]) -> None:
    """Raise ConfigError if a sample differs from the base with the sample's values: another key follows an axis."""
    made = Search(settings=SearchConfig(), space=tuple(space), bases=(base,), words=())
    digests = {spec.digest: spec for spec in samples}
    for place in range(3):
        params = active(
            space, {dimension.key: base.choices.get(dimension.key, dimension.ends[place]) for dimension in space}
        )
        ours = made.spec_of(params, [])
        if ours.digest in digests:
            continue
        place_of = samples[min(place, len(samples) - 1)]  # samples are in the order of `Dimension.ends`
        before, composed = (dict(leaves(spec.config, without=PASSED_OVER)) for spec in (ours, place_of))
        keys = [key for key, value in composed.items() if before.get(key, ...) != value]
        raise ConfigError(
            f"{', '.join(keys[:4]) or 'another key'} follows the value of an axis by an interpolation, and a search "
            "sets one key for each axis. Set it to a value of its own, or make it the axis."
        )


# --- Hydra apps ---


def _of_app(
    text: str, fixed: Sequence[str], axes: Sequence[SearchAxis], *, config_dirs: Sequence[Path], trust: Sequence[str]
) -> Defined:
    """Return the search over an app's own keys.

    The app's Hydra composes each choice of its lists, which become bases. A range is a key of `params`, which the
    command passes on to the app by a placeholder.
    """
    if axes:
        raise ConfigError(f"{axes[0].line} is before --app, but a search of an app draws the app's own keys.")
    name, flags, words = split_app(text)
    app_fixed, of_app = split_axes(words, is_of_app=True)
    if not of_app:
        raise ConfigError(
            f"a search needs an axis to draw values for, after --app: --app {name} 'lr=tag(log,interval(1e-4,1e-1))', "
            "or a list as model=a,b."
        )
    conditions = conditions_of(fixed)
    if conditions:
        raise ConfigError(f"{WHEN} is not available with --app: give each axis of the app a value in all trials.")
    ranges = [axis for axis in of_app if not axis.choices]
    lists = [axis for axis in of_app if axis.choices]
    if math.prod(len(axis.choices) for axis in lists) > _MOST_BASES:
        raise ConfigError(f"the lists after --app have more than {_MOST_BASES} combinations. Use fewer, or a range.")
    space = read_space([dataclasses.replace(axis, key=_param(axis.key)) for axis in of_app])
    ends = {each.key: each.ends for each in space}

    def composed(place: int, chosen: Iterable[str]) -> HydraApp:
        values = [f"{axis.key}={override_value(ends[_param(axis.key)][place])}" for axis in ranges]
        return read_app(shlex.join([name, *flags, *app_fixed, *chosen, *values]))

    app = composed(0, [axis.line for axis in lists])
    if ranges:
        last = composed(2, [f"{axis.key}={override_value(axis.choices[0])}" for axis in lists])
        _check_ranges(app.points[0].config, last.points[0].config, ranges)
    passed_on = [f"{axis.key}={{{_param(axis.key)}}}" for axis in ranges]
    grid, configs = freeze_search_of_app(app, fixed, {axis.key for axis in ranges}, passed_on, config_dirs, trust)
    kept = tuple(word for word in fixed if not word.startswith("search."))
    # The app's sweeper composes the lists as a product, the last one fastest.
    combinations = list(itertools.product(*(axis.choices for axis in lists)))
    if len(configs) != len(combinations):
        raise ConfigError(f"hydra.sweeper.params of {name} makes a grid of its own, and a search draws. Leave it out.")
    keys = [_param(axis.key) for axis in lists]
    bases = [
        base_of(dict(zip(keys, chosen, strict=True)), config, kept)
        for chosen, config in zip(combinations, configs, strict=True)
    ]
    return _finished(grid, tuple(bases), space, fixed, conditions, (name, *flags, *app_fixed))


def _param(key: str) -> str:
    """Return the key of a trial's configuration for a key, or a group, of the app."""
    return f"params.{key.lstrip('+').partition('@')[0].replace('/', '.')}"


def _check_ranges(first: Mapping[str, Any], last: Mapping[str, Any], ranges: Sequence[SearchAxis]) -> None:
    """Raise ConfigError if a range changes more in the app's configuration than its own key."""
    before, after = flatten(first), flatten(last)
    own = {axis.key.lstrip("+"): axis for axis in ranges}
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    for key, axis in own.items():
        if key not in after:
            raise ConfigError(f"{axis.line}: {key} is no single key of the app's configuration. Name one of its keys.")
    other = next((key for key in changed if key not in own), None)
    if other is not None:
        raise ConfigError(
            f"{other} of the app depends on {', '.join(own)}, but a range may change only one key. Use a list."
        )


def _settled(config: TrainConfig, bases: Sequence[Base]) -> SearchConfig:
    """Return the keys of the search with mode and rungs filled in."""
    settings = copy.copy(config.search)
    if settings.mode is None:
        is_min = any(name in settings.metric.lower() for name in _SMALLER_IS_BETTER)
        settings.mode = SearchMode.min if is_min else SearchMode.max
    if (settings.sampler in WITH_RUNGS or settings.median) and not settings.rungs:
        settings.rungs = _default_rungs(config, min(base.spec.num_steps for base in bases), settings.eta)
    return settings


def _default_rungs(config: TrainConfig, num_steps: int, eta: int) -> list[int]:
    """Return num_steps / eta, num_steps / eta², ..., each a multiple of the steps between evaluations; ascending."""
    every = 1 if config.train.command is not None else max(1, config.train.eval_every_steps)
    rungs: list[int] = []
    step = num_steps // eta
    while step >= every:
        rungs.insert(0, step // every * every)
        step //= eta
    return sorted(set(rungs))


def _check(search: Search, grid: Grid) -> None:
    """Raise ConfigError with every problem of a search, one a line."""
    problems = [*_problems(search, search.bases[0].spec.typed())]
    if any(len(spec.on_each()) > 1 for spec in grid.specs):
        problems.append("hardware=first:..: a search takes one hardware profile. Name one.")
    if any(awaited_of(spec.config, grid.sweep.folder.parent) for spec in grid.specs):
        problems.append(
            "`after`, or `init_from` with a source that is not complete, would make the trials wait for other runs. "
            "Trials cannot wait. Start the search when those runs are complete, and name a run (init_from=SWEEP/RUN)."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(search: Search, config: TrainConfig) -> Iterator[str]:
    settings, space = search.settings, search.space
    assert settings.mode is not None
    points = num_points(space)
    if points is not None and points < settings.trials:
        yield (
            f"search.trials={settings.trials}: the space has {points} points, and no point is tried twice. Use "
            f"search.trials={points}, or a grid, which tries all of them."
        )
    if settings.sampler is Sampler.quasi_random and len(space) > MOST_DIMENSIONS:
        yield f"search=quasi_random takes at most {MOST_DIMENSIONS} axes, not {len(space)}. Use search=random."
    if settings.sampler is Sampler.cma_es and all(dimension.choices for dimension in space):
        yield "search=cma_es models numbers, and all axes are lists of values. Use search=tpe, or interval(LOW,HIGH)."
    is_min = any(name in settings.metric.lower() for name in _SMALLER_IS_BETTER)
    is_known = settings.metric in {*config.task.evaluated, "loss"}
    if is_known and is_min != (settings.mode is SearchMode.min):
        right = SearchMode.min if is_min else SearchMode.max
        yield (
            f"search.mode={settings.mode.value} would look for the worst {settings.metric}. Use "
            f"search.mode={right.value}, or leave it out."
        )
    if config.train.main is None and config.train.command is None:
        named = (*config.task.evaluated, *of_steps())
        is_own = isinstance(config.task, CustomTaskConfig) and settings.metric.startswith("eval_")
        if settings.metric not in named and not is_own:
            yield f"search.metric={settings.metric} is not a metric of these runs. {valid(settings.metric, named)}"
    # The schema's own rules on what goes with what do not hold for programs.
    if settings.median and settings.sampler in WITH_RUNGS:
        yield f"search.median=true: search={settings.sampler.value} has a rule of its own. Leave one of the two out."
    if settings.rungs and not search.has_rungs:
        yield (
            f"search.rungs={settings.rungs}: no trial of search={settings.sampler.value} pauses. Use search=asha, or "
            "add search.median=true."
        )
    if search.has_rungs:
        yield from _rung_problems(search, config)


def _rung_problems(search: Search, config: TrainConfig) -> Iterator[str]:
    settings, last = search.settings, search.num_steps
    every = config.train.eval_every_steps
    name = f"search.rungs={settings.rungs}".replace(" ", "")
    is_program = config.train.command is not None
    if any(dimension.key == "train.num_steps" for dimension in search.space):
        yield f"search={settings.sampler.value}: rungs are steps, so train.num_steps cannot be an axis. Give one value."
    if not settings.rungs and is_program and last == 0:
        yield (
            f"search={settings.sampler.value}: the last step of a program is not known. Name the steps at which trials "
            "pause, as the program logs them: search.rungs=[100,400]. Or pass {train.num_steps} on to the program."
        )
        return
    if not settings.rungs:
        yield (
            f"search={settings.sampler.value}: train.num_steps={last} leaves no step for a rung with search.eta="
            f"{settings.eta} and train.eval_every_steps={every}. Use a smaller train.eval_every_steps."
        )
        return
    if sorted(set(settings.rungs)) != settings.rungs or settings.rungs[0] < 1:
        right = sorted({rung for rung in settings.rungs if rung > 0})
        yield f"{name} must be different steps in ascending order. Use search.rungs={right}.".replace(", ", ",")
        return
    beyond = [rung for rung in settings.rungs if rung >= last > 0]
    if beyond:
        yield (
            f"{name}: a rung is before the last step, and train.num_steps={last}. Leave out "
            f"{', '.join(map(str, beyond))}."
        )
    is_evaluated = settings.metric.startswith("eval_") and config.train.main is None and not is_program
    if is_evaluated and (every == 0 or any(rung % every for rung in settings.rungs)):
        step = settings.rungs[0]
        while any(rung % step for rung in settings.rungs):
            step -= 1
        yield (
            f"{name}: train.eval_every_steps={every} makes no evaluation at some of these rungs. "
            f"Use train.eval_every_steps={step}."
        )


def find_change(old: Search, new: Search) -> str | None:
    """Return how a search differs from the one in its folder, beyond more trials and slots; None if it does not."""
    differences = []
    space = difference(old.space, new.space)
    if space is not None:
        differences.append(f"the space ({space})")
    before, now = ({field.name: getattr(search.settings, field.name) for field in dataclasses.fields(SearchConfig)}
                   for search in (old, new))  # fmt: skip
    changed_keys = [key for key in before if key not in ("trials", "parallel", "when") and before[key] != now[key]]
    differences += [f"search.{key} ({_shown(before[key])} before, {_shown(now[key])} now)" for key in changed_keys]
    if now["trials"] < before["trials"]:
        differences.append(f"search.trials ({before['trials']} before, {now['trials']} now: it can only grow)")
    bases = [{tuple(base.choices.items()): base.spec for base in search.bases} for search in (old, new)]
    if space is None and bases[0].keys() == bases[1].keys():
        pairs = ((bases[0][key], bases[1][key]) for key in bases[0])
        changed = next(((one, other) for one, other in pairs if one.digest != other.digest), None)
        if changed is not None:
            was, is_now = (dict(leaves(spec.config, without=PASSED_OVER)) for spec in changed)
            keys = [key for key in is_now if was.get(key, ...) != is_now[key]]
            differences.append(", ".join(f"{key} ({was.get(key)} before, {is_now[key]} now)" for key in keys[:4]))
    return "; ".join(differences) or None


def _shown(value: object) -> object:
    return getattr(value, "value", value)
