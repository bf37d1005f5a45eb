"""Progress of a sweep while one watches: a bar for each run on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from hpc_trainer.cli.common import console, counts_line, short_duration, state_markup
from hpc_trainer.operate.status import RunStatus, SweepStatus, read_status
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.states import RunState

# Run folders are ours and cheap to read; Slurm is asked at most this often (docs of squeue: no tight loops).
_LOCAL_POLL_S = 0.5
_SLURM_POLL_S = 10.0
# In a pipe a line for each run at most this often.
_LINE_EVERY_S = 10.0


def watch(sweep: SweepPaths, run_ids: set[str], *, quiet: bool = False) -> SweepStatus:
    """Shows the named runs until none of them waits or works, and returns the last status."""
    out = console()
    status = read_status(sweep)
    if not _active(status, run_ids):
        return status
    if quiet:
        while _active(status, run_ids):
            _sleep(status)
            status = read_status(sweep)
        return status
    return _watch_bars(sweep, run_ids, status) if out.is_terminal else _watch_lines(sweep, run_ids, status)


def _active(status: SweepStatus, run_ids: set[str]) -> list[RunStatus]:
    return [run for run in status.open_runs.values() if run.run_id in run_ids and run.state.is_active]


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


def _sleep(status: SweepStatus) -> None:
    on_slurm = any(run.job_id and run.job_id[0].isdecimal() for run in status.open_runs.values() if run.state.is_active)
    time.sleep(_SLURM_POLL_S if on_slurm else _LOCAL_POLL_S)


def _watch_bars(sweep: SweepPaths, run_ids: set[str], status: SweepStatus) -> SweepStatus:
    columns = (
        TextColumn("{task.description}"),
        TextColumn("{task.fields[state]}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),  # an error's text may hold brackets
    )
    bars: dict[str, TaskID] = {}
    done: set[str] = set()
    with Progress(*columns, console=console()) as progress:
        while True:
            for run in _news(status, run_ids, done):
                if run.run_id not in bars:
                    bars[run.run_id] = progress.add_task(run.run_id, total=run.spec.num_steps, state="", note="")
                progress.update(bars[run.run_id], completed=run.step, state=state_markup(run.state), note=_note(run))
            if not _active(status, run_ids):
                return status
            _sleep(status)
            status = read_status(sweep)


def _watch_lines(sweep: SweepPaths, run_ids: set[str], status: SweepStatus) -> SweepStatus:
    told: dict[str, tuple[RunState, float]] = {}
    done: set[str] = set()
    while True:
        now = time.monotonic()
        for run in _news(status, run_ids, done):
            state, when = told.get(run.run_id, (None, 0.0))
            moving = run.state is RunState.RUNNING and now - when >= _LINE_EVERY_S
            if state is not run.state or moving:
                told[run.run_id] = (run.state, now)
                print(
                    f"{run.run_id}  {run.state.value}  {run.step}/{run.spec.num_steps}  {_note(run)}".rstrip(),
                    flush=True,
                )
        if not _active(status, run_ids):
            print(f"Sweep {sweep.name}: {counts_line(status.counts)}.", flush=True)
            return status
        _sleep(status)
        status = read_status(sweep)


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
