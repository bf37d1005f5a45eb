"""The kinds of fire drills, apart from what they do: the command line needs their names, and nothing slow."""

from __future__ import annotations

import enum


class Drill(str, enum.Enum):
    """What is done to the run."""

    preempt = "preempt"
    timeout = "timeout"
    cancel = "cancel"
    nodefail = "nodefail"
    kill = "kill"
