"""Progress of a sweep while one watches: a bar for each run on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from hpc_trainer.cli.common import console, short_duration, state_markup
from hpc_trainer.operate.waits import active_among, looks
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.status import RunStatus, SweepStatus

# In a pipe a line for each run at most this often.
_LINE_EVERY_S = 10.0


def watch(sweep: SweepPaths, run_ids: set[str], *, quiet: bool = False) -> SweepStatus:
    """Shows the named runs until none of them waits or works (operate/waits.py), and returns the last status."""
    following = looks(sweep, run_ids)
    first = status = next(following)
    if not active_among(status, run_ids):
        return status
    done: set[str] = set()
    is_told = False
    with _shown(quiet) as (tell, show):
        for status in itertools.chain([first], following):
            if (status.silence is not None) != is_told:
                is_told = not is_told
                tell(f"Note: {status.silence} It is asked again." if status.silence else "Note: Slurm answers again.")
            for run in () if quiet else _news(status, run_ids, done):
                show(run)
    return status


def _news(status: SweepStatus, run_ids: set[str], done: set[str]) -> list[RunStatus]:
    """The named runs that are not done, and each that is done for the first look that finds it so.

    Args:
        done: those that were done at the look before; updated.
    """
    ids = [run_id for run_id in status.specs if run_id in run_ids]
    shown = [run_id for run_id in ids if run_id in status.open_runs or run_id not in done]
    done.clear()
    done.update(run_id for run_id in ids if run_id not in status.open_runs)
    return [status.run(run_id) for run_id in shown]


_Shown = tuple[Callable[[str], None], Callable[[RunStatus], None]]


@contextlib.contextmanager
def _shown(quiet: bool) -> Iterator[_Shown]:
    """What tells a line, and what shows how a run stands now."""
    if quiet:
        yield lambda text: print(text, file=sys.stderr, flush=True), lambda _: None
    elif not console().is_terminal:
        yield lambda text: print(text, flush=True), _Lines({}).show
    else:
        columns = (
            TextColumn("{task.description}"), TextColumn("{task.fields[state]}"), BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),  # an error's text may hold brackets
        )  # fmt: skip
        with Progress(*columns, console=console()) as progress:
            yield lambda text: progress.console.print(text, markup=False), _Bars(progress, {}).show


@dataclass(slots=True)
class _Bars:
    progress: Progress
    bars: dict[str, TaskID]

    def show(self, run: RunStatus) -> None:
        if run.run_id not in self.bars:
            self.bars[run.run_id] = self.progress.add_task(run.run_id, total=run.num_steps or None, state="", note="")
        bar = self.bars[run.run_id]
        self.progress.update(
            bar, completed=run.step, total=run.num_steps or None, state=state_markup(run.state), note=_note(run)
        )


@dataclass(slots=True)
class _Lines:
    """A line where the state is another, and of a run at work one from time to time."""

    told: dict[str, tuple[tuple[RunState, str | None], float]]

    def show(self, run: RunStatus) -> None:
        now = time.monotonic()
        stands = run.state, run.pending_reason
        before, when = self.told.get(run.run_id, (None, 0.0))
        if before != stands or (run.state is RunState.RUNNING and now - when >= _LINE_EVERY_S):
            self.told[run.run_id] = (stands, now)
            line = f"{run.run_id}  {run.state.value}  {run.progress}  {_note(run)}"
            print(line.rstrip(), flush=True)


def _note(run: RunStatus) -> str:
    if run.state is RunState.RUNNING and run.eta_s is not None:
        loss = run.metrics.get("loss")
        return f"ETA {short_duration(run.eta_s)}" + (f"  loss {loss:.3f}" if loss is not None else "")
    if run.warning is not None:
        return run.warning
    accuracy = run.metrics.get("eval_accuracy")
    if run.state is RunState.COMPLETED and accuracy is not None:
        return f"accuracy {accuracy:.4f}"
    return "" if run.state is RunState.COMPLETED else (run.reason or "")
