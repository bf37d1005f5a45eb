"""Advice for runs: made by rules, sorted by gain, and shown by `advise`, `why` and the report.

A rule (rules_of_time.py, rules_of_resources.py) finds an observed fault in the facts of a run (facts.py), and names
changes that would remove it. Advice is the first of these changes that is legal and gains enough.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import typed_words
from hpc_trainer.errors import ConfigError, SlurmError
from hpc_trainer.observe import rules_of_resources, rules_of_time
from hpc_trainer.observe.facts import TIME, Facts, Finding, Gain, Rule, gather
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.slurm.limits import Limits, read_limits
from hpc_trainer.slurm.shape import find_shape_problems, shape_of

LEAST_GAIN = 0.05
"""Smallest gain that is worth a line, as a fraction of the time or resource that the run takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice for one run."""

    rule: str
    seen: str
    set: tuple[str, ...]
    """Overrides for the command line; () if `do` is the advice."""
    do: str
    gain: Gain
    is_same_run: bool
    """True if the run keeps its id with the change."""

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: the largest gains of time first, then gains of other resources."""
        return self.gain.of != TIME, -self.gain.share

    @property
    def line(self) -> str:
        """Sentence with the observation, the change and the expected gain."""
        return f"{self.rule}: {self.seen}. {typed_words(self.set) or self.do}: {self.gain}"


def choose(facts: Facts, rule: Rule, finding: Finding) -> Advice | None:
    """Return advice with the first legal change that gains enough; None if there is none."""
    for change in finding.changes:
        if change.gain.share < LEAST_GAIN:
            continue
        changed = with_values(facts.config, change.values)
        if changed is None or _is_refused_by_cluster(facts, changed):
            continue
        is_same = config_digest(to_plain(changed)) == facts.run.spec.digest
        return Advice(
            rule=rule.name, seen=finding.seen, set=change.overrides, do=change.do, gain=change.gain, is_same_run=is_same
        )
    return None


def _is_refused_by_cluster(facts: Facts, changed: TrainConfig) -> bool:
    """Return True if the cluster does not allow the shape of the changed configuration, as `plan` would report."""
    before, after = facts.run.spec.shape, shape_of(changed)
    if after == before or changed.cluster.executor is not Executor.slurm:
        return False
    limits, hardware = facts.ask_limits(), changed.hardware.name
    return bool({*find_shape_problems(after, hardware, limits)} - {*find_shape_problems(before, hardware, limits)})


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig | None:
    """Return the configuration with other values of some keys.

    The result is None if `values` change nothing, or if the new configuration breaks a rule that the old one did not
    break, so that `plan` would refuse it.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    made = {name: dataclasses.replace(getattr(config, name), **given) for name, given in sections.items()}
    changed = dataclasses.replace(config, **made)
    if values and changed == config:
        return None
    return changed if set(find_problems(config)).issuperset(find_problems(changed)) else None


RULES = (*rules_of_time.RULES, *rules_of_resources.RULES)


def advice_of(facts: Facts) -> list[Advice]:
    """Return the advice of all rules for one run; [] if no gain is large enough.

    The largest gains of time come first, then gains of other resources.
    """
    choices = [advice for rule in RULES for finding in rule.find(facts) if (advice := choose(facts, rule, finding))]
    return sorted(choices, key=lambda advice: advice.rank)


MOST_RUNS = 200
"""Largest number of runs of a sweep that are read: each has files, and a grid's runs are alike."""


@dataclass(frozen=True, slots=True)
class AdvisedRun:
    """Run that has begun, with its advice."""

    run_id: str
    state: RunState
    command_line: Sequence[str]
    """Options and overrides of the submit, as typed on the command line."""
    advice: Sequence[Advice]


@dataclass(frozen=True, slots=True)
class SharedAdvice:
    """Runs with the same advice; `advice` is that of the run with the largest gain."""

    advice: Advice
    run_ids: Sequence[str]


