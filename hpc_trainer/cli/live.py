"""Live progress of a sweep: a table of all runs on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from rich.live import Live

from hpc_trainer.cli.common import console, figure, short_duration
from hpc_trainer.cli.live_table import end_note, table_of
from hpc_trainer.domains import contributions
from hpc_trainer.operate.waits import active_among, looks
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import find_axes
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import RunStatus, SweepStatus

# Shortest time in seconds between two lines of a run in a pipe.
_LINE_EVERY_S = 10.0
# GPU samples are read at most this often, for as many runs as fit on a screen.
_GPU_EVERY_S = 5.0
_MOST_GPUS = 20

Axes = Mapping[str, Mapping[str, str]]
"""Values of each run on the axes, by run id."""


def watch(sweep: SweepPaths, run_ids: set[str], *, quiet: bool = False) -> SweepStatus:
    """Show the named runs until none is pending or running (operate/waits.py), and return the last status."""
    following = looks(sweep, run_ids)
    first = status = next(following)
    if not active_among(status, run_ids):
        return status
    done: set[str] = set()
    told: SweepStatus | None = None  # the look whose silence was reported
    axes = {} if quiet else find_axes([spec for run_id, spec in first.specs.items() if run_id in run_ids])
    with _shown(sweep, axes, quiet) as shown:
        for status in itertools.chain([first], following):
            if status.silence is not None and told is None:
                told = status
                shown.tell(f"Note: {status.silence} It is asked again.")
            elif status.silence is None and told is not None:
                shown.tell("Note: the folder can be read again." if told.is_away else "Note: Slurm answers again.")
                told = None
            for run in () if quiet else _news(status, run_ids, done):
                shown.show(run)
            shown.end_look()
    return status


def _news(status: SweepStatus, run_ids: set[str], done: set[str]) -> list[RunStatus]:
    """Return the named runs that are not done, and runs that became done since the look before.

    Args:
        status: the status of this look.
        run_ids: the named runs.
        done: the runs that were done at the look before; updated.
    """
    ids = [run_id for run_id in status.specs if run_id in run_ids]
    shown = [run_id for run_id in ids if run_id in status.open_runs or run_id not in done]
    done.clear()
    done.update(run_id for run_id in ids if run_id not in status.open_runs)
    return [status.run(run_id) for run_id in shown]


@contextlib.contextmanager
def _shown(sweep: SweepPaths, axes: Axes, quiet: bool) -> Iterator[_Lines | _Screen]:
    """Yield the output for lines and for the runs' present states: a screen on a terminal, else lines."""
    out = console()
    if quiet or not out.is_terminal or out.is_dumb_terminal:
        yield _Lines(sys.stderr if quiet else sys.stdout)
        return
    # Drawn only after a look, without a thread in between: no flicker.
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        yield _Screen(sweep, axes, live)


@dataclass(slots=True)
class _Lines:
    """Output as lines: one per change of state, and one from time to time for a running run."""

    file: TextIO
    told: dict[str, tuple[tuple[RunState, str | None], float]] = field(default_factory=dict)

    def tell(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    def show(self, run: RunStatus) -> None:
        now = time.monotonic()
        stands = run.state, run.pending_reason
        before, when = self.told.get(run.run_id, (None, 0.0))
        if before != stands or (run.state is RunState.RUNNING and now - when >= _LINE_EVERY_S):
            self.told[run.run_id] = (stands, now)
            line = f"{run.run_id}  {run.state.value}  {run.progress}  {_note(run)}"
            self.tell(line.rstrip())

    def end_look(self) -> None:
        """Do nothing: every line is printed already."""


@dataclass(slots=True)
class _Screen:
    """Table that is drawn again after each look that found a change."""

    sweep: SweepPaths
    axes: Axes
    live: Live
    runs: dict[str, RunStatus] = field(default_factory=dict)
    gpus: dict[str, list[str]] = field(default_factory=dict)
    read_at: float = -_GPU_EVERY_S
    drawn: object = None

    def tell(self, text: str) -> None:
        self.live.console.print(text, markup=False)

    def show(self, run: RunStatus) -> None:
        self.runs[run.run_id] = run

    def end_look(self) -> None:
        """Draw the runs of `show` if they or the terminal's size have changed."""
        now = time.monotonic()
        if now - self.read_at >= _GPU_EVERY_S:
            self.read_at = now
            # Slurm says RUNNING before the worker has recorded its attempt: the worker imports torch first.
            at_work = [run for run in self.runs.values() if run.state is RunState.RUNNING and run.attempts]
            find = contributions("live_figures")
            self.gpus = {
                run.run_id: [
                    word for figures in find for word in figures(self.sweep.run(run.run_id), run.attempts[-1].attempt)
                ]
                for run in at_work[:_MOST_GPUS]
            }
        size = self.live.console.size
        drawn = table_of(list(self.runs.values()), self.gpus, width=size.width, height=size.height, axes=self.axes)
        if drawn.plain != self.drawn:
            self.drawn = drawn.plain
            self.live.update(drawn, refresh=True)


def _note(run: RunStatus) -> str:
    if run.state is RunState.RUNNING and run.eta_s is not None:
        loss = run.metrics.get("loss")
        return f"ETA {short_duration(run.eta_s)}" + (f"  loss {figure(float(loss))}" if loss is not None else "")
    return end_note(run)
