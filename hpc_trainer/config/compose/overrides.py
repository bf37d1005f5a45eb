"""Overrides as lines of text: parsed once for a whole grid, written from values, and added from the user's defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString, ValueType

from hpc_trainer.config.compose.own_files import own_defaults, read_user_config
from hpc_trainer.config.load import ROOT_KEYS
from hpc_trainer.config.store import declared_at
from hpc_trainer.errors import ConfigError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_KEY = re.compile(rf"{_NAME}(\.{_NAME})*\Z")
# Fast path for the commonest overrides, KEY=NUMBER and KEY=TEXT. Hydra's parser (ANTLR) takes 190 µs for
# one, this 2 µs; everything else is left to it. `test_overrides.py` compares the two.
_INT = r"-?(?:0|[1-9][0-9]{0,17})"
_FLOAT = r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17}(?:[eE][+-]?[0-9]{1,3})?|[eE][+-]?[0-9]{1,3})"
_WORD = r"[A-Za-z_][A-Za-z0-9_-]*"
_COMMON = re.compile(rf"({_NAME}(?:\.{_NAME})*)=(?:({_INT})|({_FLOAT})|({_WORD}))\Z")
_NAMED = re.compile(rf"\$\{{({_NAME})(?:\.{_NAME})*\}}")
_NO_WORDS = frozenset({"null", "true", "false", "inf", "nan"})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Line:
    """One override. Equal lines are the same object, so that tuples of them are cheap keys."""

    text: str
    override: Override
    is_group: bool
    section: str
    """First part of the key: a section, or a key of the root."""
    field: str
    """Second part of the key; "" for `section=...` and keys of the root."""
    is_scalar: bool
    """True for `section.field=VALUE` or `key=VALUE` with a number, a text, a boolean or null: one leaf is set."""
    is_local: bool
    """True if the override changes nothing outside its section."""
    follows: frozenset[str]
    """Keys of the root that the override's value names by interpolation."""
    is_swappable: bool
    """True for `group=choice` and nothing more."""


class UnusualOverrideError(Exception):
    """Error for an override that is left to Hydra: a sweep, or one of Hydra's own section."""


def read_line(
    text: str, parse: Callable[[Sequence[str]], Sequence[Override]], is_group_name: Callable[[str], bool]
) -> Line:
    """Parse one override, by Hydra's grammar (`parse`) and Hydra's rule for groups.

    Raises:
        UnusualOverrideError: the override is left to Hydra.
    """
    override = parse_common(text) or parse([text])[0]
    key = override.key_or_group
    if override.is_sweep_override() or override.is_hydra_override() or re.match(r"hydra\b", key):
        raise UnusualOverrideError(text)
    value = override.value()
    # The same rule as Hydra's: a mapping is always a value, also under the name of a group.
    is_group = is_group_name(key) and not isinstance(value, dict)
    section, _, rest = key.partition(".")
    is_change = override.type is OverrideType.CHANGE and override.package is None
    # Read from the value, not from the text: Hydra's own sweeps write ${x} as $\{x\}, which parses to ${x} again.
    is_plain_value = not isinstance(value, (dict, list)) and "???" not in str(value)
    follows = named_in(value)
    is_local = bool(_KEY.match(key)) and override.package is None
    if is_local and not rest:
        is_local = is_change and (isinstance(value, dict) or is_plain_value)
    return Line(
        text=text,
        override=override,
        is_group=is_group,
        section=section,
        field=rest.partition(".")[0],
        is_scalar=is_local and is_change and is_plain_value and "." not in rest and not follows,
        is_local=is_local,
        follows=follows,
        is_swappable=is_group and is_change and isinstance(value, str) and bool(_KEY.match(key)),
    )


def named_in(value: object) -> frozenset[str]:
    """Return the root keys that a value's interpolations name; all keys if one is more than the name of a key."""
    text = str(value)
    names = _NAMED.findall(text)
    return frozenset(names) if len(names) == text.count("${") else frozenset(ROOT_KEYS)


