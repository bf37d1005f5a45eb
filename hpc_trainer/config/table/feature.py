"""Declaration of a feature: when it is on, what it needs, and what it does not go with and why. Data, without torch.

Each folder of `hpc_trainer/features/` declares one `FEATURE`; `declarations.py` declares the core's choices. Rows name
no kind of model or data set by hand: a new kind joins the right rows by the properties that it declares.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_trainer.config.load import Memo
    from hpc_trainer.config.schema.train import TrainConfig


import functools
from collections.abc import Collection

from hpc_trainer.config.schema.model import Trait


def models(
    *,
    having: Collection[Trait] = (),
    without: Collection[Trait] = (),
    key: str | None = None,
    also: Collection[str] = (),
) -> Callable[[], str]:
    """Return a function that names all models with all traits of `having` and none of `without`: `model=resnet|vit`.

    Models whose traits are unknown are left out. The function is for a `Row`, which is read when all models are known.

    Args:
        having: traits that the models have.
        without: traits that the models lack.
        key: name of a key that the models have; None for any model.
        also: names to add.
    """

    @functools.cache
    def named() -> str:
        names = [
            name
            for name, kind in _variants("model").items()
            if kind.traits is not None
            and kind.traits.issuperset(having)
            and kind.traits.isdisjoint(without)
            and (key is None or hasattr(kind, key))
        ]
        return f"model={'|'.join((*names, *also))}"

    return named


def datasets(*, of_text: bool) -> Callable[[], str]:
    """Return a function that names all data sets that are known to hold text, or to hold none: `data=digits|arrays`."""

    @functools.cache
    def named() -> str:
        names = [name for name, kind in _variants("data").items() if kind.is_text is of_text]
        return f"data={'|'.join(names)}"

    return named


@functools.cache
def optimizers_by_weight() -> str:
    """Return `optim=sgd|adamw` for all optimizers that update each weight alone."""
    names = [name for name, kind in _variants("optim").items() if kind.updates_each_weight_alone]
    return f"optim={'|'.join(names)}"


def _variants(group: str) -> dict[str, Any]:
    from hpc_trainer.config.store import VARIANTS  # late: features are declared before all sections are made

    return VARIANTS[group]


def _no_rules(config: TrainConfig) -> Iterator[str]:
    return iter(())


def _nothing(config: TrainConfig, memo: Memo) -> None: ...


def later(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports `module` when it is called, and calls the module's function `name`."""

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args)

    return call


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table of combinations: a choice, and the reason as a clause without a full stop."""

    choice: str | Callable[[], str]
    """Choice in the syntax of `config/table/choice.py`; a function if it follows from all models or data sets, which
    are not known yet when a feature is declared."""
    why: str
    when: str = ""
    """Choice of the feature to which the row is limited, such as `parallel.comm_hook=powersgd`; "" for no limit."""
    use: str | Callable[[TrainConfig], str] = ""
    """Override to suggest, if it is not the one that turns one of the two off: `train.recompute=full`."""

    @property
    def what(self) -> str:
        """The choice as text."""
        return self.choice if isinstance(self.choice, str) else self.choice()


BY_WEIGHT = Row(
    optimizers_by_weight,
    "weights are updated in pieces, and other optimizers may need them whole",
    use="optim=adamw",
)
OF_SHARED_LOOP = Row("train.main", "it is part of the shared loop, which train.main replaces")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One ability of a run, by the choice that turns it on."""

    name: str = ""
    """Name of the feature's folder; filled in from there."""
    on: str = ""
    """Choice that turns the feature on (`config/table/choice.py`). Left out: the feature is part of each run and goes
    with everything."""
    is_in_each_run: bool = False
    """True if the ability is part of each run, also of runs that do not choose it: a user may ask for it while they
    run."""
    example: str = ""
    """Overrides that turn the feature on; the test of all pairs uses them."""
    off: str = ""
    """Overrides that turn the feature off; left out if these are the defaults of its keys."""
    needs: tuple[Row, ...] = ()
    """Choices that the feature needs; without them it is refused."""
    excludes: tuple[Row, ...] = ()
    """Choices with which the feature is refused. Each pair is declared once, at either of the two."""
    after: tuple[str, ...] = ()
    """Features whose ability comes before this one's, if the same hook of both changes the same thing."""
    before: tuple[str, ...] = ()
    """Features whose ability comes after this one's; they need not know it."""
    problems: Callable[[TrainConfig], Iterator[str]] = _no_rules
    """Rules of the feature's own values that no choice expresses; called if the feature is on."""
    problems_if_off: Callable[[TrainConfig], Iterator[str]] = _no_rules
    """Rules of values that are wrong although they leave the feature off; called if it is off."""
    fill: Callable[[TrainConfig, Memo], None] = _nothing
    """Fills in values that follow from those of the feature, in a configuration without problems and with the feature
    on.
    It works on copies of sections, once for points that share a section. It may read files, and raises ConfigError."""
    logs: tuple[str, ...] = ()
    """Metrics of steps that its ability adds (`Ability.logged`): checkpoint.keep_best may name them."""
    rank_half: str = ""
    """Module with `ABILITY`, the hooks of the feature in a run; filled in as the file of the folder's name in the
    folder, unless the feature names another. A domain names its own."""
    num_threads: int | None = None
    """Threads of each rank, if the feature depends on their number; None for as many as the rank has cores."""

    @property
    def without(self) -> str:
        """Overrides that turn the feature off."""
        from hpc_trainer.config.table.choice import defaults_of  # late: it needs all sections

        return self.off or defaults_of(self.on)

    def without_in(self, config: TrainConfig) -> str:
        """Return the overrides that turn off the alternatives of the feature that `config` has on."""
        from hpc_trainer.config.table.choice import defaults_of, held

        return self.off or defaults_of(held(config, self.on))

    def is_on(self, config: TrainConfig) -> bool:
        from hpc_trainer.config.table.choice import holds

        return not self.on or holds(config, self.on)
