"""Control characters in what we print: made visible, so that no text of a file, a program or Slurm steers a terminal.

An exception's message, a log line, a metric's name may hold escape sequences: they move the cursor over what was said,
change the window's title, or make some terminals type. Also in a pipe: `| less -R` is a terminal too. Lines and tabs
stay, and of a log its colours.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from hpc_trainer.errors import visible

_COLOUR = re.compile("(\x1b\\[[0-9;:]{0,60}m)")
_NO_COLOUR = "\x1b[0m"


def one_line(text: str) -> str:
    """As `visible`, for a cell of a table: line feeds and tabs too."""
    return text if text.isprintable() else visible(text).replace("\n", "\\n").replace("\t", "\\t")


def visible_log_line(line: str) -> str:
    """As `visible`, but colours and bold stay, and end with the line."""
    if "\x1b[" not in line:
        return visible(line)
    parts = _COLOUR.split(line)
    shown = "".join(part if index % 2 else visible(part) for index, part in enumerate(parts))
    return shown + (_NO_COLOUR if len(parts) > 1 else "")


class VisibleStream:
    """Standard output or error, with control characters made visible. `unfiltered` is the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """Writes the text, visible; returns the length of what was given."""
        self.unfiltered.write(visible(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Each as `write` does."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextlib.contextmanager
def visible_output() -> Iterator[None]:
    """While it lasts, what this process prints is made visible."""
    before = sys.stdout, sys.stderr
    streams: list[Any] = [VisibleStream(unfiltered(each)) for each in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def as_typed(text: str) -> str:
    """Commands of ours in a text, with the program as a person reaches it: `make demo` has none on its PATH."""
    started, found = sys.argv[0], shutil.which("hpc-trainer")
    is_ours = os.path.basename(started) == "hpc-trainer" and os.path.exists(started)  # noqa: PTH110, PTH119
    if not is_ours or (found is not None and os.path.samefile(found, started)):  # noqa: PTH121
        return text
    return re.sub(r"(?<![\w/.-])hpc-trainer (?=[a-z-])", lambda _: f"{shlex.quote(started)} ", text)


def unfiltered(stream: Any) -> Any:
    """The stream below `VisibleStream`: for what was made visible before, and has colours of ours."""
    return stream.unfiltered if isinstance(stream, VisibleStream) else stream