def advise_runs(status: SweepStatus, run_ids: Sequence[str]) -> tuple[list[AdvisedRun], list[str]]:
    """Return advice on the runs that have begun, at most `MOST_RUNS`, and notes on the runs that were left out."""
    begun = [run for run in map(status.run, run_ids[:MOST_RUNS]) if run.attempts]
    notes = [] if len(run_ids) <= MOST_RUNS else [f"the first {MOST_RUNS} of {len(run_ids)} runs were looked at."]
    tuned, ask_limits = [], _limits_of(status)
    for run in begun:
        try:
            facts = gather(status, run, ask_limits)
            trusted = [word for package in facts.config.trust for word in ("--trust", package)]
            tuned.append(AdvisedRun(run.run_id, run.state, [*trusted, *run.spec.overrides], advice_of(facts)))
            notes += _faults_of(facts)
        except ConfigError as error:  # noqa: PERF203  (a run of another version must not stop the others)
            notes.append(f"{run.run_id}: {error}")
    if not begun and len(run_ids) <= MOST_RUNS:
        notes.append("none of these runs has begun: there is nothing to look at yet.")
    return tuned, list(dict.fromkeys(notes))


def _faults_of(facts: Facts) -> list[str]:
    """Return the faults that `hardware check --run` found on the run's hardware, except missing internet."""
    figures = facts.measured
    if figures is None:
        return []
    faults = (f"{key}: {text}" for key, text in figures.problems.items() if key != "internet")
    return [f"{fault} ({figures.source})" for fault in faults]


def shared_advice(tuned: Sequence[AdvisedRun]) -> list[SharedAdvice]:
    """Group advice by rule and change; the largest gain comes first."""
    groups: dict[tuple[str, tuple[str, ...], str], list[tuple[str, Advice]]] = {}
    for run in tuned:
        for advice in run.advice:
            groups.setdefault((advice.rule, advice.set, advice.do), []).append((run.run_id, advice))
    shared = []
    for group in groups.values():
        first = max((advice for _, advice in group), key=lambda advice: advice.gain.share)
        shared.append(SharedAdvice(first, [run_id for run_id, _ in group]))
    return sorted(shared, key=lambda group: (*group.advice.rank, -len(group.run_ids)))


def sweep_lines(tuned: Sequence[AdvisedRun]) -> list[str]:
    """Return a line for each piece of advice, with the number of its runs and one of their ids."""
    return [
        f"{len(group.run_ids)} run(s), as {group.run_ids[0]}: {group.advice.line}" for group in shared_advice(tuned)
    ]


def next_command(tuned: AdvisedRun, sweep: str) -> str | None:
    """Return the run's own command with the first advice that sets a key; None if there is no such advice.

    The command is `plan ..`, or `retry RUN ..` if only a retry brings the run back.
    """
    advice = next((option for option in tuned.advice if option.set), None)
    if advice is not None and advice.is_same_run and (tuned.state.has_failed or tuned.state is RunState.CANCELLED):
        return f"retry {typed_words([tuned.run_id, *advice.set])}"
    if advice is None or not tuned.command_line:
        return None
    overrides = [*advice.set]
    if advice.is_same_run and tuned.state is RunState.COMPLETED:  # the run has no steps left in its own sweep
        overrides.append(f"sweep_name={sweep}-tuned")
    changed = {word.partition("=")[0] for word in overrides}
    kept = [word for word in tuned.command_line if word.lstrip("+").partition("=")[0] not in changed]
    return f"plan {typed_words([*kept, *overrides])}"


def next_command_of_sweep(tuned: Sequence[AdvisedRun], sweep: str) -> str | None:
    """Return `next_command` of the first run in `sweep_lines` with such a command; else `advise` of the first run."""
    groups = shared_advice(tuned)
    runs = {run.run_id: run for run in tuned}
    commands = (next_command(runs[group.run_ids[0]], sweep) for group in groups if group.advice.set)
    return next(
        (command for command in commands if command is not None), f"advise {groups[0].run_ids[0]}" if groups else None
    )


def count_advice(status: SweepStatus, run: RunStatus) -> int:
    """Return the number of pieces of advice of `advise` for a run; 0 for a run of another version."""
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
