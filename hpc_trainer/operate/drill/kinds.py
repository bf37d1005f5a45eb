"""Kinds of fire drills, without the code that performs them: the command line needs only their names, quickly."""

from __future__ import annotations

import enum


class Drill(str, enum.Enum):
    """Kind of interruption."""

    preempt = "preempt"
    timeout = "timeout"
    cancel = "cancel"
    nodefail = "nodefail"
    kill = "kill"
