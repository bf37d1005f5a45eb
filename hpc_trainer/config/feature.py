"""What a feature declares of itself: when it is on, what it needs, what it does not go with and why. Data; no torch.

Each folder of `hpc_trainer/features/` declares one `FEATURE`. Refusals at plan time, the matrix in the docs and the
test that walks all pairs come from these declarations. Configurations lie below features, so they are found by name:
this is the one place that does.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpc_trainer.config.choice import holds, state
from hpc_trainer.config.schema.train import TrainConfig

PACKAGE = "hpc_trainer.features"


def _no_rules(config: TrainConfig) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table of what goes with what: a choice, and the reason in a clause without a full stop."""

    what: str
    """As in `config/choice.py`."""
    why: str
    use: str = ""
    """What to type instead, where that is not what turns one of the two off: `train.recompute=full`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One ability of a run, by the choice that turns it on."""

    name: str
    """That of its folder."""
    on: str
    """A choice (`config/choice.py`)."""
    off: str
    """What one types to be without it."""
    example: str
    """What one types for it, in the docs and in the test of all pairs."""
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
    num_threads: int | None = None
    """Threads of each rank, where it counts on a number; None: as many as it has cores."""
    has_ability: bool = True
    """False of one that the core carries out from its keys alone."""

    def is_on(self, config: TrainConfig) -> bool:
        return holds(config, self.on)


@functools.cache
def features() -> tuple[Feature, ...]:
    """Every feature, by name. Imports no torch."""
    package = importlib.import_module(PACKAGE)
    names = sorted(each.name for each in pkgutil.iter_modules(package.__path__) if each.ispkg)
    found = [importlib.import_module(f"{PACKAGE}.{name}") for name in names]
    return tuple(each.FEATURE for each in found if hasattr(each, "FEATURE"))  # the memory estimate is nobody's choice


def num_threads(config: TrainConfig) -> int:
    """Of each rank: they decide the order of sums."""
    wanted = (each.num_threads for each in features() if each.is_on(config))
    return next((each for each in wanted if each is not None), config.hardware.cpus_per_rank)


def feature_problems(config: TrainConfig) -> Iterator[str]:
    """What features break by themselves and beside what else is chosen, a line each."""
    off = {each.on: each.off for each in features()}
    for feature in features():
        yield from feature.problems(config)
        if not feature.is_on(config):
            continue
        named = state(config, feature.on)
        for row in feature.needs:
            if not holds(config, row.what):
                use = row.use or row.what.partition("|")[0].replace(" & ", " ")
                here = state(config, row.what)
                yield f"{named} needs {row.what}, and this is {here}: {row.why}. Use {use}, or {feature.off}."
        for row in feature.excludes:
            if holds(config, row.what):
                use = row.use or off.get(row.what, "")
                ways = ", or ".join(each for each in (use, feature.off) if each)
                yield f"{named} does not go with {state(config, row.what)}: {row.why}. Use {ways}."
