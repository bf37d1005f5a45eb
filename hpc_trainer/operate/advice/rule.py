"""Advice and the rules that give it: an observed fault, a legal change, and the expected gain."""

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
from hpc_trainer.slurm.preflight import find_shape_problems
from hpc_trainer.slurm.shape import shape_of

TIME = "time"
LEAST_GAIN = 0.05
"""Smallest gain, as a fraction of what a run takes, that is worth a line."""
LEAST_LOST_S = 1.0
"""Smallest loss in seconds that counts: losses of a very short run say nothing about a real one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Saving of a change: the fraction `share` (0 to 1) of `of`: time, GPUs, CPUs, host memory, time limit, jobs."""

    share: float
    of: str = TIME
    is_bound: bool = True
    """True if `share` is an upper bound, False if it is an estimate."""

    def __str__(self) -> str:
        word = "up to " if self.is_bound else "about "
        if self.of == TIME:
            return f"{word}{1 / (1 - min(self.share, 0.99)):.3g}x faster"
        less = "fewer" if self.of.endswith("s") else "less"
        return f"{word}{min(self.share, 0.99):.0%} {less} {self.of}"


@dataclass(frozen=True, slots=True)
class Change:
    """Values of keys, set together, and their gain. `do` is an instruction if no key of the configuration helps."""

    values: Mapping[str, Any]
    gain: Gain
    do: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Change as overrides for the command line."""
        return tuple(f"{typed(key)}={shown(value)}" for key, value in self.values.items())


@dataclass(frozen=True, slots=True)
class Finding:
    """Observed fault with its figures, and the changes that would remove it, the best first."""

    seen: str
    changes: Sequence[Change]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table in decision 0049."""

    name: str
    when: str
    """The condition, with its threshold."""
    why: str
    """Source of the threshold."""
    find: Callable[[Facts], Iterator[Finding]]


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
