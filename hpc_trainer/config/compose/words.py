"""The words that a command line may have, found without composing: choices of groups, keys, values. For completion.

Reads names of files and our own schemas. Imports neither Hydra nor OmegaConf, which take longer than a person waits.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.keys import DECLARED, Declared
from hpc_trainer.config.store import VARIANTS

# What every shell takes as one word: a script of completion may evaluate it.
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]+")


def conf_dir() -> Path:
    """The shipped `conf/`: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[2]
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.parent / "conf"


def choices_in(group: str, folders: Iterable[Path]) -> list[str]:
    """The choices of a group that these folders of configurations have, sorted."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml") if path.is_file()})


def overrides_like(word: str, said: Sequence[str], config_dirs: Iterable[Path]) -> list[str]:
    """What `word`, an override that is being typed, may become; all begin with it.

    Where only one key is left, its values come with it: then a shell adds no blank after `key=`.

    Args:
        said: the overrides beside it: after `model=gpt` the keys of `model` are those of gpt.
        config_dirs: folders of the person's own configurations.
    """
    folders = [conf_dir(), *config_dirs]
    key, equals, value = word.partition("=")
    if equals:
        return _with_values(key, value, said, folders)
    found = [each for each in _keys_beside(key, said) if each.startswith(key)]
    while len(found) == 1 and found[0].endswith("."):
        found = list(_keys_beside(found[0], said))
    if len(found) == 1:
        found += _with_values(found[0][:-1], "", said, folders)
    return found


def _groups() -> list[str]:
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def _keys_beside(word: str, said: Sequence[str]) -> Iterator[str]:
    """`group=`, `key=`, and `section.` where there is more below, of the section that `word` is in."""
    section, dot, _ = word.rpartition(".")
    if not dot:
        yield from (f"{group}=" for group in _groups())
    for name, each in DECLARED.items():
        if name.rpartition(".")[0] == section and _variants(name, said):
            yield f"{name}=" if each.section is None else f"{name}."


def _variants(key: str, said: Sequence[str]) -> list[Declared]:
    """The key as each variant of its section has it; only the chosen one's, if one is. [] if that has no such key."""
    section, _, name = key.rpartition(".")
    kinds: Mapping[str, Any] = VARIANTS.get(section, {})
    if not kinds:
        return [DECLARED[key]]
    chosen = next((line.partition("=")[2] for line in said if line.partition("=")[0] == section), "")
    fitting = [kind for each, kind in kinds.items() if chosen.startswith(each)] or kinds.values()  # resnet, resnet18
    found = [(kind, field) for kind in fitting for field in dataclasses.fields(kind) if field.name == name]
    return [DECLARED[key]._replace(kind=kind, field=field) for kind, field in found]


def _with_values(key: str, value: str, said: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """`key=value` for each value; after `a,` the others."""
    before, comma, part = value.rpartition(",")
    taken = before.split(",")
    if key in _groups():
        values = choices_in(key, folders)
    elif key in DECLARED and DECLARED[key].section is None:
        values = [value for each in _variants(key, said) for value in _values(each)]
    else:
        values = []
    plain = (each for each in dict.fromkeys(values) if _PLAIN.fullmatch(each) and each not in taken)
    return [f"{key}={before}{comma}{each}" for each in plain if each.startswith(part)]


def _values(key: Declared) -> list[str]:
    """The legal values of a key where they are few, else its default."""
    kind: Any = type(key.default)
    if key.default is None:
        hint = typing.get_type_hints(key.kind)[key.field.name]
        kind = next((each for each in typing.get_args(hint) if each is not type(None)), kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(each.value) for each in kind]
    if kind is bool:
        return ["true", "false"]
    return ["null" if key.default is None else str(key.default)]
