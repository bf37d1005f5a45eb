"""Shared parts of the commands: printing, tables, colours of states, and numbers as text.

Control characters are made visible in all output, so that no text of a file, a program or Slurm controls a terminal.
An exception's message, a log line or a metric's name may hold escape sequences. These overwrite earlier text, change
the window's title, or make some terminals type. Pipes are filtered too: `| less -R` ends at a terminal. Line feeds and
tabs stay, and so do the colours of a log.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.style import Style

from hpc_trainer.errors import ConfigError, visible
from hpc_trainer.operate.find import configured_runs_dir, find_sweep, list_sweeps
from hpc_trainer.record.layout import is_run_id
from hpc_trainer.record.metrics import WORK
from hpc_trainer.record.reading import told_few
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus

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


class VisibleConsole(Console):
    """Console of rich that makes control characters of the text visible; rich's own colours and movements pass."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as rich does, with control characters of text segments made visible."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(visible(text), style)


def console() -> Console:
    """Return a console for standard output; rich honours NO_COLOR and pipes. In a pipe, tables have full width."""
    out = unfiltered(sys.stdout)
    if out.isatty():
        return VisibleConsole(highlight=False, file=out)
    return VisibleConsole(highlight=False, file=out, width=int(os.environ.get("COLUMNS", "200")))


def say(text: str, lead: str = "") -> None:
    """Print a line without wrapping: `lead`, which may have markup for colour, and the text, printed literally."""
    console().print(lead + escape(text), soft_wrap=True)


def warn(status: SweepStatus) -> None:
    """Print unreadable files of a sweep on standard error, for commands whose output has no place for notes."""
    for fault in told_few(status.faults):
        print(f"Note: {fault}", file=sys.stderr)


def print_next(words: str) -> None:
    """Print the next useful command for copying: without wrapping and markup."""
    print(as_typed(f"Next: hpc-trainer {words}").rstrip())


def print_json(value: Any) -> None:
    """Print one JSON document on standard output; NaN and infinity, which JSON does not have, become null."""
    text = json.dumps(_finite(value), indent=2, allow_nan=False)
    print(text.replace("\x7f", "\\u007f"))  # the one control character that json.dumps leaves as it is


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse_names(verb: str, words: Sequence[str]) -> None:
    """Refuse names of sweeps and runs in place of overrides, with the command that the user may have meant.

    Raises:
        ConfigError: an argument is the name of a sweep or a run.
    """
    runs_dir = configured_runs_dir()
    for word in words:
        what, whose, looks = "a sweep", "its failed and interrupted runs", "status"
        if not find_sweep(runs_dir, word).exists:
            within = (other for other in list_sweeps(runs_dir) if is_run_id(word) and other.run(word).folder.is_dir())
            sweep = next(within, None)
            if sweep is None:
                continue
            what, whose, looks = f"a run of the sweep {sweep.name}", "it", "why"
        raise ConfigError(
            f"`{verb}` takes overrides KEY=VALUE, such as experiment=digits, and {word} is {what}. `hpc-trainer "
            f"{looks} {word}` shows its state; `hpc-trainer retry {word}` submits {whose} again."
        )


def state_markup(state: RunState) -> str:
    """Return the state with markup for its colour."""
    colour = _COLOURS.get(state)
    return f"[{colour}]{state.value}[/]" if colour else state.value


def state_style(state: RunState) -> str:
    """Return the name of the state's colour; an empty string if the state has none."""
    return _COLOURS.get(state, "")


