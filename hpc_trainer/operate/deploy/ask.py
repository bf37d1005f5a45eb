"""Asks the process with torch (`worker/deploy/main.py`): the login node's layers do without it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from hpc_trainer import errors
from hpc_trainer.errors import RunStateError
from hpc_trainer.runtime.start import start_words


def ask(verb: str, **asked: Any) -> dict[str, Any]:
    """What the process with torch has done. Raises the error that it met."""
    command = [sys.executable, *start_words("hpc_trainer.worker.deploy.main")]
    done = subprocess.run(
        command, input=json.dumps({"verb": verb, **asked}), capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if not lines:
        said = ": ".join([f"exit code {done.returncode}", *done.stderr.strip().splitlines()[-1:]])
        raise RunStateError(f"{verb} failed in the process that does it: {said}")
    told: dict[str, Any] = json.loads(lines[-1])
    if "error" not in told:
        return told
    kind = getattr(errors, told["error"], None)
    if kind is None:
        raise OSError(f"{told['error']}: {told['message']}")
    raise kind(told["message"])
