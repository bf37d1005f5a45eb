"""The runs of a sweep with their advice: for `tune`, `why` and `report`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_trainer.config.table.choice import typed_words
from hpc_trainer.errors import ConfigError, SlurmError
from hpc_trainer.operate.advice.facts import gather
from hpc_trainer.operate.advice.rule import Advice
from hpc_trainer.operate.advice.rules import advice_of
from hpc_trainer.runs.states import RunState
from hpc_trainer.slurm.limits import Limits
from hpc_trainer.slurm.read_limits import read_limits
from hpc_trainer.state.status import RunStatus, SweepStatus

MOST_RUNS = 200
"""Of a sweep: each has files to read, and a grid's runs are alike."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """One run that has begun."""

    run_id: str
    state: RunState
    words: Sequence[str]
    """What it was submitted with, as one types it."""
    advice: Sequence[Advice]


@dataclass(frozen=True, slots=True)
class Alike:
    """Runs that one piece of advice is for; its words are those of the run that would gain the most."""

    advice: Advice
    run_ids: Sequence[str]


def tune(status: SweepStatus, run_ids: Sequence[str]) -> tuple[list[Tuned], list[str]]:
    """The runs among these that have begun, `MOST_RUNS` at the most, and notes about those that were not looked at."""
    begun = [run for run in map(status.run, run_ids[:MOST_RUNS]) if run.attempts]
    notes = [] if len(run_ids) <= MOST_RUNS else [f"the first {MOST_RUNS} of {len(run_ids)} runs were looked at."]
    found, ask_limits = [], _limits_of(status)
    for run in begun:
        try:
            facts = gather(status, run, ask_limits)
            trusted = [word for package in facts.config.trust for word in ("--trust", package)]
            found.append(Tuned(run.run_id, run.state, [*trusted, *run.spec.overrides], advice_of(facts)))
        except ConfigError as error:  # noqa: PERF203  (a run of another version costs no other)
            notes.append(f"{run.run_id}: {error}")
    if not begun and len(run_ids) <= MOST_RUNS:
        notes.append("none of these runs has begun: there is nothing to look at yet.")
    return found, notes


def alike(tuned: Sequence[Tuned]) -> list[Alike]:
    """Advice by rule and change; what gains the most first."""
    groups: dict[tuple[str, tuple[str, ...], str], list[tuple[str, Advice]]] = {}
    for each in tuned:
        for advice in each.advice:
            groups.setdefault((advice.rule, advice.set, advice.do), []).append((each.run_id, advice))
    found = []
    for group in groups.values():
        first = max((advice for _, advice in group), key=lambda advice: advice.gain.share)
        found.append(Alike(first, [run_id for run_id, _ in group]))
    return sorted(found, key=lambda each: (*each.advice.rank, -len(each.run_ids)))


def sweep_lines(tuned: Sequence[Tuned]) -> list[str]:
    """A line for each piece of advice, with how many runs it is for and one of them."""
    return [f"{len(each.run_ids)} run(s), as {each.run_ids[0]}: {each.advice.line}" for each in alike(tuned)]


def next_words(tuned: Tuned, sweep: str) -> str | None:
    """The run's own command with the first advice that a key can follow; None where there is none.

    `plan ..`, or `retry RUN ..` where that alone brings the run back.
    """
    advice = next((each for each in tuned.advice if each.set), None)
    if advice is not None and advice.is_same_run and (tuned.state.has_failed or tuned.state is RunState.CANCELLED):
        return f"retry {typed_words([tuned.run_id, *advice.set])}"
    if advice is None or not tuned.words:
        return None
    words = [*advice.set]
    if advice.is_same_run and tuned.state is RunState.COMPLETED:  # nothing is left to do of it in its own sweep
        words.append(f"sweep_name={sweep}-tuned")
    changed = {word.partition("=")[0] for word in words}
    kept = [word for word in tuned.words if word.lstrip("+").partition("=")[0] not in changed]
    return f"plan {typed_words([*kept, *words])}"


def next_of_sweep(tuned: Sequence[Tuned], sweep: str) -> str | None:
    """As `next_words`, of the first run of `sweep_lines` that has such a command; else what tells more of the first."""
    groups = alike(tuned)
    runs = {each.run_id: each for each in tuned}
    told = (next_words(runs[group.run_ids[0]], sweep) for group in groups if group.advice.set)
    return next((each for each in told if each is not None), f"tune {groups[0].run_ids[0]}" if groups else None)


def count_of(status: SweepStatus, run: RunStatus) -> int:
    """How many pieces of advice `tune` has for a run; 0 of one of another version."""
    if not run.attempts:
        return 0
    try:
        return len(advice_of(gather(status, run, _limits_of(status))))
    except ConfigError:
        return 0


def _limits_of(status: SweepStatus) -> Callable[[], Limits]:
    """Return a function that asks the cluster for its limits once; without an answer there are no limits."""

    @functools.cache
    def ask() -> Limits:
        if status.silence is not None:
            return Limits()
        try:
            return read_limits()
        except SlurmError:
            return Limits()

    return ask
