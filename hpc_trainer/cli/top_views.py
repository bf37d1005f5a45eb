"""Texts and verbs of `hpc-trainer top`, without its screen: the sweep's status, curves, logs, explanations.

A key that changes something runs the verb of that name in a process of its own, so its effect and its messages are
those of the verb.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from hpc_trainer.cli.common import counts_line, figure, one_line, short_duration, state_style
from hpc_trainer.cli.live import end_note
from hpc_trainer.config.schema.output import CheckpointConfig, compared_by
from hpc_trainer.errors import HpcTrainerError, visible
from hpc_trainer.operate.find import list_sweeps
from hpc_trainer.operate.logs import log_files, read_logs
from hpc_trainer.operate.report.data import curves_of
from hpc_trainer.operate.results import kept_by
from hpc_trainer.operate.waits import pause_s
from hpc_trainer.operate.why import explain
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.metrics import sampled_metrics
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import find_axes
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.runtime.start import start_words

# A sweep of this machine would be read twice a second, and one without runs at work need not be.
_LEAST_PAUSE_S, _IDLE_PAUSE_S = 2.0, 10.0
_MOST_SWEEPS, _MOST_RUNS = 100, 1_000
_LOG_LINES, _RECORDS = 200, 400
_VERB_LIMIT_S = 120
_NOTES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Line of the table of runs."""

    run_id: str
    cells: Sequence[Text]


COLUMNS = ("run", "state", "step", "ETA", "metric", "note")


def rows_of(status: SweepStatus) -> list[Row]:
    """Return a line for each run: those at work first, then those that failed, those that wait, and the others."""
    runs = [status.run(run_id) for run_id in status.specs]
    axes = find_axes([run.spec for run in runs])

    def place(run: RunStatus) -> int:
        return 0 if run.state is RunState.RUNNING else 1 if run.state.has_failed else 2 if run.state.is_active else 3

    chosen = sorted(runs, key=place)[:_MOST_RUNS]
    kept = kept_by(run.spec for run in runs)
    return [Row(run_id=run.run_id, cells=_cells(run, axes[run.run_id], kept)) for run in chosen]


def _cells(run: RunStatus, axes: dict[str, str], kept: CheckpointConfig) -> list[Text]:
    name = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in axes.items()) or run.run_id
    known = {key for key, value in run.metrics.items() if value is not None}
    metric = compared_by(kept, known)
    value = "" if metric is None else f"{metric} {figure(float(run.metrics[metric]))}"
    eta = short_duration(run.eta_s) if run.eta_s is not None else ""
    note = "" if metric is not None and run.state is RunState.COMPLETED and run.warning is None else end_note(run)
    texts = [one_line(name), run.state.value, run.progress, eta, value, one_line(note)[:_NOTES]]
    styles = ["", state_style(run.state), "", "", "", "dim"]
    return [Text(text, style=style, no_wrap=True) for text, style in zip(texts, styles, strict=True)]


def sweep_names(folder: Path) -> list[SweepPaths]:
    """Return the paths of the newest sweeps in `folder`, the newest first."""
    return [SweepPaths(sweep.folder.absolute()) for sweep in list_sweeps(folder)[:_MOST_SWEEPS]]


def next_pause_s(status: SweepStatus | None) -> float:
    """Return the seconds until the next look."""
    if status is None or not status.has_active:
        return _IDLE_PAUSE_S
    return max(_LEAST_PAUSE_S, pause_s(status))


def look(sweep: SweepPaths) -> SweepStatus | str:
    """Return the sweep's status, or the message of the error that prevents reading it."""
    try:
        return read_status(sweep, is_look=True)
    except (HpcTrainerError, OSError) as error:
        return str(error)


def head_of(status: SweepStatus) -> str:
    """Return the line above the table of runs."""
    counts = counts_line(status.counts)
    silence = "" if status.silence is None else f"  {status.silence}"
    return f"{status.sweep.name}: {counts}  (read {time.strftime('%H:%M:%S')}){visible(silence)}"


