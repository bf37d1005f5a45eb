"""The files of a search: the submitted search (search.json), and the trials that were drawn so far.

A trial is a file of its own, drawn/000012.jsonl, that is created once (`record.spec.claim_spec`): of two processes that
draw trial 12 at the same moment one gets the number. It holds the frozen run, its values, and which earlier trials were
known and at work when it was drawn. The outcome of a trial is in the folder of its run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.identity import run_id_of
from hpc_trainer.config.load import from_plain
from hpc_trainer.config.program import program_name
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.key import is_secret_value
from hpc_trainer.config.schema.train import FailedTrial, SearchConfig
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.record.chain import Goal
from hpc_trainer.record.files import write_atomic
from hpc_trainer.record.journal import Journal, read_result
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.reading import Faults, names_in, read_json, seal
from hpc_trainer.record.rungs import pause_step
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.spec import RunSpec, drawn_names, read_drawn
from hpc_trainer.record.states import CANCEL, DONE, RunState
from hpc_trainer.record.trust import is_ours
from hpc_trainer.search import samplers
from hpc_trainer.search import space as spaces
from hpc_trainer.search.samplers import WITH_RUNGS, Told
from hpc_trainer.search.space import Dimension, Params, Value, text_of

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Configuration from which trials are made: one for each combination of choices of groups."""

    choices: Params
    """Choice of each axis that is a group of `conf/`; {} if there is none."""
    config: Mapping[str, Any]
    """Configuration in plain values, before rules fill in values that follow from others."""
    overrides: tuple[str, ...]
    """Overrides of the configuration, as far as they have one value."""
    spec: RunSpec
    """The configuration as a frozen run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search as it was submitted."""

    settings: SearchConfig
    """Keys of `search`, with `mode` and `rungs` filled in."""
    space: tuple[Dimension, ...]
    bases: tuple[Base, ...]
    words: tuple[str, ...]
    """Overrides with one value, without those of the search."""
    app: tuple[str, ...] = ()
    """Hydra app and its words with one value (`--app`); () for other searches."""
    code: str | None = None
    """Digest of the frozen code that trials start from; None if nothing was frozen."""
    earlier: tuple[Told, ...] = ()
    """Trials of an earlier search that the sampler knows (`search.from_sweep`), as they were at the first submit."""

    @property
    def is_max(self) -> bool:
        """True if larger values of the metric are better."""
        return self.settings.mode is not None and self.settings.mode.value == "max"

    @property
    def num_steps(self) -> int:
        """Steps of a whole trial; the most of all bases. 0 for programs whose last step is not known."""
        return max(base.spec.num_steps for base in self.bases)

    @property
    def has_rungs(self) -> bool:
        """True if trials pause at rungs."""
        return self.settings.sampler in WITH_RUNGS or self.settings.median

    def spec_of(self, params: Params, rungs: Sequence[int]) -> RunSpec:
        """Return the frozen run of a trial: its base with the trial's values.

        Args:
            params: value of each dimension.
            rungs: the steps at which the trial pauses, ascending.

        Raises:
            ConfigError: the values are incompatible.
        """
        base = next(base for base in self.bases if all(params[key] == name for key, name in base.choices.items()))
        config = copy.deepcopy(dict(base.config))
        lines = [line for line in base.overrides if line.partition("=")[0].lstrip("+") not in params]
        for key, value in params.items():
            if key not in base.choices:
                set_leaf(config, key, value)
            lines.append(f"{key}={value if key in base.choices else override_of(value)}")
        typed = from_plain(config)
        typed.search.rungs = list(rungs)
        validate(typed)
        axes = {key: text_of(value) for key, value in params.items()}
        from hpc_trainer.launch.freeze import freeze  # it imports Hydra, which `status` does without

        spec = freeze(typed, axes=axes, overrides=tuple(lines))
        return dataclasses.replace(spec, run_id=_id_in_app(spec, axes)) if self.app else spec


def _id_in_app(spec: RunSpec, axes: Mapping[str, str]) -> str:
    """Return the id of a trial of a Hydra app: named by its axes, because `params` is the app's whole configuration."""
    names = {key: key.rpartition(".")[2] for key in axes}
    told = [name if is_secret_value(name, axes[key]) else f"{name}{axes[key]}" for key, name in names.items()]
    label = "-".join([program_name(spec.config["train"]["command"]), *told])
    return run_id_of(re.sub(r"[^A-Za-z0-9._-]", "_", label), spec.config["seed"], spec.digest)


def set_leaf(config: dict[str, Any], key: str, value: Value) -> None:
    """Set a value of a plain configuration by its dotted key."""
    *sections, leaf = key.lstrip("+").split(".")
    for name in sections:
        config = config[name]
    config[leaf] = value


