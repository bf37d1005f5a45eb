"""Progress of a sweep while one watches: a bar for each run on a terminal, plain lines in a pipe."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from hpc_trainer.cli.common import console, counts_line, short_duration, state_markup
from hpc_trainer.operate.verdicts import SILENT, TAKEN, of_unknown
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.status import RunStatus, SweepStatus, read_status

# Run folders are ours and cheap to read; Slurm is asked at most this often (docs of squeue: no tight loops).
_LOCAL_POLL_S = 0.5
_SLURM_POLL_S = 10.0
# In a pipe a line for each run at most this often.
_LINE_EVERY_S = 10.0


# What nobody has, and of which nothing changes for so long, will not change by itself. The accounting may be ten
# minutes behind (state/run_state.py).
_PATIENCE_S = 900.0


def watch(sweep: SweepPaths, run_ids: set[str], *, quiet: bool = False) -> SweepStatus:
    """Shows the named runs until none of them waits or works, and returns the last status.

    A run that nobody has is not waited for longer than `_PATIENCE_S`; a note of the status tells of it then. While
    Slurm does not answer, it is asked again.
    """
    looks = _looks(sweep, run_ids)
    status = next(looks)
    if not _active(status, run_ids):
        return status
    if quiet:
        return _watch_quietly(looks, status)
    return _watch_bars(looks, status, run_ids) if console().is_terminal else _watch_lines(looks, status, run_ids)


def _looks(sweep: SweepPaths, run_ids: set[str]) -> Iterator[SweepStatus]:
    """One look after the other; the last one is yielded too."""
    since: dict[str, tuple[tuple[object, ...], float]] = {}
    while True:
        status = read_status(sweep, is_look=True)
        now = time.monotonic()
        active = _active(status, run_ids)
        since = {
            run.run_id: (_looks_like(run), _quiet_since(run, since.get(run.run_id), now))
            for run in active if _is_nobodys(run, status)
        }  # fmt: skip
        given_up = [run for run in active if run.run_id in since and now - since[run.run_id][1] >= _PATIENCE_S]
        if given_up:
            remarks = [*status.remarks, _no_longer(given_up)]
            status = dataclasses.replace(status, remarks=remarks)
        yield status
        if len(given_up) == len(active):
            return
        _sleep(status)


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


def _is_nobodys(run: RunStatus, status: SweepStatus) -> bool:
    """True if neither a scheduler nor a process is known to have it, although who was asked has answered."""
    if status.silence is not None and status.silence.startswith("squeue"):
        return False
    if run.waits_in_sweep:
        return status.tending_job is None
    is_unknown = run.state is RunState.UNKNOWN and run.own_job is None
    return is_unknown and of_unknown(run.cause, None) not in (SILENT, TAKEN)


def _looks_like(run: RunStatus) -> tuple[object, ...]:
    return run.state, run.cause, run.step, len(run.attempts)


def _quiet_since(run: RunStatus, before: tuple[tuple[object, ...], float] | None, now: float) -> float:
    """Since when nothing of the run has changed, and it gave no sign of life."""
    if before is None or before[0] != _looks_like(run) or (run.age_s is not None and run.age_s < now - before[1]):
        return now
    return before[1]


def _no_longer(runs: Sequence[RunStatus]) -> str:
    first = runs[0]
    return (
        f"No longer waiting for {len(runs)} run(s) that nobody is known to have; for {_PATIENCE_S / 60:.0f} minutes "
        f"nothing has changed. {first.run_id} is {first.state.value}: {first.reason}. What to do: hpc-trainer why "
        f"{first.run_id}"
    )


def _sleep(status: SweepStatus) -> None:
    on_slurm = any(run.job_id and run.job_id[0].isdecimal() for run in status.open_runs.values() if run.state.is_active)
    time.sleep(_SLURM_POLL_S if on_slurm or status.silence is not None or status.waiting else _LOCAL_POLL_S)


class _Silence:
    """Tells when Slurm stops answering, and when it answers again."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say, self._is_told = say, False

    def tell(self, status: SweepStatus) -> None:
        if (status.silence is not None) != self._is_told:
            self._is_told = not self._is_told
            self._say(f"Note: {status.silence} It is asked again." if status.silence else "Note: Slurm answers again.")


def _watch_quietly(looks: Iterator[SweepStatus], status: SweepStatus) -> SweepStatus:
    silence = _Silence(lambda text: print(text, file=sys.stderr, flush=True))
    for each in itertools.chain([status], looks):
        silence.tell(status := each)
    return status


def _watch_bars(looks: Iterator[SweepStatus], status: SweepStatus, run_ids: set[str]) -> SweepStatus:
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
        silence = _Silence(lambda text: progress.console.print(text, markup=False))
        for each in itertools.chain([status], looks):
            silence.tell(status := each)
            for run in _news(status, run_ids, done):
                if run.run_id not in bars:
                    bars[run.run_id] = progress.add_task(run.run_id, total=run.num_steps or None, state="", note="")
                progress.update(
                    bars[run.run_id],
                    completed=run.step,
                    total=run.num_steps or None,
                    state=state_markup(run.state),
                    note=_note(run),
                )
    return status


def _watch_lines(looks: Iterator[SweepStatus], status: SweepStatus, run_ids: set[str]) -> SweepStatus:
    told: dict[str, tuple[tuple[RunState, str | None], float]] = {}
    done: set[str] = set()
    silence = _Silence(lambda text: print(text, flush=True))
    for each in itertools.chain([status], looks):
        silence.tell(status := each)
        now = time.monotonic()
        for run in _news(status, run_ids, done):
            stands = run.state, run.pending_reason
            before, when = told.get(run.run_id, (None, 0.0))
            moving = run.state is RunState.RUNNING and now - when >= _LINE_EVERY_S
            if before != stands or moving:
                told[run.run_id] = (stands, now)
                print(
                    f"{run.run_id}  {run.state.value}  {run.progress}  {_note(run)}".rstrip(),
                    flush=True,
                )
    print(f"Sweep {status.sweep.name}: {counts_line(status.counts)}.", flush=True)
    return status


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
