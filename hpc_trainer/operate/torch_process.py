"""Asks a process that may import torch (`worker/answer.py`): the login node's layers do without it."""

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
"""Called with (done, of how many)."""


def ask(module: str, verb: str, asked: Mapping[str, Any], tell: Tell | None = None) -> dict[str, Any]:
    """What `module` answers. However this ends, its process has ended.

    Raises:
        RunStateError: the process was killed. Else the error that it met; OSError for one that is none of ours.
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
                told = json.loads(line)
                if "answer" in told:
                    answer: dict[str, Any] = told["answer"]
                    return answer
                if "error" in told:
                    raise error_of(told)
                if tell is not None:
                    tell(*told["told"])
            said.seek(0)
            last = ": ".join([f"exit code {process.wait()}", *said.read().strip().splitlines()[-1:]])
            raise RunStateError(f"{verb} failed in the process that does it: {last}")
        finally:
            process.kill()


def error_of(told: Mapping[str, str]) -> Exception:
    """The error that another process met, as it told it (`worker.answer.told_error`); OSError for none of ours."""
    kind = getattr(errors, told["error"], None)
    return kind(told["message"]) if kind else OSError(f"{told['error']}: {told['message']}")