def throughput_words(speed: Mapping[str, float]) -> str | None:
    """Return the throughput as `482k tokens/s`, or in samples/s or steps/s without tokens; None if it is not known."""
    return next((f"{short_number(speed[key])} {unit}" for key, unit in WORK.items() if key in speed), None)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str | RunState]], *, least: Sequence[Least] = (),
    short: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Print a plain table: a heading, one line per row, states in their colour.

    A column without any value is left out. On a terminal no line is wider than the terminal; in a pipe, for grep, lines
    keep their full width. rich's own tables take 1 ms a row to measure and wrap; these lines are written at once.

    Args:
        columns: the headings.
        rows: the cells; `-` means no value.
        least: columns that a narrow terminal may drop or cut, the least useful first (`fit_table`).
        short: shorter headings, for columns that are narrower than their headings.
    """
    told = [index for index in range(len(columns)) if not rows or any(row[index] != "-" for row in rows)]
    columns, rows = [columns[index] for index in told], [[row[index] for index in told] for row in rows]
    out = console()
    shown = [[cell.value if isinstance(cell, RunState) else one_line(cell) for cell in row] for row in rows]
    encoding = getattr(out.file, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name != "utf-8":
        shown = [[_in_letters_of(encoding, cell) for cell in row] for row in shown]
    texts = [[one_line(word) for word in columns], *shown]
    room = _room(out)
    kept, widths = fit_table(texts[0], shown, room, least)
    left_out = [column for index, column in enumerate(columns) if index not in kept]
    rows = [[row[index] for index in kept] for row in rows]
    texts[0] = [
        (short or {}).get(text, text) if index in kept and len(text) > widths[kept.index(index)] else text
        for index, text in enumerate(texts[0])
    ]
    lines = [
        [cut(text[index], width).ljust(width + GAP) for index, width in zip(kept, widths, strict=True)]
        for text in texts
    ]
    for line in lines:
        line[-1] = line[-1].rstrip()  # before the cell gets its colour
    if out.color_system is not None and not out.no_color:  # one rich text per line takes 0.1 ms: 1 s for 10,000 lines
        system = ColorSystem.STANDARD  # named colours: each terminal defines its own shades
        styles = {state: Style.parse(colour) for state, colour in _COLOURS.items()}
        lines[0] = [Style(bold=True).render(word, color_system=system) for word in lines[0]]
        for line, row in zip(lines[1:], rows, strict=True):
            for index, cell in enumerate(row):
                if isinstance(cell, RunState) and cell in styles:
                    line[index] = styles[cell].render(line[index], color_system=system)
    if left_out:
        hint = f"Columns left out: {', '.join(left_out)}. A wider terminal, or `| cat`, shows all."
        lines += [[line] for line in textwrap.wrap(hint, room)]
    out.file.write("".join("".join(line).rstrip() + "\n" for line in lines))


def terminal_width() -> int | None:
    """Return the width of the terminal that standard output goes to; None in a pipe."""
    room = _room(console())
    return None if room == sys.maxsize else room


def _room(out: Console) -> int:
    """Return the width of a line: the terminal's width; unlimited in a pipe."""
    if not out.file.isatty():
        return sys.maxsize
    if os.environ.get("COLUMNS", "").isdecimal() and out.width > 0:
        return out.width
    try:  # rich asks standard input first, which may be another terminal
        return os.get_terminal_size(out.file.fileno()).columns or out.width
    except OSError:
        return out.width


def counts_line(counts: dict[str, int]) -> str:
    """Return counts as text: `3 COMPLETED, 1 RUNNING`."""
    return ", ".join(f"{number} {state}" for state, number in sorted(counts.items())) or "no runs"


def short_duration(seconds: float | None) -> str:
    """Return a duration as `1h05m`, `3m20s` or `12s`; `-` if it is not known."""
    if seconds is None:
        return "-"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{secs:02d}s" if minutes else f"{secs}s"


def short_number(value: float) -> str:
    """Return a number with three digits: `0.52`, `87.3`, `1.23k`, `482k`, `1.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def figure(value: Any) -> str:
    """Return a float with four digits, and other values as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def axis_value(key: str, value: Any) -> Any:
    """Return a run's value on an axis as a table shows it; `checkpoint.resume_from` is shortened to the run's name."""
    is_path = key == "checkpoint.resume_from" and isinstance(value, str)
    return value.rstrip("/").rpartition("/")[2] if is_path else value


