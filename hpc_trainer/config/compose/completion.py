"""Completion of a command line without composing: choices of groups, keys, values.

This module reads names of files and our own schemas. It imports neither Hydra nor OmegaConf, which take longer than a
user waits.
"""

from __future__ import annotations

import enum
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.own_files import conf_dir
from hpc_trainer.config.schema.key import Declared
from hpc_trainer.config.store import ALL_KEYS, DECLARED, VARIANTS

# Every shell takes such a text as one word: a completion script may evaluate it.
_PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")


def choices_in(group: str, folders: Iterable[Path]) -> list[str]:
    """Return the choices of a group in these folders of configurations, sorted; in a subfolder they are `SITE/NAME`."""
    places = {folder / group for folder in folders}
    files = ((path, path.relative_to(place)) for place in places for path in place.rglob("*.yaml") if path.is_file())
    names = {path.with_suffix("").as_posix() for _, path in files}
    return sorted(name for name in names if not name.startswith(".") and "/." not in name)


def overrides_like(word: str, others: Sequence[str], config_dirs: Iterable[Path]) -> list[str]:
    """Return the completions of `word`, an override that is being typed; all begin with it.

    If only one key is left, its values come with it: then a shell adds no blank after `key=`.

    Args:
        word: the text typed so far.
        others: the other overrides of the command: after `model=gpt` the keys of `model` are those of gpt.
        config_dirs: folders of the user's own configurations.
    """
    folders = [conf_dir(), *config_dirs]
    key, equals, value = word.partition("=")
    if equals:
        return _with_values(key, value, others, folders)
    completions = [text for text in _keys_beside(key, others) if text.startswith(key)]
    while len(completions) == 1 and completions[0].endswith("."):
        completions = list(_keys_beside(completions[0], others))
    if len(completions) == 1:
        completions += _with_values(completions[0][:-1], "", others, folders)
    return completions


def _groups() -> list[str]:
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def _keys_beside(word: str, others: Sequence[str]) -> Iterator[str]:
    """Yield `group=`, `key=`, and `section.` for a section, at the level of the configuration that `word` is in."""
    section, dot, _ = word.rpartition(".")
    if not dot:
        yield from (f"{group}=" for group in _groups())
    for name, declared in DECLARED.items():
        if name.rpartition(".")[0] == section and _variants(name, others):
            yield f"{name}=" if declared.section is None else f"{name}."


def _variants(key: str, others: Sequence[str]) -> list[Declared]:
    """Return the key in each variant of its section, or only in the chosen variant; [] if that has no such key."""
    section = key.rpartition(".")[0]
    kinds: Mapping[str, Any] = VARIANTS.get(section, {})
    if not kinds:
        return [DECLARED[key]]
    chosen = next((line.partition("=")[2] for line in others if line.partition("=")[0] == section), "")
    fitting = [kind for name, kind in kinds.items() if chosen.startswith(name)] or [*kinds.values()]  # resnet18
    return [declared for declared in ALL_KEYS if declared.name == key and declared.kind in fitting]


def _with_values(key: str, value: str, others: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return `key=value` for each value; after `a,` the values not yet taken."""
    before, comma, part = value.rpartition(",")
    taken = before.split(",")
    if key in _groups():
        values = choices_in(key, folders)
    elif key in DECLARED and DECLARED[key].section is None:
        values = [value for declared in _variants(key, others) for value in _values(declared)]
    else:
        values = []
    plain = (text for text in dict.fromkeys(values) if _PLAIN.fullmatch(text) and text not in taken)
    return [f"{key}={before}{comma}{text}" for text in plain if text.startswith(part)]


def _values(key: Declared) -> list[str]:
    """Return the legal values of a key if they are few, else its default."""
    kind: Any = type(key.default)
    if key.default is None:
        hint = typing.get_type_hints(key.kind)[key.field.name]
        kind = next((member for member in typing.get_args(hint) if member is not type(None)), kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(member.value) for member in kind]
    if kind is bool:
        return ["true", "false"]
    return ["null" if key.default is None else str(key.default)]
