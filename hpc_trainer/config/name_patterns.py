"""Patterns with * and ? for weight names, as several keys have them, and messages for patterns that match nothing."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

_SHOWN = 5


def fits_any(name: str, patterns: Iterable[str]) -> bool:
    """Return True if one of `patterns` matches the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def there_are(pattern: str, names: Collection[str]) -> str:
    """Return a sentence with the `names` that a user may have meant by a pattern that matches none."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"Use '{pattern}.*' for all of it."
    near = difflib.get_close_matches(pattern.strip("*."), names, n=_SHOWN)
    whole = [f"{first}.*" if rest else first for first, _, rest in (name.partition(".") for name in names)]
    return f"There are {listed([*near, *dict.fromkeys(whole)])}."


def unfit(key: str, patterns: Iterable[str], names: Collection[str], what: str) -> Iterator[str]:
    """Yield a line for each pattern of `key` that matches none of the `names`; `what` is the noun for one of them."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield f"{key} has {pattern!r}, and no {what} has that name. {there_are(pattern, names)}"


def listed(names: Collection[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = list(names)[:_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def parents(names: Iterable[str]) -> list[str]:
    """Return patterns for the modules that names belong to: `head.*` for `head.weight` and `head.bias`."""
    return list(dict.fromkeys(f"{owner}.*" if (owner := name.rpartition(".")[0]) else name for name in names))
