"""Separate process for code that only estimates; each question and each answer is a line of JSON.

Estimates run the user's model, task and metrics on torch's fake tensors, and that may corrupt the memory of the
process: `copy.deepcopy` of a fake tensor, which torchmetrics calls for each state, copies the tensor's mode and in it
torch's `StorageWeakRef`s. Each copy frees the same weak reference once more (torch 2.13), so a later allocation
crashes, or overwrites. So neither a rank nor the command line runs estimates itself: `OwnProcess` asks, and the other
end answers each question in a fork, whose death is an answer too (docs/decisions/0087-estimates-in-a-process.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any, Final

from hpc_trainer.runtime.start import start_words

TIMEOUT_S: Final = 300.0


class OwnProcess:
    """Process of `module`, whose `main` calls `answer_each`. It starts with the first question, and again if it died.

    Use the object as a context manager, or call `close`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[str] | None = None
        self._rest = b""

    def __enter__(self) -> OwnProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def ask(self, question: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return the answer to `question`, or {"error": reason} if there is none."""
        self.send(question)
        return self.answer(timeout_s)

    def send(self, question: Mapping[str, Any]) -> None:
        """Hand over a question; `answer` waits for its answer. One question at a time."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has died already: `answer` says so
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Wait for the answer to the last question, and return it, or {"error": reason} if there is none."""
        line = self._line(time.monotonic() + timeout_s)
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:
            why = f"no answer within {timeout_s:g} s" if line is _LATE else self._how_it_ended()
            self.close()
            return {"error": why}
        return reply

    def close(self) -> None:
        """End the process, also in the middle of an answer."""
        process, self._process, self._rest = self._process, None, b""
        if process is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # forks too: a fork may hang in the user's code
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
            process.wait()
        if self._said is not None:
            self._said.close()
            self._said = None

    def _start(self) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed by `close`)
        self._process = subprocess.Popen(
            [sys.executable, *start_words(self._module)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said, start_new_session=True,
        )  # fmt: skip

    def _line(self, until: float) -> bytes:
        """Return the next line; `_LATE` if there is none by the time `until`, b"" if the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return _LATE
            more = os.read(fd, 1 << 16)
            if not more:
                return b""
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        assert self._process is not None
        assert self._said is not None
        code = self._process.wait()
        self._said.seek(0)
        return ": ".join([f"exit code {code}", *self._said.read().strip().splitlines()[-1:]])


_LATE: Final = b"late"


def answer_each(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the questions on standard input, each in a fork, until there are no more.

    The output of `answer` goes to standard error. An exception is the answer {"error": "ValueError: .."}, and so is the
    death of the fork.
    """
    out = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _answer_here(answer, line, out)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            _say(out, {"error": f"the process that estimates died of {signal.Signals(-code).name}"})
        elif code > 0:  # the user's code called os._exit
            _say(out, {"error": f"the process that estimates ended with exit code {code}"})


def _answer_here(answer: Callable[[dict[str, Any]], dict[str, Any]], line: str, out: int) -> None:
    """Answer one question in the fork, and end the fork. Never returns."""
    try:
        reply = answer(json.loads(line))
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        reply = {"error": f"{type(error).__name__}: {error}"}
    _say(out, reply)
    os._exit(0)


def _say(out: int, result: Mapping[str, Any]) -> None:
    data = json.dumps(result).encode() + b"\n"
    while data:
        data = data[os.write(out, data) :]
