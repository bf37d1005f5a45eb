"""Choice of the next run of a search, made by a slot with a free place, from the files in the sweep's folder alone.

First comes a trial that a search lets train further (ASHA and Hyperband), then a new trial. Both are claimed by a file
that can be created once, so that slots on any number of machines need not know of each other.

Trials are promoted as in ASHA: a slot takes the trial of the highest rung that is among the best 1/eta of all results
at that rung and was not promoted yet; if there is none, it draws a new one (Li et al. 2020, "A System for Massively
Parallel Hyperparameter Tuning", algorithm 2). Hyperband runs several such brackets beside each other, which begin at
different rungs; their sizes are those of Li et al. 2018, "Hyperband" (JMLR 18), algorithm 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_trainer.config.schema.train import Sampler
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.rungs import promote
from hpc_trainer.record.spec import RunSpec, claim_spec
from hpc_trainer.record.states import RunState
from hpc_trainer.search.folder import Search, Trial, Trials, read_search, value_for_sampler
from hpc_trainer.search.samplers import OF_OPTUNA, Draw, Told, draw
from hpc_trainer.search.space import MOST_POINTS, every_point, num_points

# A point that another trial has is drawn again this often; then a finite space is looked through.
_TRIES = 16


class SearchStoppedError(HpcTrainerError):
    """Error for a search that must not draw further trials until the user has acted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Run to start now."""

    spec: RunSpec
    number: int
    """Number of the run's trial."""
    is_new: bool
    """True for a new trial, False for a trial that was promoted."""


def next_run(paths: SweepPaths, search: Search, trials: Trials) -> Chosen | None:
    """Claim and return the next run; None if nothing can be started now.

    A later call may find a run, once trials at work have ended.

    Raises:
        SearchStoppedError: the search was cancelled, or no trial has the metric.
        RunStateError: the file of a trial cannot be read.
    """
    while True:
        known = trials.read()
        problem = stop_reason(search, known, paths.name)
        if problem is not None:
            raise SearchStoppedError(problem)
        chosen = promotable(search, known)
        if chosen is not None:
            trial, step, number = chosen
            if promote(paths.run(trial.run_id), step, number):
                return Chosen(spec=trials.spec(trial.number), number=trial.number, is_new=False)
            continue  # another slot was faster
        if len(known) >= search.settings.trials:
            return None
        drawn = new_trial(search, known)
        if drawn is None:
            return None
        spec, more = drawn
        if claim_spec(paths, len(known), spec, more):
            return Chosen(spec=spec, number=len(known), is_new=True)


def is_over(search: Search, known: Sequence[Trial]) -> bool:
    """Return True if no trial is left to draw, to promote or to end."""
    return not has_next(search, known) and all(trial.is_over or trial.state is RunState.PAUSED for trial in known)


def has_next(search: Search, known: Sequence[Trial]) -> bool:
    """Return True if a trial is left to draw or to promote."""
    if len(known) < search.settings.trials and not _is_exhausted(search, known):
        return True
    return promotable(search, known) is not None


def states_at_end(paths: SweepPaths) -> Mapping[str, int] | None:
    """Return the number of trials in each state if the search is over, {} if it is not; None without a search.

    Raises:
        RunStateError: the search or a trial cannot be read.
    """
    search = read_search(paths)
    if search is None:
        return None
    known = Trials(paths, search).read()
    return Counter(trial.state.value for trial in known) if is_over(search, known) else {}


def _is_exhausted(search: Search, known: Sequence[Trial]) -> bool:
    points = num_points(search.space)
    return points is not None and len({trial.run_id for trial in known}) >= points


def stop_reason(search: Search, known: Sequence[Trial], sweep: str) -> str | None:
    """Return why no further trial of a sweep may be drawn, with what to do; None if trials may be drawn."""
    if any(trial.is_with_sweep for trial in known):
        return f"the search was cancelled. To bring its trials back: hpc-trainer retry {sweep}, then the same submit."
    metric = search.settings.metric
    for trial in known:
        has_none = trial.state is RunState.COMPLETED and trial.value is None
        has_none |= trial.state is RunState.PAUSED and trial.until not in trial.at_rungs
        if has_none:
            names = ", ".join(sorted(trial.metrics)) or "no metric at all"
            return (
                f"trial {trial.number} ({trial.run_id}) has no {metric}; it has {names}. Submit the search anew with "
                "one of them as search.metric, and another sweep_name."
            )
    ended = [trial for trial in known if trial.state in (RunState.COMPLETED, RunState.PAUSED, RunState.FAILED)]
    failed = [trial for trial in ended if trial.state is RunState.FAILED]
    if len(failed) == len(ended) >= min(_MOST_FAILED, search.settings.trials):
        return (
            f"the first {len(failed)} trials have all failed. Read: hpc-trainer why {failed[0].run_id}. "
            f"The same submit continues once one of them is complete: hpc-trainer retry {failed[0].run_id}"
        )
    not_finite = [trial for trial in ended if trial.has_no_finite_value]
    if not_finite and len(failed) + len(not_finite) == len(ended) >= _MOST_FAILED:
        return (
            f"none of the first {len(ended)} trials has a finite {metric}: {len(not_finite)} have NaN or infinity, "
            f"{len(failed)} failed. Read: hpc-trainer why {not_finite[0].run_id}. Submit the search anew with another "
            "space, and another sweep_name."
        )
    return None


