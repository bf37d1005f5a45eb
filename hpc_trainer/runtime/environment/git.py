"""git, of a checkout that may be a team's: none of its programs is run, and no other repository is meant."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


def run_git(
    folder: str | Path, *argv: str, timeout_s: float, more: Mapping[str, str] = MappingProxyType({}), given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """What became of a git command in `folder`. Neither hooks nor a monitor that the configuration names are run.

    Where we are inside a hook of git's, its variables name the repository of that hook: they are left out.

    Args:
        more: variables that it gets besides.
        given: its standard input.

    Raises:
        OSError: there is no git here.
        TimeoutExpired: it took longer than `timeout_s` seconds, and was killed.
    """
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environ |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **more}
    command = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *argv]
    return subprocess.run(command, env=environ, input=given, capture_output=True, timeout=timeout_s, check=False)


def git_says(folder: str | Path, *argv: str) -> bytes | None:
    """What git prints; None if there is none here, if it fails, or takes longer than 10 s."""
    try:
        done = run_git(folder, *argv, timeout_s=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
