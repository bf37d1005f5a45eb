"""What a feature declares of itself: when it is on, what it needs, what it does not go with and why. Data; no torch.

Each folder of `hpc_trainer/features/` declares one `FEATURE`; `core_table.py` has those of the core's choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpc_trainer.config.memo import Memo
from hpc_trainer.config.schema.optim import OptimConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.config.table.choice import defaults_of, held, holds


def _no_rules(config: TrainConfig) -> Iterator[str]:
    return iter(())


def _nothing(config: TrainConfig, memo: Memo) -> None: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of what goes with what: a choice, and the reason in a clause without a full stop."""

    what: str
    """As in `config/table/choice.py`."""
    why: str
    when: str = ""
    """A choice among the feature's own without which the row does not count: `parallel.comm_hook=powersgd`."""
    use: str | Callable[[TrainConfig], str] = ""
    """What to type instead, where that is not what turns one of the two off: `train.recompute=full`."""


def _is_by_weight(kind: type) -> bool:
    return issubclass(kind, OptimConfig) and kind.updates_each_weight_alone


BY_WEIGHT = Row(
    "optim=" + "|".join(name for name, kind in VARIANTS["optim"].items() if _is_by_weight(kind)),
    "weights are updated in pieces, and nobody knows if another optimizer can",
    use="optim=adamw",
)
OF_SHARED_LOOP = Row("train.main", "it is a way of the shared loop, and that is your own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One ability of a run, by the choice that turns it on."""

    name: str = ""
    """That of its folder, which is not written down a second time."""
    on: str = ""
    """A choice (`config/table/choice.py`). Left out: it is part of each run, and goes with everything."""
    is_in_each_run: bool = False
    """Its ability is part of each run, also of those that do not choose it: it may be asked for while they run."""
    example: str = ""
    """What one types for it: the test of all pairs does."""
    off: str = ""
    """What one types to be without it; left out where the default of its keys is that."""
    needs: tuple[Row, ...] = ()
    """Choices without which it is refused."""
    excludes: tuple[Row, ...] = ()
    """Choices with which it is refused. Each pair stands once, at either of the two."""
    after: tuple[str, ...] = ()
    """Features whose ability is asked before this one's, where the same hook of both changes the same thing."""
    before: tuple[str, ...] = ()
    """The same the other way round: they come after this one, and need not know it."""
    problems: Callable[[TrainConfig], Iterator[str]] = _no_rules
    """Rules of its own values, which no choice says; asked whether it is on or not."""
    fill: Callable[[TrainConfig, Memo], None] = _nothing
    """Of a configuration without problems that has it on: fills in what follows from its own values, in copies of
    sections, once for points that share one. May read files. Raises ConfigError."""
    logs: tuple[str, ...] = ()
    """Metrics of steps that its ability adds (`Ability.logged`): checkpoint.keep_best may name them."""
    num_threads: int | None = None
    """Threads of each rank, where it counts on a number; None: as many as it has cores."""

    @property
    def without(self) -> str:
        """What one types to be without it."""
        return self.off or defaults_of(self.on)

    def without_in(self, config: TrainConfig) -> str:
        """The same where `config` has it on: of several ways to turn it on those that it takes."""
        return self.off or defaults_of(held(config, self.on))

    def is_on(self, config: TrainConfig) -> bool:
        return not self.on or holds(config, self.on)
