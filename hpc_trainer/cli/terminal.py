"""Visible control characters in the output, so that no text of a file, a program or Slurm controls a terminal.

An exception's message, a log line or a metric's name may hold escape sequences. These overwrite earlier text, change
the window's title, or make some terminals type. Pipes are filtered too: `| less -R` ends at a terminal. Line feeds and
tabs stay, and so do the colours of a log.
"""

from __future__ import annotations

import codecs
import contextlib
import io
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


_PLAIN = {"…": "...", "±": "+-", "≥": ">=", "≤": "<=", "×": "x", "µ": "u", "°": " deg", "━": "=", "╌": "-", "²": "^2"}


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """Return plain letters for characters that the terminal's encoding lacks, as Python's handlers of errors do."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, "?") for letter in lacking), error.end


def allow_any_encoding() -> None:
    """Let standard output and error take any text, also where the locale is not UTF-8."""
    codecs.register_error("hpc_trainer.plain_letters", _in_plain_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="hpc_trainer.plain_letters")


def one_line(text: str) -> str:
    """Return the text as `visible` does, with line feeds and tabs escaped too, for a cell of a table."""
    return text if text.isprintable() else visible(text).replace("\n", "\\n").replace("\t", "\\t")


def visible_log_line(line: str) -> str:
    """Return the line as `visible` does, but keep colours and bold, and end them with the line."""
    if "\x1b[" not in line:
        return visible(line)
    parts = _COLOUR.split(line)
    shown = "".join(part if index % 2 else visible(part) for index, part in enumerate(parts))
    return shown + (_NO_COLOUR if len(parts) > 1 else "")


class VisibleStream:
    """Standard output or error that makes control characters visible. `unfiltered` is the original stream."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """Write the text with visible control characters; return the length of the given text."""
        self.unfiltered.write(visible(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line as `write` does."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextlib.contextmanager
def visible_output() -> Iterator[None]:
    """Make control characters visible in everything that this process prints within the context."""
    before = sys.stdout, sys.stderr
    streams: list[Any] = [VisibleStream(unfiltered(stream)) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def as_typed(text: str) -> str:
    """Replace `hpc-trainer` in a text by the started program's path if PATH does not lead to it, as in `make demo`."""
    started, on_path = sys.argv[0], shutil.which("hpc-trainer")
    is_ours = os.path.basename(started) == "hpc-trainer" and os.path.exists(started)  # noqa: PTH110, PTH119
    if not is_ours or (on_path is not None and os.path.samefile(on_path, started)):  # noqa: PTH121
        return text
    return re.sub(r"(?<![\w/.-])hpc-trainer (?=[a-z-])", lambda _: f"{shlex.quote(started)} ", text)


def unfiltered(stream: Any) -> Any:
    """Return the stream below `VisibleStream`, for text that is visible already and has colours of hpc-trainer."""
    return stream.unfiltered if isinstance(stream, VisibleStream) else stream
