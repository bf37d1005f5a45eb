"""Process that `operate/torch_process.py` asks: one request on standard input, and lines of JSON as the reply.

The last line is the answer; the lines before report progress.
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
"""Function that answers each verb, given the request and a callback for progress, called with (done, total)."""


def answer(verbs: Answers) -> None:
    """Answer the request on standard input, or report the error, which the asking process raises."""
    with answering() as say:
        asked = json.loads(sys.stdin.read())
        try:
            say({"answer": verbs[asked.pop("verb")](asked, lambda done, total: say({"told": [done, total]}))})
        except Exception as error:
            say(told_error(error))


@contextlib.contextmanager
def answering() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that writes a line of JSON to the asking process; all other output goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked, which ends this one
    out = sys.stdout

    def say(line: Mapping[str, Any]) -> None:
        try:
            out.write(json.dumps(line) + "\n")
            out.flush()
        except OSError:  # the asking process was killed: nobody reads the rest
            os._exit(1)

    with contextlib.redirect_stdout(sys.stderr):  # output of other code, such as a user's own data set
        yield say


def told_error(error: Exception) -> dict[str, str]:
    """Return the line that reports an error."""
    return {"error": type(error).__name__, "message": str(error)}
