"""What hangs on a key, said once, where the key is declared:

    gamma: float = key(0.1, only_with("schedule.name=step"), ONCE_SET, SCHEDULE, in_graph=False, limits="(0, 1]")

What all keys of a section have in common its own declaration says (`section`). `config/keys.py` reads all of it.
"""

from __future__ import annotations

import copy
import enum
import functools
from dataclasses import dataclass, field
from typing import Any

_KEY = "key"


class Identity(enum.Enum):
    """Whether another value makes another run."""

    counts = "yes"
    once_set = "once set"
    """Yes, but at its default a key that came later is left out: runs of before keep their ids. So that default stays:
    they would count as runs of another one."""
    apart = "no"


class Effect(str, enum.Enum):
    """What another value does to a training that goes on from a checkpoint."""

    safe = "safe"
    schedule = "changes-the-schedule"
    incompatible = "incompatible"


ALWAYS: tuple[str, ...] | None = ()
"""The key has an effect whatever else is chosen."""
RULED: tuple[str, ...] | None = None
"""When it has one is more than `only_with` can say: a row of the table of what goes with what refuses it elsewhere
(`config/table/declarations.py`), or a rule of its section's values."""
COUNTS, ONCE_SET, APART = Identity.counts, Identity.once_set, Identity.apart
SAFE, SCHEDULE, INCOMPATIBLE = Effect.safe, Effect.schedule, Effect.incompatible


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is declared of a key; None: as its section says."""

    needs: tuple[str, ...] | None
    identity: Identity | None
    resume: Effect | None
    in_graph: bool | None
    limits: str | None = None


def only_with(*needs: str) -> tuple[str, ...]:
    """Of a key that changes nothing unless one of `needs` holds; another value than its default is refused then
    (`config/rules/effect_rules.py`): the same training would count as another run.

    Args:
        needs: `section.key=value`, or `section.key` where any value but its default will do.
    """
    return needs


def key(
    default: Any, needs: tuple[str, ...] | None, identity: Identity | None = None, resume: Effect | None = None, *,
    in_graph: bool | None = None, limits: str | None = None,
) -> Any:  # fmt: skip
    """A field with its metadata. What is left out is as the section says.

    Args:
        needs: `ALWAYS`, `RULED` or `only_with(...)`.
        in_graph: another value may be another compiled graph (`train.compile`).
        limits: the legal values of a number, as `≥ 1` or `(0, 1]`; others are refused (`config/rules/limit_rules.py`).
    """
    said = {_KEY: Key(needs=needs, identity=identity, resume=resume, in_graph=in_graph, limits=limits)}
    if isinstance(default, (list, dict)):
        return field(default_factory=functools.partial(copy.copy, default), metadata=said)
    return field(default=default, metadata=said)


def section(
    kind: type, identity: Identity | None = None, resume: Effect | None = None, *, in_graph: bool | None = None
) -> Any:
    """A field that holds a dataclass, and what all its keys have in common, those of other versions too."""
    said = Key(needs=ALWAYS, identity=identity, resume=resume, in_graph=in_graph)
    return field(default_factory=kind, metadata={_KEY: said})


def declared(kind: Any, name: str) -> Key | None:
    """What is declared of a field: by the class, or, where that only gives another default, by one that it is of."""
    for each in kind.__mro__:
        found = getattr(each, "__dataclass_fields__", {}).get(name)
        if found is not None and _KEY in found.metadata:
            said: Key = found.metadata[_KEY]
            return said
    return None
