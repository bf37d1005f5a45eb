"""Live progress of a sweep: a table of all runs on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.live import Live
from rich.text import Text

from hpc_trainer.cli.common import console, cut, figure, one_line, short_duration, state_style, throughput_words
from hpc_trainer.domains import contributions
from hpc_trainer.operate.waits import active_among, looks
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import find_axes
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus

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
    axes = {} if quiet else find_axes([spec for run_id, spec in first.specs.items() if run_id in run_ids])
    with _shown(sweep, axes, quiet) as shown:
        for status in telling(itertools.chain([first], following), shown.tell):
            for run in () if quiet else _news(status, run_ids, done):
                shown.show(run)
            shown.end_look()
    return status


def telling(statuses: Iterable[SweepStatus], tell: Callable[[str], object]) -> Iterator[SweepStatus]:
    """Yield the looks, and tell when the folder or Slurm does not answer, and when it answers again."""
    told: SweepStatus | None = None  # the look whose silence was reported
    for status in statuses:
        if status.silence is not None and told is None:
            told = status
            tell(f"Note: {status.silence} hpc-trainer keeps trying.")
        elif status.silence is None and told is not None:
            tell("Note: the folder can be read again." if told.is_away else "Note: Slurm answers again.")
            told = None
        yield status


def _news(status: SweepStatus, run_ids: set[str], done: set[str]) -> list[RunStatus]:
    """Return the named runs that are not done, and runs that became done since the previous look.

    Args:
        status: the status of this look.
        run_ids: the named runs.
        done: the runs that were done at the previous look; updated.
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


# --- text of the view ---


_BAR, _WIDE_BAR = 12, 40
_SHORTEST_ID = 16
_NOTE = 20
_FIGURES = 60
"""Least width beside the axes at which figures are shown. The rule uses the terminal's width only, not the figures of a
look, or columns would come and go."""
_GAP = "  "


def table_of(
    runs: Sequence[RunStatus], gpus: Mapping[str, Sequence[str]], *, width: int, height: int,
    axes: Mapping[str, Mapping[str, str]] = {},
) -> Text:  # fmt: skip
    """Return the view for a terminal of this size: no wider, and less high so that it does not scroll.

    Args:
        runs: the runs.
        gpus: figures of GPUs by run id, the most important first.
        width: columns of the terminal.
        height: lines of the terminal.
        axes: values on the axes by run id (`find_axes`).
    """
    if len(runs) == 1:
        lines = _of_one(runs[0], gpus.get(runs[0].run_id), width)[: max(1, height - 1)]
    else:
        lines = _of_many(runs, gpus, _names(runs, axes, width), width, max(2, height - 1))
    for line in lines:
        line.truncate(width)
    return Text("\n", no_wrap=True, end="").join(lines)


def end_note(run: RunStatus) -> str:
    """Describe how an idle run ended, or what it is waiting for."""
    if run.warning is not None:
        return run.warning
    accuracy = run.metrics.get("eval_accuracy")
    if run.state is RunState.COMPLETED and accuracy is not None:
        return f"accuracy {accuracy:.4f}"
    return "" if run.state is RunState.COMPLETED else (run.reason or "")


def _of_one(run: RunStatus, gpu: Sequence[str] | None, width: int) -> list[Text]:
    """Return all figures of one run, in as many lines as they need."""
    head = Text.assemble((run.run_id, "bold"), _GAP, (run.state.value, state_style(run.state)))
    if run.state is not RunState.RUNNING:
        note = one_line(end_note(run))
        return [head, *_packed([f"step {run.progress}"] if run.step else [], width), *([Text(note)] if note else [])]
    progress = [f"step {run.progress}"]
    if run.num_steps:
        progress.append(f"{run.step / run.num_steps:.0%}")
    if run.eta_s is not None:
        progress.append(f"ETA {short_duration(run.eta_s)}")
    bar = _bar(run, min(_WIDE_BAR, width - len(_GAP.join(progress)) - len(_GAP)))
    first = Text(_GAP).join([bar, Text(_GAP.join(progress))]) if bar is not None else Text(_GAP.join(progress))
    figures = _packed(_figures(run, has_gpu=bool(gpu)), width)
    remarks = [Text(one_line(remark), style="yellow") for remark in run.remarks]
    return [head, first, *figures, *_packed(gpu or [], width), *remarks]


def _figures(run: RunStatus, *, has_gpu: bool) -> list[str]:
    """Return loss, learning rate and speed of a running run, the most important first."""
    speed = run.speed
    figures = [f"{key} {figure(float(run.metrics[key]))}" for key in ("loss", "lr") if _is_known(run, key)]
    throughput = throughput_words(speed)
    figures += [throughput] if throughput is not None else []
    if "step_time_s" in speed:
        p95 = f" (p95 {_ms(speed['step_time_p95_s'])})" if "step_time_p95_s" in speed else ""
        figures.append(f"a step {_ms(speed['step_time_s'])}{p95}")
    figures += [f"data wait {speed['data_wait_share']:.0%}"] if "data_wait_share" in speed else []
    if "mfu" in speed or has_gpu:
        figures.append(f"mfu {speed['mfu']:.0%}" if "mfu" in speed else "mfu unknown")
    return figures


