"""Both ends of a question to a process that may import torch: the login node's layers never import torch.

The request is JSON on standard input. The reply is lines of JSON: progress, and the answer as the last one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpc_trainer import errors
from hpc_trainer.errors import RunStateError
from hpc_trainer.runtime.start import start_words

Tell = Callable[[int, int], None]
"""Callback that takes (done, total)."""


def ask(module: str, verb: str, asked: Mapping[str, Any], tell: Tell | None = None) -> dict[str, Any]:
    """Return the answer of a new process that runs `module`; the process has ended on return, also after an error.

    Args:
        module: the module to run.
        verb: the question.
        asked: arguments of the question.
        tell: called with the progress.

    Raises:
        RunStateError: the process was killed. Otherwise the error of that process is raised, as by `error_of`.
    """
    command = [sys.executable, *start_words(module)]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({**asked, "verb": verb}))
            process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "answer" in message:
                    return dict(message["answer"])
                if "error" in message:
                    raise error_of(message)
                if tell is not None:
                    tell(*message["told"])
            said.seek(0)
            last = ": ".join([f"exit code {process.wait()}", *said.read().strip().splitlines()[-1:]])
            raise RunStateError(f"{verb} failed in the process that does it: {last}")
        finally:
            process.kill()


def error_of(line: Mapping[str, str]) -> Exception:
    """Return the error that a line of `told_error` reports; OSError if its type is not in errors.py."""
    kind = getattr(errors, line["error"], None)
    return kind(line["message"]) if kind else OSError(f"{line['error']}: {line['message']}")


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
    """Return the line that reports an error; `error_of` reads it."""
    return {"error": type(error).__name__, "message": str(error)}