_MOST_FAILED = 5


# Promotion from rung to rung.


def promotable(search: Search, known: Sequence[Trial]) -> tuple[Trial, int, int] | None:
    """Return the trial to promote, the step until which it trains then, and the number of results at its rung."""
    if not search.has_rungs:
        return None
    ladders = dict.fromkeys(trial.rungs for trial in known)
    for rungs in ladders:
        of_ladder = [trial for trial in known if trial.rungs == rungs]
        for place in reversed(range(len(rungs))):
            rung = rungs[place]
            above = rungs[place + 1] if place + 1 < len(rungs) else max(search.num_steps, rungs[-1] + 1)
            results = [trial for trial in of_ladder if rung in trial.at_rungs]
            best = sorted(results, key=lambda trial: _rank(trial, rung, is_max=search.is_max))
            for trial in best[: _num_promoted(search, len(results))]:
                if trial.state is RunState.PAUSED and trial.until == rung and math.isfinite(trial.at_rungs[rung]):
                    return trial, above, len(results)
    return None


_MEDIAN_AFTER = 5


def _num_promoted(search: Search, num_results: int) -> int:
    """Return the number of the best trials at a rung that may continue."""
    if not search.settings.median:
        return num_results // search.settings.eta
    return num_results if num_results <= _MEDIAN_AFTER else (num_results + 1) // 2


def _rank(trial: Trial, rung: int, *, is_max: bool) -> tuple[float, int]:
    value = trial.at_rungs[rung]
    if not math.isfinite(value):
        return math.inf, trial.number
    return (-value if is_max else value), trial.number


def brackets(search: Search) -> list[tuple[int, ...]]:
    """Return the rungs of each bracket: one for ASHA; for Hyperband one for each first rung, and one without rungs."""
    rungs = tuple(search.settings.rungs)
    if search.settings.sampler is Sampler.hyperband:
        return [rungs[begin:] for begin in range(len(rungs) + 1)]
    return [rungs] if search.has_rungs else [()]


def bracket_of(search: Search, number: int) -> tuple[int, ...]:
    """Return the rungs of trial `number`. Hyperband fills its brackets in turn, the one with the most trials first."""
    made = brackets(search)
    if len(made) == 1:
        return made[0]
    most, eta = len(made) - 1, search.settings.eta
    sizes = [math.ceil((most + 1) / (left + 1) * eta**left) for left in range(most, -1, -1)]
    place = number % sum(sizes)
    for bracket, size in zip(made, sizes, strict=True):
        if place < size:
            return bracket
        place -= size
    raise AssertionError(number)


# New trials.


def new_trial(search: Search, known: Sequence[Trial]) -> tuple[RunSpec, dict[str, object]] | None:
    """Return the run of the next trial, and the record of its draw; None if every point of the space has a trial.

    Raises:
        ConfigError: the sampler's package is missing.
    """
    settings, number = search.settings, len(known)
    rungs = bracket_of(search, number)
    trials = [*search.earlier, *told_of(search, known)] if settings.sampler in OF_OPTUNA else []
    taken = {trial.run_id for trial in known}
    for tries in range(_TRIES):
        drawn = draw(
            search.space, settings.sampler, trials, seed=settings.seed, is_max=search.is_max, tries=tries, number=number
        )  # fmt: skip
        spec = search.spec_of(drawn.params, rungs)
        if spec.run_id not in taken:
            return spec, _record(number, drawn, rungs, known, tries)
    if (num_points(search.space) or math.inf) > MOST_POINTS:
        return None
    for params in every_point(search.space):
        spec = search.spec_of(params, rungs)
        if spec.run_id not in taken:
            return spec, _record(number, Draw(params=params), rungs, known, _TRIES)
    return None


def _record(number: int, drawn: Draw, rungs: Sequence[int], known: Sequence[Trial], tries: int) -> dict[str, object]:
    return {
        "number": number, "params": drawn.params, "rungs": list(rungs), "tries": tries,
        "known": [trial.number for trial in known if trial.is_over],
        "at_work": [trial.number for trial in known if not trial.is_over],
        **({"attributes": drawn.attributes} if drawn.attributes else {}),
    }  # fmt: skip


def told_of(search: Search, known: Sequence[Trial]) -> list[Told]:
    """Return the trials as the sampler gets them."""
    values = value_for_sampler(known, search.settings, is_max=search.is_max)
    return [
        Told(
            params=trial.params, value=value, at_rungs=finite(trial.at_rungs),
            has_failed=value is None and trial.is_over, attributes=trial.attributes,
        )
        for trial, value in zip(known, values, strict=True)
    ]  # fmt: skip


def finite(at_rungs: Mapping[int, float]) -> dict[int, float]:
    """Return the values at rungs without those that are NaN or infinite."""
    return {rung: value for rung, value in at_rungs.items() if math.isfinite(value)}


def check_packages(search: Search) -> None:
    """Raise ConfigError if a package that the sampler needs is missing; do not import what only a draw needs."""
    if search.settings.sampler in OF_OPTUNA:
        from hpc_trainer.search.samplers import find_packages

        problem = find_packages(search.settings.sampler)
        if problem is not None:
            raise ConfigError(problem)