def parse_common(text: str) -> Override | None:
    """Parse KEY=NUMBER or KEY=TEXT as Hydra's parser does; return None for everything else."""
    match = _COMMON.match(text)
    if match is None:
        return None
    key, whole, real, word = match.groups()
    if word is not None and word.lower() in _NO_WORDS:
        return None
    value: int | float | str = int(whole) if whole is not None else float(real) if real is not None else word
    return Override(
        type=OverrideType.CHANGE, key_or_group=key, value_type=ValueType.ELEMENT, _value=value, input_line=text
    )


_EXECUTOR = "cluster.executor"


def _named(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~").split("@")[0]


_SHORT = re.compile(r"init_from=(?!\s*\{)")
_AFTER = re.compile(r"after(?:\.runs)?=\s*((?!\{).*)")
_SEARCH = re.compile(r"search=(?!\s*\{)")
# A file of axes describes a grid; `sweep` is the name that the group and its section have in files (decision 0060).
_GRID = re.compile(r"([+~]*)grid(?=[.=])")


# Hydra would take the text in braces for a mapping.
_OF_RUN = re.compile(r"([+]*train\.command_dir=)(\{run\.[^'\"]*)")


def in_full(override: str) -> str:
    """Return an override as Hydra takes it.

    `grid=NAME` becomes `sweep=NAME`, `init_from=PATH` becomes `init_from.path=PATH`, `search=NAME` becomes
    `search.sampler=NAME`, `search.from=SWEEP` becomes `search.from_sweep=SWEEP`, `after=A,B` becomes
    `after.runs=[A,B]`, which is not an axis, and a `{run.dir}` gets quotes.
    """
    if (match := _GRID.match(override)) is not None:
        return f"{match[1]}sweep{override[match.end() :]}"
    if (match := _OF_RUN.fullmatch(override)) is not None:
        return f"{match[1]}'{match[2]}'"
    if (match := _AFTER.fullmatch(override)) is not None:
        names = [name.strip(" '\"") for name in match[1].strip("[]").split(",")]
        return f"after.runs={override_value([name for name in names if name not in ('', 'null')])}"
    if _SEARCH.match(override):
        return _SEARCH.sub("search.sampler=", override, count=1)
    if override.startswith("search.from="):  # `from` cannot be the name of a field
        return override.replace("search.from=", "search.from_sweep=", 1)
    return _SHORT.sub("init_from.path=", override, count=1) if _SHORT.match(override) else override


def default_overrides(given: Iterable[str]) -> Iterator[str]:
    """Yield the overrides before the command line: the user's own defaults, without keys that the command line gives.

    Raises:
        ConfigError: a file of defaults cannot be read.
    """
    named = {_named(override) for override in given}
    own = own_defaults()
    for key, value in own.items():
        is_overruled = key == "paths.runs_dir" and "HPC_TRAINER_RUNS" in os.environ
        if key not in named and not is_overruled:
            yield f"{'++' if _is_of_a_mapping(key) else ''}{key}={override_value(value)}"


def _is_of_a_mapping(key: str) -> bool:
    """Return True for a user's own name, such as `cluster.env.NCCL_DEBUG`: Hydra must be told that it may be new."""
    declared = declared_at(key)
    return declared is not None and declared.section is None and declared.name != key


def overrides_for_here(given: Sequence[str], verb: str) -> list[str]:
    """Return `given` with the overrides for a verb that starts its ranks on this machine.

    Everything that `cluster=` sets holds, except the executor. Without a `cluster=` on the command line or in the
    user's own file it is `cluster=local`, even if sbatch is on PATH.

    Raises:
        ConfigError: `given` names another executor; or the user's own file cannot be read.
    """
    for line in given:
        if line.lstrip("+").startswith(f"{_EXECUTOR}=") and line.partition("=")[2] != "local":
            raise ConfigError(f"{line}: {verb} runs on this machine. Leave it out, or use hpc-trainer submit.")
    is_chosen = any(_named(line) == "cluster" for line in given) or "cluster" in read_user_config()
    return [*given, *([] if is_chosen else ["cluster=local"]), f"{_EXECUTOR}=local"]


def override_value(value: Any) -> str:
    """Return `value` in Hydra's override grammar, quoted so that it stays one value of its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, list):
        return "[" + ",".join(override_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_value(item)}" for key, item in value.items()) + "}"
    # The grammar halves only backslashes before a quote; Hydra's own writer takes care of that.
    return str(QuotedString(text=str(value), quote=Quote.single).with_quotes())
