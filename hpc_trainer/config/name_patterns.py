"""Names of weights by patterns with * and ?, as several keys have them; and what to say where none fits."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

_SHOWN = 5


def fits_any(name: str, patterns: Iterable[str]) -> bool:
    """True if one of `patterns` fits the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def there_are(pattern: str, names: Collection[str]) -> str:
    """A sentence of the `names` that a person may have meant by a pattern that fits none."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"Use '{pattern}.*' for all of it."
    near = difflib.get_close_matches(pattern.strip("*."), names, n=_SHOWN)
    whole = [f"{first}.*" if rest else first for first, _, rest in (name.partition(".") for name in names)]
    return f"There are {listed([*near, *dict.fromkeys(whole)])}."


def unfit(key: str, patterns: Iterable[str], names: Collection[str], what: str) -> Iterator[str]:
    """A line for each pattern of `key` that fits none of the `names`, which are those of `what`."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield f"{key} has {pattern!r}, and no {what} is called so. {there_are(pattern, names)}"


def listed(names: Collection[str]) -> str:
    """The first few, and how many there are more."""
    shown = list(names)[:_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def parents(names: Iterable[str]) -> list[str]:
    """Patterns for the modules that names belong to: `head.*` of `head.weight` and `head.bias`."""
    return list(dict.fromkeys(f"{owner}.*" if (owner := name.rpartition(".")[0]) else name for name in names))