def gpu_hours(value: float) -> str:
    """Return GPU-hours as text: `9.333 GPU-hours`, `11,520 GPU-hours`."""
    return f"{value:,.0f} GPU-hours" if value >= 1000 else f"{value:.4g} GPU-hours"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM (`timeout 600 hpc-trainer ..`) and SIGHUP (a closed terminal) end started runs, as Ctrl-C does.

    By default these signals would end this process only, and the training would continue.
    """

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    heard = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN
    ]  # nohup
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Fitting of a table to the terminal: the least useful columns are dropped, then the longest cells are cut.

GAP = 2
"""Spaces between two columns."""
_USUAL, _NARROWEST, _LONGEST_AXIS = 28, 12, 20
_END = 19
_CUT = "…"
_RUN_ID = re.compile(r"-[0-9a-f]{10}\Z")
_FIGURE = re.compile(r"[-+]?[\d.,]*(e[-+]?\d+)?( (±|\+-) [\d.]+(e[-+]?\d+)?)?|nan|-?inf")
# A pair can be read in one way only: with \S+=\S+, time doubled with each `a=b=c`.
_PAIRS = re.compile(r"\S[^\s=]*=\S+( \S[^\s=]*=\S+)*( \(.*\))?")
_PAIR_ENDS = re.compile(r" (?=\S+=|\()")
Least = str | tuple[str, int]
"""Column that may be dropped, or (column, smallest useful width) of a column that may be cut."""


def _figures(cells: Sequence[str]) -> int:
    """Return the width of the longest cell if all are figures, which a cut would change; else 0."""
    return max(map(len, cells)) if all(map(_FIGURE.fullmatch, cells)) else 0


def fit_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, least: Sequence[Least] = ()
) -> tuple[list[int], list[int]]:
    """Return the indices of the shown columns and their widths; with the gaps, they take at most `width`.

    Args:
        columns: the headings.
        rows: the cells.
        width: width of the terminal.
        least: columns to drop or cut, the least useful first. If room remains, dropped and cut columns are restored,
            the most useful first.
    """
    sizes = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    kept = list(range(len(columns)))

    def over() -> int:
        return sum(sizes[index] for index in kept) + GAP * (len(kept) - 1) - width

    steps: list[Least] = [(columns[0], _USUAL), *least]  # the name of a row: its end distinguishes runs
    if any(_RUN_ID.search(row[0]) for row in rows):  # cut run ids before figures
        steps.append((columns[0], _END + 1))
    taken: list[tuple[int, int | None]] = []  # the column, and its size before it was cut; None: it was dropped
    for step in steps:
        name, narrow = (step, 0) if isinstance(step, str) else step
        index = columns.index(name) if name in columns else None
        if over() <= 0 or index not in kept:
            continue
        taken.append((index, sizes[index] if narrow else None))
        if narrow:
            sizes[index] = max(min(sizes[index], narrow), sizes[index] - over())
        else:
            kept.remove(index)
    for index, before in reversed(taken) if over() <= 0 else ():
        if before is None and over() + sizes[index] + GAP <= 0:
            kept.append(index)
        elif before is not None and index in kept:
            wider = min(before, sizes[index] - over())
            if wider == before or any(len(row[index]) > sizes[index] for row in rows):
                sizes[index] = wider  # a heading alone is shown in full or short
    kept.sort()
    least_size = [_NARROWEST] * len(sizes)
    if over() > 0 and rows:
        least_size = [max(_NARROWEST, _figures(cells)) for cells in zip(*rows, strict=True)]
    while over() > 0 and (wide := [place for place in kept if sizes[place] > least_size[place]]):
        widest = max(wide, key=lambda place: sizes[place])
        next_widest = max((sizes[place] for place in wide if sizes[place] < sizes[widest]), default=_NARROWEST)
        sizes[widest] = max(next_widest, sizes[widest] - over(), least_size[widest])
    while over() > 0 and len(kept) > 1:
        enough = [place for place in kept[1:] if sizes[place] + GAP >= over()]
        kept.remove(enough[-1] if enough else kept[-1])
    sizes[kept[0]] = min(sizes[kept[0]], width)
    return kept, [sizes[place] for place in kept]


def short_headings(headings: Sequence[str], others: Sequence[str] = ()) -> dict[str, str]:
    """Return the last part of headings such as OPTIM.LR, where no other heading is or ends with the same part."""
    last = [heading.rpartition(".")[2] for heading in headings]
    return {
        heading: part for heading, part in zip(headings, last, strict=True)
        if part and part != heading and last.count(part) == 1 and part not in others
    }  # fmt: skip


def narrow_axes(headings: Sequence[str], cells: Sequence[Sequence[str]], short: Mapping[str, str]) -> list[Least]:
    """Return the steps of `fit_table` that cut columns of axes: headings to their last part, and long texts.

    Args:
        headings: the headings of the axes.
        cells: the values of each axis.
        short: headings of columns that are narrower than their headings.
    """
    return [
        (heading, max([len(short.get(heading, heading)), *(min(len(text), _LONGEST_AXIS) for text in texts)]))
        for heading, texts in zip(headings, cells, strict=True)
    ]


def cut(text: str, size: int) -> str:
    """Return the text cut to `size` characters.

    Metrics keep the first complete pairs. A run's id keeps its end, which the user may type, and its beginning if there
    is room.
    """
    if len(text) <= size:
        return text
    if _RUN_ID.search(text):
        head = max(0, size - _END - 1)
        return f"{text[:head]}{_CUT}{text[len(text) - size + head + 1 :]}"
    if _PAIRS.fullmatch(text):
        ends = [match.start() for match in _PAIR_ENDS.finditer(text) if match.start() < size]
        whole = [end for end in ends if end + 2 <= size]
        if whole:
            return f"{text[: whole[-1]]} {_CUT}"
        if ends:
            return f"{text[: ends[0]]}{_CUT}"
    return text[: size - 1] + _CUT


_COLOUR = re.compile("(\x1b\\[[0-9;:]{0,60}m)")
_NO_COLOUR = "\x1b[0m"


_PLAIN = {"…": "~", "±": "+-", "≥": ">=", "≤": "<=", "×": "x", "µ": "u", "°": " deg", "━": "=", "╌": "-", "²": "^2"}


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """Return plain letters for characters that the terminal's encoding lacks, as a handler of encoding errors."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, "?") for letter in lacking), error.end


