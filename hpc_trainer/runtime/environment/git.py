"""Calls of git in a checkout that may belong to a team: its hooks are not run, and no other repository is used."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


def run_git(
    folder: str | Path, *argv: str, timeout_s: float, more: Mapping[str, str] = MappingProxyType({}), given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Return the result of a git command in `folder`. Hooks and the monitor of the configuration are not run.

    Variables of git are removed: inside a git hook they would name the repository of that hook.

    Args:
        more: additional variables of the command.
        given: standard input of the command.

    Raises:
        OSError: there is no git here.
        TimeoutExpired: the command took longer than `timeout_s` seconds, and was killed.
    """
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environ |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **more}
    command = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *argv]
    return subprocess.run(command, env=environ, input=given, capture_output=True, timeout=timeout_s, check=False)


def git_says(folder: str | Path, *argv: str) -> bytes | None:
    """Return the output of git; None if git is missing, fails, or takes longer than 10 s."""
    try:
        done = run_git(folder, *argv, timeout_s=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