# --- what is shown of one run ---


def log_text(status: SweepStatus, run: RunStatus) -> Text:
    """Return the last lines of the run's newest log."""
    files = log_files(status, run)[-1:]
    lines = [visible(line) for line in read_logs(files, _LOG_LINES)] if files else ["no log yet"]
    return Text("\n".join(lines))


def why_text(status: SweepStatus, run: RunStatus) -> Text:
    """Return the explanation of the run, without asking Slurm."""
    why = explain(status, run, asks_slurm=False)
    text = Text.assemble(
        (f"{run.run_id}  ", "bold"), (run.state.value, state_style(run.state)), "\n", why.verdict, "\n"
    )
    for title, lines in (("Because", why.evidence), ("Do", why.advice), ("Story", why.timeline)):
        if lines:
            text.append(f"\n{title}:\n", style="bold")
            text.append("".join(f"  {visible(line)}\n" for line in lines))
    return text


def curves_text(status: SweepStatus, run: RunStatus, width: int, height: int) -> Text:
    """Return the run's curves as text, at most four, side by side where there is room."""
    records, _ = sampled_metrics(status.sweep.run(run.run_id).metrics, _RECORDS, Faults())
    curves = curves_of(records, _RECORDS)
    first = ("loss", "eval_loss", "eval_accuracy")
    names = [*(name for name in first if name in curves), *(name for name in curves if name not in first)][:4]
    if not names:
        return Text("no metrics yet")
    beside = max(1, min(len(names), width // 40))
    shown = names[: beside * max(1, height // 8)]
    rows = -(-len(shown) // beside)
    size, lines = width // beside - 2, max(3, height // rows - 2)
    plots = [_plot(name, curves[name], size, lines) for name in shown]
    parts = [plots[at : at + beside] for at in range(0, len(plots), beside)]
    return Text("\n".join("  ".join(pieces) for part in parts for pieces in zip(*part, strict=True)), no_wrap=True)


_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character's dots by column and row, above 0x2800."""


def _plot(name: str, curve: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Return a curve as lines of Braille characters, below a line with its name, range and last value."""
    xs, ys = [x for x, _ in curve], [y for _, y in curve]
    low, high = min(ys), max(ys)
    last = f"{one_line(name)}: {figure(ys[-1])}"
    ranged = f"{last}, from {figure(low)} to {figure(high)}"
    stepped = f"{ranged}, step {xs[0]:g} to {xs[-1]:g}"
    head = next((text for text in (stepped, ranged) if len(text) <= width), last)
    dots = [[0] * width for _ in range(height)]

    def place(x: float, y: float) -> tuple[int, int]:
        across = (x - xs[0]) / ((xs[-1] - xs[0]) or 1)
        upward = (y - low) / ((high - low) or 1)
        return round(across * (2 * width - 1)), round((1 - upward) * (4 * height - 1))

    places = [place(x, y) for x, y in curve]
    for (x, y), (to_x, to_y) in itertools.pairwise([*places[:1], *places]):
        count = max(abs(to_x - x), abs(to_y - y), 1)
        for step in range(count + 1):
            across, down = x + (to_x - x) * step // count, y + (to_y - y) * step // count
            dots[down // 4][across // 2] |= _DOTS[across % 2][down % 4]
    return [head[:width].ljust(width), *("".join(chr(0x2800 + bits) for bits in row) for row in dots)]


# --- verbs ---


def do_verb(verb: str, sweep: SweepPaths, run_id: str | None) -> str:
    """Run a verb on a run, or on the whole sweep, and return the last lines that it printed."""
    name = sweep.name if run_id is None else f"{sweep.name}/{run_id}"
    command = [sys.executable, *start_words("hpc_trainer.cli.main"), verb, name, "--runs-dir", str(sweep.folder.parent)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_VERB_LIMIT_S, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{verb} {name}: no answer in {_VERB_LIMIT_S} s"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return visible("\n".join(lines[-4:])) or f"{verb} {name}: exit code {done.returncode}"
