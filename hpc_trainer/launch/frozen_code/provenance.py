"""Which code a sweep was submitted from: the frozen copy, and the git revision of the working folder."""

from __future__ import annotations

import hashlib
import subprocess
from typing import Any

from hpc_trainer import __version__
from hpc_trainer.launch.frozen_code.snapshot import Snapshot


def code_revision(code: Snapshot | None = None) -> dict[str, Any]:
    """`hpc_trainer` version, git revision and digest of the uncommitted difference; None outside a checkout.

    With it what was frozen: digest, folders that it was taken from, links that were left out; None if nothing was.
    """
    revision = _git("rev-parse", "HEAD")
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "HEAD") if revision else None
    return {
        "hpc_trainer": __version__,
        "git_revision": revision.strip() if revision else None,
        "git_diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "snapshot": None if code is None else code.provenance(),
    }


def _git(*argv: str) -> str | None:
    # The checkout may be a team's: no program that its configuration names is run.
    command = ["git", "-c", "core.fsmonitor=false", *argv]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
