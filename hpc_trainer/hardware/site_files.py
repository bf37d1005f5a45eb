"""Files of `hardware discover`: their text, and the rule for a file that exists already."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_DAY_KEYS = ("source", "checked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """File that `hardware discover` writes: `values` has its keys in order, `comments` the facts without a key."""

    group: str
    """hardware or cluster."""
    name: str
    """Choice of the group: its file below the group's folder, without the ending."""
    values: Mapping[str, Any]
    comments: tuple[str, ...]
    cluster: str | None = None
    """Choice of `cluster` that a hardware file makes."""

    @property
    def text(self) -> str:
        """Content of the file."""
        lines = [f"# {comment}" for comment in self.comments]
        if self.cluster is not None:
            lines += ["defaults:", f"  - override /cluster@_global_.cluster: {self.cluster}"]
        return "".join(f"{line}\n" for line in (*lines, *_yaml_lines(self.values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Outcome for one file: new, same, differs (not written) or overwritten."""

    path: Path
    action: str
    difference: tuple[str, ...] = field(default=())
    """Lines of the difference between the file and what was discovered; none for a new file."""


def write_files(folder: Path, files: Iterable[Proposal], *, force: bool, dry_run: bool) -> list[Written]:
    """Write the files below `folder`; a file with other figures stays unless `force` is true.

    A file whose keys have the same values, apart from the day, stays as it is, with its own comments.
    """
    done = []
    for file in files:
        path = folder / file.group / f"{file.name}.yaml"
        try:
            old: str | None = path.read_text()
        except FileNotFoundError:
            old = None
        if old is not None and _figures(old) == _figures(file.text):
            done.append(Written(path=path, action="same"))
            continue
        lines = () if old is None else tuple(_difference(old, file.text))
        action = "new" if old is None else "overwritten" if force else "differs"
        if action != "differs" and not dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
        done.append(Written(path=path, action=action, difference=lines))
    return done


def _figures(text: str) -> Any:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return _without_day(values)


def _without_day(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_day(item) for key, item in value.items() if key not in _DAY_KEYS}


def _difference(old: str, new: str) -> Iterator[str]:
    def keys(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.lstrip().startswith(("#", *_DAY_KEYS))]

    lines = list(difflib.unified_diff(keys(old), keys(new), "file", "Slurm", lineterm="", n=0))
    return (line for line in lines[2:] if not line.startswith("@@"))


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*")
_WORDS_OF_YAML = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def _yaml_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a mapping as lines of YAML; a list of mappings has a line for each."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{key}:"
            yield from (f"  {line}" for line in _yaml_lines(value))
        elif isinstance(value, list):
            yield f"{key}:"
            for item in value:
                pairs = ", ".join(f"{name}: {_scalar(own)}" for name, own in item.items())
                yield f"  - {{{pairs}}}"
        else:
            yield f"{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """Return a value as YAML; text that a reader of YAML could take for something else is quoted."""
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if isinstance(value, bool) else str(value)
