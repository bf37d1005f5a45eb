"""Questions to a process that may import torch (`worker/answer.py`): the login node's layers never import torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
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
                    answer: dict[str, Any] = message["answer"]
                    return answer
                if "error" in message:
                    raise error_of(message)
                if tell is not None:
                    tell(*message["told"])
            said.seek(0)
            last = ": ".join([f"exit code {process.wait()}", *said.read().strip().splitlines()[-1:]])
            raise RunStateError(f"{verb} failed in the process that does it: {last}")
        finally:
            process.kill()


def error_of(answer: Mapping[str, str]) -> Exception:
    """Return the error reported by another process (`worker.answer.told_error`); OSError if it is not in errors.py."""
    kind = getattr(errors, answer["error"], None)
    return kind(answer["message"]) if kind else OSError(f"{answer['error']}: {answer['message']}")
