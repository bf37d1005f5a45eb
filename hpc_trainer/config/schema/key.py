"""Metadata of a configuration key, declared once with its field.

    gamma: float = key(0.1, only_with("schedule.name=step"), ONCE_SET, SCHEDULE, in_graph=False, limits="(0, 1]")

The field of a section declares what all its keys have in common (`section`). `config/store.py` reads all of it.

Features declare their keys in their own folders. The section where users type such a key has one line for it:

    @dataclass(kw_only=True, slots=True)
    @with_feature_keys
    class ParallelConfig:
        zero1: bool = of_feature("zero1")

The line is all that the configuration knows of a feature: it gives the key its place and its type for type checkers.
Default, limits, metadata and docstring of the key are in the class `Keys` of the feature's folder,
`hpc_trainer/features/zero1/__init__.py`. That file is imported here while sections are still being made, so it imports
no section at run time (tests/policy/test_core.py).
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import importlib
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

_KEY = "key"

# Sections that say where a run works and what it reports; they do not distinguish runs.
PASSED_OVER = frozenset((
    "experiment_name", "sweep_name", "cluster", "monitor", "tracker", "local", "paths", "snapshot", "sweep", "budget",
    "pool", "trust", "notify",
))  # fmt: skip


class Identity(enum.Enum):
    """Effect of another value on the run's identity: whether it makes another run."""

    counts = "yes"
    once_set = "once set"
    """Another run, unless the value is the default: a key that came later is left out of the id at its default, so that
    earlier runs keep their ids. Such a default must never change, or earlier runs would count as runs with the new
    one."""
    apart = "no"


class Effect(str, enum.Enum):
    """Effect of another value on a training that resumes from a checkpoint."""

    safe = "safe"
    schedule = "changes-the-schedule"
    incompatible = "incompatible"


ALWAYS: tuple[str, ...] | None = ()
"""Needs of a key that has an effect whatever else is chosen."""
RULED: tuple[str, ...] | None = None
"""Needs of a key for which `only_with` cannot say when it has an effect. A row of the table of combinations refuses it
elsewhere (`config/table/declarations.py`), or a rule of its section's values."""
COUNTS, ONCE_SET, APART = Identity.counts, Identity.once_set, Identity.apart
SAFE, SCHEDULE, INCOMPATIBLE = Effect.safe, Effect.schedule, Effect.incompatible


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Metadata of a key. A field that is None has the value that the key's section declares."""

    needs: tuple[str, ...] | None
    identity: Identity | None
    resume: Effect | None
    in_graph: bool | None
    limits: str | None = None


def only_with(*needs: str) -> tuple[str, ...]:
    """Declare that a key changes nothing unless one of `needs` holds.

    Without any of them, another value than the default is refused (config/rules/declared_rules.py): the same training
    would count as another run.

    Args:
        needs: `section.key=value`, or `section.key` for any value but its default.
    """
    return needs