def override_of(value: Value) -> str:
    """Return a value as an override that gives exactly this value."""
    if isinstance(value, str):
        from hpc_trainer.config.compose.overrides import override_value

        return override_value(value)
    return repr(value) if isinstance(value, float) else text_of(value)


def base_of(choices: Params, config: Mapping[str, Any], overrides: tuple[str, ...]) -> Base:
    """Return a base with its frozen run.

    Raises:
        ConfigError: the configuration is of another version.
    """
    typed = from_plain(config)
    validate(typed)
    from hpc_trainer.launch.freeze import freeze

    return Base(
        choices=choices, config=config, overrides=overrides, spec=freeze(typed, axes={}, overrides=overrides)
    )  # fmt: skip


def write_search(paths: SweepPaths, search: Search) -> None:
    """Replace search.json. The caller holds the sweep's lock."""
    from hpc_trainer.config.load import plain_value

    record = {
        "format": _FORMAT, "settings": plain_value(search.settings), "space": spaces.to_plain(search.space),
        "bases": [
            {"choices": dict(base.choices), "config": dict(base.config), "overrides": list(base.overrides)}
            for base in search.bases
        ],
        "words": list(search.words), "app": list(search.app), "code": search.code,
        "earlier": list(map(samplers.to_plain, search.earlier)),
    }  # fmt: skip
    write_atomic(paths.search, f"{seal(json.dumps(record))}\n")


def read_search(paths: SweepPaths) -> Search | None:
    """Return the search of a sweep; None if the sweep has none.

    Raises:
        RunStateError: search.json is damaged, or of a newer version.
        UntrustedFileError: others may have changed it.
    """
    from hpc_trainer.config.load import section_from_plain

    faults = Faults()
    if not is_ours(paths.search, faults):
        return None
    record = read_json(paths.search, faults)
    try:
        if record is None:
            raise ValueError(faults[0] if faults else "it is empty")
        if record["format"] != _FORMAT:
            raise ValueError(f"its format {record['format']} is of a newer version")
        return Search(
            settings=section_from_plain(SearchConfig, record["settings"]),
            space=spaces.from_plain(record["space"]),
            bases=tuple(base_of(base["choices"], base["config"], tuple(base["overrides"])) for base in record["bases"]),
            words=tuple(record["words"]),
            app=tuple(record.get("app", ())),
            code=record["code"],
            earlier=tuple(map(samplers.from_plain, record.get("earlier", ()))),
        )
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise RunStateError(
            f"{paths.search} cannot be read ({error}). The same `hpc-trainer submit` command writes it anew."
        ) from error


