"""Draw of the values of one trial, given the known earlier trials.

A draw depends on the search's seed, the trial's number and the known trials alone, so it is the same wherever it is
made. Optuna's samplers get a study in memory with these trials, and a seed of their own for each draw.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.config.schema.train import Sampler
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.search.space import Dimension, Params, Value, draw_quasi_random, draw_random, is_active

OF_OPTUNA = (Sampler.tpe, Sampler.gp, Sampler.cma_es, Sampler.asha_tpe)
"""Samplers that need Optuna."""
WITH_RUNGS = (Sampler.asha, Sampler.hyperband, Sampler.asha_tpe)
"""Samplers whose trials pause at rungs."""
_LEAST_VERSION = 4
_NEEDS = {Sampler.gp: ("scipy", "torch"), Sampler.cma_es: ("cmaes",)}
_STATE_OF_CMA = "cma:optimizer"
"""Attribute of a trial that holds the distribution of CMA-ES after an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Earlier trial in the form that a sampler gets."""

    params: Params
    value: float | None = None
    """Final value of a complete trial; None if it is at work, has failed, or has values of rungs alone."""
    at_rungs: Params | dict[int, float] = field(default_factory=dict)
    """Step -> value of a trial that pauses or works beyond a rung."""
    has_failed: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """State of the sampler after it drew the trial (`Draw.attributes`)."""


def to_plain(told: Told) -> dict[str, Any]:
    """Return a trial of an earlier search in values that JSON can hold."""
    rungs = {str(rung): value for rung, value in told.at_rungs.items()}
    return {"params": dict(told.params), "value": told.value, "at_rungs": rungs, "has_failed": told.has_failed}


def from_plain(plain: Mapping[str, Any]) -> Told:
    """Return the trial that `to_plain` wrote."""
    return Told(**{**plain, "at_rungs": {int(rung): value for rung, value in plain["at_rungs"].items()}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Values of one trial."""

    params: dict[str, Value]
    attributes: dict[str, Any] = field(default_factory=dict)
    """State that the sampler needs for later draws, in values that JSON can hold; {} for most samplers."""


def draw(
    space: Sequence[Dimension], sampler: Sampler, told: Sequence[Told], *, seed: int, is_max: bool, tries: int = 0,
    number: int | None = None,
) -> Draw:  # fmt: skip
    """Return the values of a trial.

    Args:
        space: the dimensions.
        sampler: the search's sampler.
        told: all earlier trials, in the order of their numbers.
        seed: the search's seed.
        is_max: True if larger values are better.
        tries: number of earlier draws of this trial, which all were points that another trial has.
        number: the trial's number; None: `len(told)`, which counts no trials of an earlier search.
    """
    number = len(told) if number is None else number
    if sampler is Sampler.quasi_random and not tries:
        return Draw(params=draw_quasi_random(space, seed, number))
    if sampler not in OF_OPTUNA:
        return Draw(params=draw_random(space, seed, number, tries))
    params, attributes = _in_child(lambda: _ask(space, sampler, told, seed_of_draw(seed, number, tries), is_max))
    return Draw(params=params, attributes=attributes)


def _ask(
    space: Sequence[Dimension], sampler: Sampler, told: Sequence[Told], seed: int, is_max: bool
) -> tuple[dict[str, Value], dict[str, Any]]:
    """Return the values that Optuna draws, and the attributes that its sampler gave the trial."""
    optuna = import_optuna(sampler)
    with _quiet(optuna):
        made = optuna_sampler(optuna, sampler, seed)
        study = optuna.create_study(direction="maximize" if is_max else "minimize", sampler=made)
        distributions = {dimension.key: distribution(optuna, dimension) for dimension in space}
        for trial in told:
            study.add_trial(_frozen(optuna, trial, distributions))
        asked = study.ask()
        params: dict[str, Value] = {}
        for dimension in space:
            if is_active(dimension, params):
                params[dimension.key] = _suggest(asked, dimension)
        attributes = study.get_trials(deepcopy=False)[asked.number].system_attrs if sampler is Sampler.cma_es else {}
        return params, dict(attributes)


def _suggest(trial: Any, dimension: Dimension) -> Value:
    """Return Optuna's value of one dimension of a trial."""
    value: Value
    if dimension.choices:
        value = trial.suggest_categorical(dimension.key, dimension.choices)
    elif dimension.is_whole:
        low, high, step = int(dimension.low), int(dimension.high), int(dimension.step or 1)
        value = trial.suggest_int(dimension.key, low, high, step=step, log=dimension.is_log)
    else:
        value = trial.suggest_float(
            dimension.key, dimension.low, dimension.high, step=dimension.step, log=dimension.is_log
        )  # fmt: skip
    return value


