"""The other end of `operate/torch_process.py`: one request on standard input; lines of JSON say how far it is, the last
one is the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Answers = Mapping[str, Callable[[dict[str, Any], Callable[[int, int], None]], dict[str, Any]]]
"""Verb -> what answers it, given the request and what to call with (done, of how many)."""


def answer(verbs: Answers) -> None:
    """Answers the request, or says which error it met, for the asking process to raise."""
    with answering() as say:
        asked = json.loads(sys.stdin.read())
        try:
            say({"answer": verbs[asked.pop("verb")](asked, lambda done, total: say({"told": [done, total]}))})
        except Exception as error:
            say(told_error(error))


@contextlib.contextmanager
def answering() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """What says a line of JSON to the process that asked; what others print meanwhile goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked, which ends this one
    out = sys.stdout

    def say(line: Mapping[str, Any]) -> None:
        try:
            out.write(json.dumps(line) + "\n")
            out.flush()
        except OSError:  # the one that asked was killed: nobody wants the rest
            os._exit(1)

    with contextlib.redirect_stdout(sys.stderr):  # what others print, as a person's own data set may
        yield say


def told_error(error: Exception) -> dict[str, str]:
    """The line that tells of an error."""
    return {"error": type(error).__name__, "message": str(error)}
