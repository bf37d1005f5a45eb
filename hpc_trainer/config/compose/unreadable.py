"""Messages for a user whose overrides Hydra's grammar does not accept."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from hydra.errors import OverrideParseException

from hpc_trainer.config.compose.wrong_value import as_sweep

_OPEN = (",", "=", "(", "[", "{", ":")
_GOES_ON = (",", "=", ")", "]", "}", ":")
_LONGEST = 200
_KEY = re.compile(r"[+~]*[A-Za-z_][\w.@/]*=")
_FORM = "An override reads KEY=VALUE, as optim.lr=1e-3; a value with spaces is put in quotes."


def unreadable(overrides: Sequence[str], error: Exception) -> str:
    """Return the message about the wrong override; if a space split one override, how to type it."""
    if not isinstance(error, OverrideParseException) or error.override not in overrides:
        return f"{_said(error)}. {_FORM}"
    parts = _parted(overrides, list(overrides).index(error.override))
    if len(parts) > 1:
        return (
            f"{' '.join(parts)}: a space begins a new word, and these {len(parts)} are one override. Write "
            f"{shlex.quote(''.join(parts))} without the space."
        )
    key, _, value = error.override.partition("=")
    sweep = as_sweep(value)
    if key and sweep is not None:
        return (
            f"{error.override}: several values are parted by single commas, without brackets or spaces. "
            f"Use {key}={sweep}."
        )
    return f"{error.override}: Hydra's grammar of overrides does not read this: {_said(error)}. {_FORM}"


def _said(error: Exception) -> str:
    """Return the first line of Hydra's message that says more than that there is an error."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Error parsing override")]
    said = lines[0].replace("LexerNoViableAltException: ", "no key and value in ") if lines else "it has no form"
    return said[:_LONGEST].rstrip(".")


def _parted(words: Sequence[str], index: int) -> Sequence[str]:
    """Return the words around `index` that a space split from one override: `a=1,` `2`, or `a` `=1`."""
    first, last = index, index
    while first > 0 and _is_one(words[first - 1], words[first]):
        first -= 1
    while last + 1 < len(words) and _is_one(words[last], words[last + 1]):
        last += 1
    return words[first : last + 1]


def _is_one(left: str, right: str) -> bool:
    is_next = _KEY.match(right) is not None  # a comma too many before another override
    return (left.endswith(_OPEN) and not is_next) or right.startswith(_GOES_ON)