def _in_letters_of(encoding: str, text: str) -> str:
    """Return the text as a stream of this encoding prints it, which may be longer: `+-` for a plus-minus sign."""
    return text.encode(encoding, "hpc_trainer.plain_letters").decode(encoding)


def allow_any_encoding() -> None:
    """Let standard output and error take any text, also where the locale is not UTF-8."""
    codecs.register_error("hpc_trainer.plain_letters", _in_plain_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="hpc_trainer.plain_letters")


def one_line(text: str) -> str:
    """Return the text as `visible` does, with line feeds and tabs escaped too, for a cell of a table."""
    return text if text.isprintable() else visible(text).replace("\n", "\\n").replace("\t", "\\t")


def visible_log_line(line: str) -> str:
    """Return the line as `visible` does, but keep colours and bold, and end them with the line."""
    if "\x1b[" not in line:
        return visible(line)
    parts = _COLOUR.split(line)
    shown = "".join(part if index % 2 else visible(part) for index, part in enumerate(parts))
    return shown + (_NO_COLOUR if len(parts) > 1 else "")


class VisibleStream:
    """Standard output or error that makes control characters visible. `unfiltered` is the original stream."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """Write the text with visible control characters; return the length of the given text."""
        self.unfiltered.write(visible(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line as `write` does."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextlib.contextmanager
def visible_output() -> Iterator[None]:
    """Make control characters visible in everything that this process prints within the context."""
    before = sys.stdout, sys.stderr
    streams: list[Any] = [VisibleStream(unfiltered(stream)) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def as_typed(text: str) -> str:
    """Replace `hpc-trainer` in a text by the started program's path if PATH does not lead to it, as in `make demo`."""
    started, on_path = sys.argv[0], shutil.which("hpc-trainer")
    is_ours = os.path.basename(started) == "hpc-trainer" and os.path.exists(started)  # noqa: PTH110, PTH119
    if not is_ours or (on_path is not None and os.path.samefile(on_path, started)):  # noqa: PTH121
        return text
    return re.sub(r"(?<![\w/.-])hpc-trainer (?=[a-z-])", lambda _: f"{shlex.quote(started)} ", text)


def unfiltered(stream: Any) -> Any:
    """Return the stream below `VisibleStream`, for text that is visible already and has colours of hpc-trainer."""
    return stream.unfiltered if isinstance(stream, VisibleStream) else stream
