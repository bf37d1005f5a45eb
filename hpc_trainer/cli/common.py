"""What the verbs share: where sweeps live, printing, and the words of a state."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hpc_trainer.config.user import read_user_config
from hpc_trainer.runs.layout import default_runs_dir
from hpc_trainer.runs.states import RunState

_COLOURS = {
    RunState.COMPLETED: "green",
    RunState.RUNNING: "cyan",
    RunState.PENDING: "yellow",
    RunState.REQUEUED: "yellow",
    RunState.NEW: "blue",
    RunState.FAILED: "red",
    RunState.OUT_OF_MEMORY: "red",
    RunState.NODE_FAIL: "red",
    RunState.TIMEOUT: "magenta",
    RunState.PREEMPTED: "magenta",
}


def console() -> Console:
    """Standard output; rich honours NO_COLOR and pipes. In a pipe a table keeps its full width."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=int(os.environ.get("COLUMNS", "200")))


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2))


def resolve_runs_dir(option: Path | None) -> Path:
    """--runs-dir, else $HPC_TRAINER_RUNS, else the person's own file, else ./runs."""
    if option is not None:
        return option
    own = None if os.environ.get("HPC_TRAINER_RUNS") else read_user_config().get("paths.runs_dir")
    return Path(str(own)).expanduser() if own else default_runs_dir()


def state_markup(state: RunState) -> str:
    """The state in its colour."""
    colour = _COLOURS.get(state)
    return f"[{colour}]{state.value}[/]" if colour else state.value


def table(*columns: str) -> Table:
    """A plain table; figures are right-aligned by the caller's text."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def counts_line(counts: dict[str, int]) -> str:
    """`3 COMPLETED, 1 RUNNING`."""
    return ", ".join(f"{number} {state}" for state, number in sorted(counts.items())) or "no runs"


def short_duration(seconds: float | None) -> str:
    """`1h05m`, `3m20s`, `12s`; `-` if unknown."""
    if seconds is None:
        return "-"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{secs:02d}s" if minutes else f"{secs}s"


def figure(value: Any) -> str:
    """A number to four digits; other values as they are."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
