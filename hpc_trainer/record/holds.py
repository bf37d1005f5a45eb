"""Holds: files named HOLD that keep runs from starting, each with its author, its time and its reason.

In a run's folder a hold is for the run; in the sweep's folder it is for every run of the sweep that waits. Running runs
are not affected. Like CANCEL, the file outlives every process; `release` removes it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.record.files import write_json
from hpc_trainer.record.reading import Faults, as_text, as_time, read_json, typed
from hpc_trainer.slurm.commands import user_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Hold of a run or a sweep."""

    user: str
    time: float
    why: str = ""

    @property
    def words(self) -> str:
        """Return the hold as a cause, such as `held by anna since 2026-11-26 13:00`."""
        clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.time))
        return f"held by {self.user} since {clock}" + (f": {self.why}" if self.why else "")


def write_hold(path: Path, why: str = "", *, user: str | None = None) -> None:
    """Write a hold in an existing folder; an earlier one is replaced.

    Args:
        path: `SweepPaths.hold`, or the marker HOLD of a run.
        why: the reason, if it is not the user's wish.
        user: author of the hold; None for the user of this process.
    """
    write_json(path, {"user": user_name() if user is None else user, "time": time.time(), "why": why})


def read_hold(path: Path, faults: Faults) -> Hold:
    """Return a hold whose file exists. If it cannot be read, the hold has the file's time and no name."""
    record = read_json(path, faults) or {}
    try:
        return Hold(**typed(record, {"user": as_text, "time": as_time}, {"why": as_text}))
    except (KeyError, ValueError):
        try:
            return Hold(user="an unknown user", time=path.lstat().st_mtime)
        except OSError:
            return Hold(user="an unknown user", time=time.time())