def goal_of(paths: SweepPaths) -> Goal | None:
    """Return the goal of a sweep's search (hook `search_goals`); None without a search.

    Raises:
        RunStateError: search.json is damaged, or of a newer version.
    """
    search = read_search(paths)
    if search is None:
        return None
    bases = tuple(base.spec for base in search.bases)
    return Goal(metric=search.settings.metric, is_max=search.is_max, bases=bases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial as its run's files show it."""

    number: int
    run_id: str
    params: Params
    rungs: tuple[int, ...]
    """Steps at which the trial pauses, ascending; () if it never pauses."""
    state: RunState
    """COMPLETED, FAILED, CANCELLED, PAUSED; RUNNING for all other states, whoever has the run."""
    value: float | None = None
    """Final value of the metric; None if there is none. NaN is possible."""
    at_rungs: Mapping[int, float] = field(default_factory=dict)
    """Rung -> value of the metric there, also of rungs that the trial has left."""
    until: int | None = None
    """Step until which the trial may train now; None: to its end."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that a complete or paused run has."""
    is_with_sweep: bool = False
    """True if the trial was cancelled together with its whole sweep."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """State of the sampler after it drew the trial (`samplers.Draw`)."""

    @property
    def is_over(self) -> bool:
        """True if no process will work on the trial again by itself."""
        return self.state in (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)

    @property
    def has_no_finite_value(self) -> bool:
        """True if the trial is complete or paused and all its values of the metric that count are NaN or infinite."""
        values = {RunState.COMPLETED: (self.value,), RunState.PAUSED: self.at_rungs.values()}.get(self.state, ())
        numbers = [value for value in values if value is not None]
        return bool(numbers) and not any(map(math.isfinite, numbers))


class Trials:
    """Reader of the trials of a sweep; it keeps trials that cannot change any more."""

    def __init__(self, paths: SweepPaths, search: Search) -> None:
        self.paths, self.search = paths, search
        self._drawn: dict[str, tuple[RunSpec, dict[str, Any]]] = {}
        self._over: dict[str, Trial] = {}

    def read(self) -> list[Trial]:
        """Return all trials in the order of their numbers, as the folder shows them now.

        Raises:
            RunStateError: the file of a trial cannot be read, so that the next draw is not known.
        """
        look_anew(self.paths.folder)
        faults = Faults()
        names = drawn_names(self.paths, faults)
        trials = [self._over.get(name) or self._read(name, faults) for name in names]
        if [trial.number for trial in trials] != list(range(len(trials))):
            raise RunStateError(f"{self.paths.drawn} lacks the file of a trial: its files are numbered without a gap.")
        return trials

    def spec(self, number: int) -> RunSpec:
        """Return the frozen run of a trial that was read."""
        return self._drawn[f"{number:06d}.jsonl"][0]

    def count(self) -> int:
        """Return the number of trials that were drawn."""
        return len(drawn_names(self.paths, Faults()))

    def _read(self, name: str, faults: Faults) -> Trial:
        if name not in self._drawn:
            drawn = read_drawn(self.paths.drawn / name, faults)
            if drawn is None:
                raise RunStateError(
                    f"{self.paths.drawn / name} cannot be read: {faults[0] if faults else 'it is empty'}."
                )
            self._drawn[name] = drawn
        spec, more = self._drawn[name]
        trial = read_trial(self.paths.run(spec.run_id), spec, more, self.search.settings.metric)
        if trial.state is RunState.COMPLETED:
            self._over[name] = trial
        return trial


def read_trial(run: RunPaths, spec: RunSpec, more: Mapping[str, Any], metric: str) -> Trial:
    """Return a trial from the files of its run."""
    faults = Faults()
    names = names_in(run.place) or ()
    rungs = tuple(more["rungs"])
    made = Trial(
        number=more["number"], run_id=spec.run_id, params=more["params"], rungs=rungs, state=RunState.RUNNING,
        until=pause_step(rungs, names), attributes=more.get("attributes", {}),
    )  # fmt: skip
    if CANCEL in names and DONE not in names:
        with_sweep = (read_json(run.marker(CANCEL), faults) or {}).get("with_sweep") is True
        return dataclasses.replace(made, state=RunState.CANCELLED, is_with_sweep=with_sweep)
    attempts = Journal(run).read_story(faults, names).attempts if names else []
    newest = attempts[-1] if attempts else None
    records = read_metrics(run.metrics) if rungs and attempts else []
    at_rungs = _at_rungs(records, rungs, metric)
    if DONE in names:
        metrics = read_result(Path(run.result), faults).get("metrics") or {}
        value = _number(metrics[metric]) if metric in metrics else None
        return dataclasses.replace(
            made, state=RunState.COMPLETED, value=value, at_rungs=at_rungs,
            metrics=tuple(metrics), until=None,
        )  # fmt: skip
    if newest is not None and newest.has_ended and newest.state is not None and newest.state.has_failed:
        return dataclasses.replace(made, state=RunState.FAILED, at_rungs=at_rungs)
    if newest is not None and newest.state is RunState.PAUSED and newest.has_ended:
        names_logged = tuple({name: None for record in records for name in record if name != "step"})
        if made.until is not None and (newest.step or 0) >= made.until:
            return dataclasses.replace(made, state=RunState.PAUSED, at_rungs=at_rungs, metrics=names_logged)
    return dataclasses.replace(made, at_rungs=at_rungs)


def _at_rungs(records: Sequence[Mapping[str, Any]], rungs: Sequence[int], metric: str) -> dict[int, float]:
    """Return the value of the metric at each rung: the newest one that was logged up to there and after the rung below.

    A program that logs at other steps is stopped at the first value beyond the rung, which then is that of the rung. A
    value that is not finite is NaN.
    """
    values: dict[int, float] = {}
    below = 0
    for rung in rungs:
        logged = [record for record in records if metric in record and below < record["step"]]
        here = [record for record in logged if record["step"] <= rung][-1:] or logged[:1]
        if here and any(record["step"] >= rung for record in records):
            values[rung] = _number(here[0][metric])
        below = rung
    return values


def _number(value: object) -> float:
    """Return a metric's value; NaN if it was not finite, which readers give as None."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def value_for_sampler(trials: Sequence[Trial], settings: SearchConfig, *, is_max: bool) -> list[float | None]:
    """Return the value of each trial that is over, as its sampler gets it; None for a trial that is left out.

    With `failed=worst`, failed trials and those whose value is NaN or infinite get the worst finite value so far.
    """
    finite = [trial.value for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    worst = (min(finite) if is_max else max(finite)) if finite else None
    if settings.failed is FailedTrial.skip:
        worst = None
    return [
        trial.value if trial.value is not None and math.isfinite(trial.value)
        else worst if trial.state in (RunState.COMPLETED, RunState.FAILED) else None
        for trial in trials
    ]  # fmt: skip
