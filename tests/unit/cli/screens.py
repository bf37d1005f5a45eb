"""A pseudo-terminal of any width, and what one would see on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import IO

import pytest


class Screen:
    """A terminal that knows what rich uses: text, colours, lines, and to erase and go up."""

    def __init__(self, width: int) -> None:
        self.width, self.lines, self.row, self.column, self.num_wraps = width, [""], 0, 0, 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+|\x1b", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif not part.startswith("\x1b"):
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
                self.column += len(part)
                self.num_wraps += self.column > self.width
            elif part.endswith("A"):
                self.row -= int(part[2:-1] or 1)
            elif part.endswith("K"):
                self.lines[self.row] = ""
            else:
                assert part[-1] in "mlh", repr(part)


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Callable[[], str]]]:
    """Puts standard output on a pseudo-terminal of some width; what is returned gives what it got, and closes it."""
    opened: list[tuple[int, IO[str]]] = []

    def open_one(width: int) -> Callable[[], str]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        got = bytearray()

        def read() -> None:
            try:
                while data := os.read(ours, 65536):
                    got.extend(data)
            except OSError:  # how Linux says that the other end is closed
                return

        reader = threading.Thread(target=read)
        reader.start()
        opened.append((ours, os.fdopen(theirs, "w")))
        monkeypatch.setattr(sys, "stdout", opened[-1][1])

        def close() -> str:
            sys.stdout.close()
            monkeypatch.undo()
            reader.join()
            return got.decode().replace("\r\n", "\n\r")

        return close

    yield open_one
    for ours, terminal in opened:
        terminal.close()  # of a test that failed: its reader would wait for ever
        os.close(ours)