def key(
    default: Any, needs: tuple[str, ...] | None, identity: Identity | None = None, resume: Effect | None = None, *,
    in_graph: bool | None = None, limits: str | None = None,
) -> Any:  # fmt: skip
    """Declare a field with its metadata; omitted metadata is that of the section.

    Args:
        default: value of the field if it is not set; lists and mappings are copied.
        needs: `ALWAYS`, `RULED` or `only_with(...)`.
        identity: effect of another value on the run's identity.
        resume: effect of another value on a training that resumes from a checkpoint.
        in_graph: True if another value may be another compiled graph (`train.compile`).
        limits: legal values of a number: `≥ 1` or `(0, 1]`; others are refused (config/rules/declared_rules.py).
    """
    metadata = {_KEY: Key(needs=needs, identity=identity, resume=resume, in_graph=in_graph, limits=limits)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=functools.partial(copy.copy, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(
    kind: type, identity: Identity | None = None, resume: Effect | None = None, *, in_graph: bool | None = None
) -> Any:
    """Declare a field that holds a dataclass, with the metadata of all its keys, those of other versions too."""
    own = Key(needs=ALWAYS, identity=identity, resume=resume, in_graph=in_graph)
    return dataclasses.field(default_factory=kind, metadata={_KEY: own})


def declared(kind: Any, name: str) -> Key | None:
    """Return the metadata of a field of `kind`; if `kind` only replaces its default, that of the base class."""
    for base in kind.__mro__:
        entry = getattr(base, "__dataclass_fields__", {}).get(name)
        if entry is not None and _KEY in entry.metadata:
            own: Key = entry.metadata[_KEY]
            return own
    return None


class Declared(NamedTuple):
    """Field of a schema, with its metadata and its place among the sections."""

    name: str
    """Dotted name, as a user types it."""
    kind: Any
    """Dataclass that declares the field."""
    field: dataclasses.Field[Any]
    key: Key
    """Metadata; values that the field leaves open are those of its section."""

    section: Any
    """Dataclass that the field holds; None for a key."""
    default: Any
    """Default value, which must not be changed."""


def declared_keys(
    kind: Any, prefix: str = "", above: Key | None = None, variants: Mapping[str, Mapping[str, Any]] = {}
) -> list[Declared]:
    """Return the sections and keys of a dataclass, a section before its keys.

    Args:
        kind: the dataclass.
        prefix: text before the name of each field, such as `optim.`.
        above: metadata of the section that the dataclass is; its keys have them too.
        variants: dataclasses of the sections that have several; the keys of all of them are returned.

    Raises:
        TypeError: a field is declared without `key(...)` or `section(...)`.
    """
    keys: list[Declared] = []
    for field in dataclasses.fields(kind):
        own = declared(kind, field.name)
        if own is None:
            raise TypeError(
                f"{kind.__name__}.{field.name} must say what depends on it. Declare it with key(...) (schema/key.py)."
            )
        name, metadata = f"{prefix}{field.name}", _filled_in(own, above)
        make: Any = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        section = make if dataclasses.is_dataclass(make) else None
        keys.append(Declared(name, kind, field, metadata, section, default))
        if section is not None:
            for inner in variants.get(field.name, {}).values() or (section,):
                keys += declared_keys(inner, f"{name}.", metadata)
    return keys


def _filled_in(own: Key, above: Key | None) -> Key:
    """Return the metadata of a key; values that it leaves open are those of its section."""
    if above is None:
        return own
    return dataclasses.replace(
        own,
        identity=own.identity or above.identity,
        resume=own.resume or above.resume,
        in_graph=above.in_graph if own.in_graph is None else own.in_graph,
    )


FEATURES = "hpc_trainer.features"
T = TypeVar("T")


class _OfFeature(NamedTuple):
    """Placeholder of a feature's key until the key's section takes the key over."""

    feature: str


def of_feature(feature: str) -> Any:
    """Declare a field of a section as the key of that name that a feature declares."""
    return _OfFeature(feature)


def keys_class(feature: str) -> Any:
    """Return the class `Keys` of a feature, without torch."""
    return importlib.import_module(f"{FEATURES}.{feature}").Keys


def with_feature_keys(section: type[T]) -> type[T]:
    """Replace each field made by `of_feature` by the key that the feature declares. Write it below `@dataclass`.

    Raises:
        KeyError: the feature declares no such key.
    """
    for name, place in list(vars(section).items()):
        if isinstance(place, _OfFeature):
            keys = keys_class(place.feature)
            setattr(section, name, vars(keys)[name])
            section.__annotations__[name] = typing.get_type_hints(keys)[name]
    return section


# Keys that hold secrets.

_OF_KEYS = (
    "api", "access", "private", "secret", "wandb", "hf", "openai", "anthropic", "ssh", "signing", "encryption", "aws",
    "azure", "comet", "service", "account", "client",
)  # fmt: skip
SECRET_NAME_ENDS = (
    "token", "secret", "passwd", "password", "passphrase", "pwd", "credential", "credentials", "auth",
    *(f"{owner}{sign}key" for owner in _OF_KEYS for sign in ("", "_")),
)  # fmt: skip
"""Ends of names that hold a secret; `num_tokens`, `tokenizer`, `token_dim` and `image_key` do not match. Case is
ignored, and `_` also stands for a point and a hyphen."""
_SECRET_NAME = re.compile(rf"(?:.*[^A-Za-z])?(?:{'|'.join(SECRET_NAME_ENDS).replace('_', '[_.-]')})", re.IGNORECASE)
# A value of this form is a secret under any name, such as tokens of Hugging Face, GitHub, GitLab, OpenAI and AWS.
_SECRET_VALUE = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|AKIA|ASIA)[\w-]{16,}")
# A number, a truth value and a path are no secrets, as in `redaction`: `max_token=16`.
_NO_SECRET = re.compile(r"|[-+]?[\d.]+(?:e[-+]?\d+)?|true|false|null|none|yes|no|\.?/.*|~/.*", re.IGNORECASE)
REDACTED = "[redacted]"
"""Text in place of a secret wherever something is shown, recorded or sent."""


def is_secret_value(name: str, value: object) -> bool:
    """Return True if a value must not be shown: its key is named like a secret, or its text looks like one.

    Names of runs are names of folders and jobs, and appear in command lines that every user of a node can list.
    """
    if not isinstance(value, str) or _NO_SECRET.fullmatch(value):
        return False
    return _SECRET_NAME.fullmatch(name) is not None or _SECRET_VALUE.search(value) is not None


def without_secrets(name: str, value: Any) -> Any:
    """Return the value of a key, a tree of JSON, with REDACTED in place of each secret (`is_secret_value`)."""
    if isinstance(value, Mapping):
        return {key: without_secrets(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(name, item) for item in value]
    return REDACTED if is_secret_value(name, value) else value
