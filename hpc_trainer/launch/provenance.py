"""Which code a sweep was submitted from: the git revision of the working folder and a digest of its differences."""

from __future__ import annotations

import hashlib
import subprocess

from hpc_trainer import __version__


def code_revision() -> dict[str, str | None]:
    """`hpc_trainer` version, git revision and digest of the uncommitted difference; None outside a checkout."""
    revision = _git("rev-parse", "HEAD")
    diff = _git("diff", "HEAD") if revision else None
    return {
        "hpc_trainer": __version__,
        "git_revision": revision.strip() if revision else None,
        "git_diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
    }


def _git(*argv: str) -> str | None:
    try:
        done = subprocess.run(["git", *argv], capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
