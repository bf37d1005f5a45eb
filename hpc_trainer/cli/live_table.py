"""Text of a live view of runs: all figures of one run, or a line for each of several, as wide as the terminal.

`cli/live.py` draws the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.text import Text

from hpc_trainer.cli.common import cut, figure, short_duration, state_style, throughput_words
from hpc_trainer.cli.terminal import one_line
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import RunStatus

_BAR, _WIDE_BAR = 12, 40
_SHORTEST_ID = 16
_NOTE = 20
_FIGURES = 60
"""Width that must be left beside the axes to show them. The rule uses the terminal's width only, not the figures of a
look, or columns would come and go."""
_GAP = "  "


def table_of(
    runs: Sequence[RunStatus], gpus: Mapping[str, Sequence[str]], *, width: int, height: int,
    axes: Mapping[str, Mapping[str, str]] = {},
) -> Text:  # fmt: skip
    """Return the view for a terminal of this size: at most as wide, and less high, or it would scroll at each look.

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
    words = [f"{key} {figure(float(run.metrics[key]))}" for key in ("loss", "lr") if _is_known(run, key)]
    throughput = throughput_words(speed)
    words += [throughput] if throughput is not None else []
    if "step_time_s" in speed:
        p95 = f" (p95 {_ms(speed['step_time_p95_s'])})" if "step_time_p95_s" in speed else ""
        words.append(f"a step {_ms(speed['step_time_s'])}{p95}")
    words += [f"data wait {speed['data_wait_share']:.0%}"] if "data_wait_share" in speed else []
    if "mfu" in speed or has_gpu:
        words.append(f"mfu {speed['mfu']:.0%}" if "mfu" in speed else "mfu unknown")
    return words


def _is_known(run: RunStatus, metric: str) -> bool:
    return run.metrics.get(metric) is not None  # a heartbeat may have null


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _packed(words: Sequence[str], width: int) -> list[Text]:
    """Return the words in lines that are as full as `width` allows."""
    lines: list[str] = []
    for word in words:
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
    """Return the beginning of each run's line, all equally wide: its id, cut alike at every look, and its axes."""
    longest = max(len(run.run_id) for run in runs)
    size = min(longest, max(_SHORTEST_ID, width // 4))
    names = {run.run_id: cut(run.run_id, size).ljust(size) for run in runs}
    words = {run_id: " ".join(f"{key}={value}" for key, value in row.items()) for run_id, row in axes.items()}
    more = max((len(words.get(run_id, "")) for run_id in names), default=0)
    if not more or size + len(_GAP) + more + _FIGURES > width:
        return names
    return {run_id: name + _GAP + one_line(words.get(run_id, "")).ljust(more) for run_id, name in names.items()}


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