def _is_known(run: RunStatus, metric: str) -> bool:
    return run.metrics.get(metric) is not None  # a heartbeat may have null


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _packed(texts: Sequence[str], width: int) -> list[Text]:
    """Return the texts joined into lines that are as full as `width` allows."""
    lines: list[str] = []
    for word in texts:
        if lines and len(lines[-1]) + len(_GAP) + len(word) <= width:
            lines[-1] += _GAP + word
        else:
            lines.append(word)
    return [Text(line) for line in lines]


def _bar(run: RunStatus, width: int) -> Text | None:
    """Return a progress bar of the run; None if the number of steps is not known or there is no room."""
    if not run.num_steps or width < _BAR:
        return None
    done = min(width, width * run.step // run.num_steps)
    return Text.assemble(("━" * done, state_style(run.state)), ("╌" * (width - done), "dim"))


def _names(runs: Sequence[RunStatus], axes: Mapping[str, Mapping[str, str]], width: int) -> dict[str, str]:
    """Return the beginning of each run's line, all equally wide: its id, always cut to one length, and its axes."""
    longest = max(len(run.run_id) for run in runs)
    size = min(longest, max(_SHORTEST_ID, width // 4))
    names = {run.run_id: cut(run.run_id, size).ljust(size) for run in runs}
    axes_texts = {run_id: " ".join(f"{key}={value}" for key, value in row.items()) for run_id, row in axes.items()}
    more = max((len(axes_texts.get(run_id, "")) for run_id in names), default=0)
    if not more or size + len(_GAP) + more + _FIGURES > width:
        return names
    return {run_id: name + _GAP + one_line(axes_texts.get(run_id, "")).ljust(more) for run_id, name in names.items()}


def _of_many(
    runs: Sequence[RunStatus], gpus: Mapping[str, Sequence[str]], names: Mapping[str, str], width: int, height: int
) -> list[Text]:
    """Return one line per run; if not all runs have room, choose running runs first and count the others."""
    shown, rest = list(runs), Counter[str]()
    if len(runs) > height:
        order = {RunState.RUNNING: 0, RunState.FAILED: 1, RunState.OUT_OF_MEMORY: 1}
        chosen = sorted(runs, key=lambda run: order.get(run.state, 2 if run.state.is_active else 3))[: height - 1]
        ids = {run.run_id for run in chosen}
        shown = [run for run in runs if run.run_id in ids]
        rest = Counter(run.state.value for run in runs if run.run_id not in ids)
    cells = {run.run_id: _cells(run, gpus.get(run.run_id)) for run in shown}
    states, steps = (max(map(len, texts)) for texts in (
        [run.state.value for run in shown], [run.progress for run in shown]
    ))  # fmt: skip
    fixed = len(names[shown[0].run_id]) + states + steps + 2 * len(_GAP)
    kept = _that_fit(list(cells.values()), width - fixed)
    notes = max((len(_GAP + end_note(run)) for run in shown if run.state is not RunState.RUNNING), default=0)
    used = fixed + max(min(notes, _NOTE), sum(len(_GAP) + size for size in kept.values()))
    has_bar = width - used >= _BAR + len(_GAP)
    lines = []
    for run in shown:
        line = Text.assemble(names[run.run_id], _GAP, (run.state.value.ljust(states), state_style(run.state)))
        if has_bar:
            line.append(_GAP)
            line.append_text(_bar(run, _BAR) or Text(" " * _BAR))
        line.append(_GAP + run.progress.rjust(steps))
        if run.state is RunState.RUNNING:
            line.append("".join(_GAP + cells[run.run_id].get(key, "").ljust(size) for key, size in kept.items()))
        else:
            line.append(_GAP + one_line(end_note(run)))
        line.rstrip()
        lines.append(line)
    if rest:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(rest.items()))
        lines.append(Text(f"and {rest.total()} more: {counts}", style="dim"))
    return lines


def _cells(run: RunStatus, gpu: Sequence[str] | None) -> dict[str, str]:
    """Return the figures of a running run's line; {} if the run is not running."""
    if run.state is not RunState.RUNNING:
        return {}
    cells = {"eta": f"ETA {short_duration(run.eta_s)}"} if run.eta_s is not None else {}
    if _is_known(run, "loss"):
        cells["loss"] = f"loss {figure(float(run.metrics['loss']))}"
    throughput = throughput_words(run.speed)
    if throughput is not None:
        cells["speed"] = throughput
    waits = run.speed.get("data_wait_share")
    if waits is not None:
        cells["wait"] = f"data wait {waits:.0%}"
    if gpu is not None:
        cells |= {f"gpu{place}": word for place, word in enumerate(gpu)}
    if "mfu" in run.speed:
        cells["mfu"] = f"mfu {run.speed['mfu']:.0%}"
    if "step_time_s" in run.speed:
        cells["step"] = f"a step {_ms(run.speed['step_time_s'])}"
    if _is_known(run, "lr"):
        cells["lr"] = f"lr {figure(float(run.metrics['lr']))}"
    return cells


def _that_fit(rows: Sequence[Mapping[str, str]], room: int) -> dict[str, int]:
    """Return the columns that fit into `room`, the most important first, with their widths."""
    kept: dict[str, int] = {}
    for key in _ORDER:
        size = max((len(row[key]) for row in rows if key in row), default=0)
        if size and size + len(_GAP) <= room:
            kept[key] = size
            room -= size + len(_GAP)
    return kept


_ORDER = ("eta", "loss", "speed", "wait", "gpu0", "mfu", "gpu1", "step", "gpu2", "gpu3", "lr")