def _cma_es(optuna: Any, seed: int) -> Any:
    """Return Optuna's CmaEsSampler, which keeps its distribution as numbers in attributes of trials.

    Optuna keeps it as a pickle, and nothing that is loaded here may execute code.
    """
    import cmaes
    import numpy

    class CmaEs(optuna.samplers.CmaEsSampler):  # type: ignore[misc]
        distribution: Any = None

        def _init_optimizer(self, *args: Any, **more: Any) -> Any:
            self.distribution = super()._init_optimizer(*args, **more)
            return self.distribution

        def _restore_optimizer(self, completed_trials: Sequence[Any], *args: Any, **more: Any) -> Any:
            kept = (trial.system_attrs.get(_STATE_OF_CMA) for trial in reversed(completed_trials))
            numbers = next((state for state in kept if state is not None), None)
            if numbers is None:
                return None
            self.distribution = cmaes.CMA.__new__(cmaes.CMA)
            self.distribution.__setstate__({
                key: numpy.array(value, dtype=float) if isinstance(value, list) else value
                for key, value in numbers.items()
            })  # fmt: skip
            return self.distribution

        def _split_optimizer_str(self, *args: Any, **more: Any) -> dict[str, Any]:
            state = self.distribution.__getstate__()
            state["_funhist_values"] = numpy.zeros_like(state["_funhist_values"])  # never set, and no draw reads it
            return {_STATE_OF_CMA: {key: getattr(value, "tolist", lambda value=value: value)()
                                    for key, value in state.items()}}  # fmt: skip

    return CmaEs(seed=seed)


def _in_child(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, JSON, from a fork of this process.

    Optuna computes with threads of numpy and torch. A process that has used them must not fork the ranks of a run, as a
    slot of a pool does.

    Raises:
        ConfigError: `work` raised it.
        HpcTrainerError: `work` raised another error, or the child was killed.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            answer: tuple[str, Any] = ("ok", work())
        except ConfigError as error:
            answer = ("config", str(error))
        except BaseException:
            answer = ("error", traceback.format_exc())
        finally:
            with contextlib.suppress(BaseException), os.fdopen(writer, "w") as pipe:
                pipe.write(json.dumps(answer))
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    kind, value = json.loads(text) if text else ("error", "it was killed")
    if kind == "config":
        raise ConfigError(value)
    if kind == "error":
        raise HpcTrainerError(f"the draw failed: {value}")
    return value


def seed_of_draw(seed: int, number: int, tries: int = 0) -> int:
    """Return the seed of one draw, 0 to 2^31 - 1."""
    text = f"{seed}/{number}/{tries}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def optuna_sampler(optuna: Any, sampler: Sampler, seed: int) -> Any:
    """Return Optuna's sampler, with all defaults except the seed and the constant liar for trials at work."""
    if sampler is Sampler.gp:
        return optuna.samplers.GPSampler(seed=seed)
    if sampler is Sampler.cma_es:
        return _cma_es(optuna, seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def distribution(optuna: Any, dimension: Dimension) -> Any:
    """Return Optuna's distribution for a dimension."""
    kinds = optuna.distributions
    if dimension.choices:
        return kinds.CategoricalDistribution(dimension.choices)
    if dimension.is_whole:
        low, high = int(dimension.low), int(dimension.high)
        return kinds.IntDistribution(low, high, log=dimension.is_log, step=int(dimension.step or 1))
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.is_log, step=dimension.step)


def _frozen(optuna: Any, told: Told, distributions: Any) -> Any:
    """Return Optuna's FrozenTrial for a trial: complete, failed, pruned (it has values of rungs), or running."""
    states = optuna.trial.TrialState
    state = states.PRUNED if told.at_rungs else states.RUNNING
    if told.has_failed:
        state = states.FAIL
    elif told.value is not None:
        state = states.COMPLETE
    rungs = {} if state is states.COMPLETE else dict(told.at_rungs)
    return optuna.trial.create_trial(
        state=state, params=dict(told.params), distributions={key: distributions[key] for key in told.params},
        value=told.value if state is states.COMPLETE else None, intermediate_values=rungs,
        system_attrs=dict(told.attributes),
    )  # fmt: skip


def find_packages(sampler: Sampler) -> str | None:
    """Return the problem with the packages that a sampler needs; None if all are installed. Imports none of them."""
    missing = next(
        (name for name in ("optuna", *_NEEDS.get(sampler, ())) if importlib.util.find_spec(name) is None), None
    )
    if missing is not None:
        return (
            f"search={sampler.value} needs {missing}: pip install 'hpc_trainer[search]'. "
            "search=random, quasi_random, asha and hyperband need no package."
        )
    version = importlib.metadata.version("optuna")
    if int(version.partition(".")[0]) < _LEAST_VERSION:
        return (
            f"search={sampler.value} needs optuna of version {_LEAST_VERSION} or newer, and {version} is installed: "
            "pip install 'hpc_trainer[search]'. (hydra-optuna-sweeper needs an older one: give each an environment of "
            "its own.)"
        )
    return None


def import_optuna(sampler: Sampler) -> Any:
    """Return the package optuna.

    Raises:
        ConfigError: it is missing or too old, or a package that this sampler needs is missing.
    """
    problem = find_packages(sampler)
    if problem is not None:
        raise ConfigError(problem)
    import optuna

    return optuna


@contextlib.contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Keep Optuna's log of each trial, and its remarks on experimental arguments, out of the output."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(level)
