"""A piece of advice, and a rule that gives it: a fault that is seen, a legal change, and the gain that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import shown, typed, typed_words
from hpc_trainer.operate.advice.facts import Facts
from hpc_trainer.runs.shape import shape_of
from hpc_trainer.slurm.preflight import find_shape_problems

TIME = "time"
LEAST_GAIN = 0.05
"""Less than this share of what a run takes is worth nobody's line."""
LEAST_LOST_S = 1.0
"""Seconds: what is lost in a run of a moment tells nothing about a real one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """`share` (0 to 1) less of what the run takes of `of`: time, GPUs, CPUs, host memory, time limit, jobs."""

    share: float
    of: str = TIME
    is_bound: bool = True
    """At the most so much; else about."""

    def __str__(self) -> str:
        word = "up to " if self.is_bound else "about "
        if self.of == TIME:
            return f"{word}{1 / (1 - min(self.share, 0.99)):.3g}x faster"
        less = "fewer" if self.of.endswith("s") else "less"
        return f"{word}{min(self.share, 0.99):.0%} {less} {self.of}"


@dataclass(frozen=True, slots=True)
class Change:
    """Key -> value, all at once, and what that would gain. `do`: words, where no key of the configuration does it."""

    values: Mapping[str, Any]
    gain: Gain
    do: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """As one types it."""
        return tuple(f"{typed(key)}={shown(value)}" for key, value in self.values.items())


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault: what was seen, with its figures, and what would mend it, the best first."""

    seen: str
    changes: Sequence[Change]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table in decision 0049."""

    name: str
    when: str
    """The condition, with its threshold."""
    why: str
    """Where the threshold comes from."""
    find: Callable[[Facts], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a run is told."""

    rule: str
    seen: str
    set: tuple[str, ...]
    """Words for the command line; () where `do` says it."""
    do: str
    gain: Gain
    is_same_run: bool
    """The change does not make another run of it."""

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts what gains the most time first, then what spares other things."""
        return self.gain.of != TIME, -self.gain.share

    @property
    def line(self) -> str:
        """What was seen, what to change, what that is expected to gain."""
        return f"{self.rule}: {self.seen}. {typed_words(self.set) or self.do}: {self.gain}"


def choose(facts: Facts, rule: Rule, finding: Finding) -> Advice | None:
    """The first change that is legal and worth its line; None if there is none."""
    for change in finding.changes:
        if change.gain.share < LEAST_GAIN:
            continue
        changed = with_values(facts.config, change.values)
        if changed is None or _is_refused_by_cluster(facts, changed):
            continue
        is_same = config_digest(to_plain(changed)) == facts.run.spec.digest
        return Advice(
            rule=rule.name, seen=finding.seen, set=change.words, do=change.do, gain=change.gain, is_same_run=is_same
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
    """The configuration with other values of some keys; None if it breaks a rule that was not broken before, as `plan`
    would refuse it, or changes nothing.
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
