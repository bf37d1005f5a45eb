"""What git says of a checkout, which may be a team's: none of its programs is run, and no failure is raised."""

from __future__ import annotations

import subprocess


def git_says(*argv: str) -> bytes | None:
    """What git prints; None if there is none here, if it fails, or takes longer than 10 s.

    No program that the configuration names is run.
    """
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *argv], capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
