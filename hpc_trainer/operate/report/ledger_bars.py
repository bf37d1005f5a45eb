"""Use of each run's time as a stacked bar: no scripts, colours from a style sheet. All text is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from hpc_trainer.operate.report.charts import percent
from hpc_trainer.operate.report.data import RunReport
from hpc_trainer.runtime.spans import Kind
from hpc_trainer.state.monitoring.ledger import RunLedger
from hpc_trainer.state.monitoring.ledger_words import WORDS, duration, ledger_line

_MOST_RUNS = 40
_WIDTH, _HEIGHT = 600, 18
_NARROW = 34
"""Width in pixels that the label of a share needs."""
_UNKNOWN = "unknown"
# (light, dark): work in blue and green, losses that a user can reduce in warm colours, the rest grey.
_COLOURS = {
    Kind.step: ("#157f5b", "#2f9e77"), Kind.program: ("#157f5b", "#2f9e77"), Kind.data_wait: ("#cf4a12", "#e0703c"),
    Kind.redone: ("#b3315f", "#d45585"), Kind.compile: ("#6e56cf", "#8d78e6"), Kind.evaluation: ("#0969da", "#4593e8"),
    Kind.save_stall: ("#9a6b00", "#c08f2a"), Kind.start_up: ("#5b6570", "#7d8894"),
    Kind.imports: ("#7b8590", "#67727d"), Kind.rendezvous: ("#0b8aa8", "#3aa7c2"), Kind.restore: ("#a43c9f", "#c068bb"),
    Kind.hang: ("#c22d3a", "#e5626b"),
    Kind.shutdown: ("#949ea8", "#525d68"), _UNKNOWN: ("#a9b1b9", "#363f48"),
}  # fmt: skip


def _rules(shade: int) -> str:
    return "".join(f".k-{_name(kind)}{{fill:{colours[shade]}}}" for kind, colours in _COLOURS.items())


def _name(kind: str) -> str:
    return kind.value if isinstance(kind, Kind) else kind


LEDGER_STYLE = (
    "table.ledger td{border:0;padding:3px 8px}table.ledger td.bar{width:60%;min-width:320px}"
    "svg.bar text{fill:#fff;font-size:11px;font-weight:600}svg.box{flex:none;width:12px;height:12px}"
    f"{_rules(0)}@media (prefers-color-scheme:dark){{{_rules(1)}}}"
)


def ledger_section(runs: Sequence[RunReport]) -> str:
    """Return a bar for each run with a ledger, at most 40: those with the longest allocations; else an empty string."""
    found = [(run.run_id, run.ledger) for run in runs if run.ledger is not None and run.ledger.elapsed_s > 0]
    if not found:
        return ""
    longest = {name for name, _ in sorted(found, key=lambda pair: -pair[1].elapsed_s)[:_MOST_RUNS]}
    shown = [(name, ledger) for name, ledger in found if name in longest]
    kinds = [kind for kind in WORDS if any(kind in ledger.seconds for _, ledger in shown)]
    is_unknown = any(ledger.unknown_s > 0 for _, ledger in shown)
    rows = "".join(_row(run_id, ledger) for run_id, ledger in shown)
    title = "Where the time went" if len(found) <= _MOST_RUNS else f"Where the time went: {_MOST_RUNS} of {len(found)}"
    return (
        f'<h2>{title}</h2><p class="soft">Each second that a run had its nodes, all attempts together; goodput is the '
        f'share of steps that lasted.</p><div class="wide"><table class="ledger">{rows}</table></div>'
        f"{_legend(kinds, is_unknown=is_unknown)}\n"
    )


def _row(run_id: str, ledger: RunLedger) -> str:
    goodput = "-" if ledger.goodput is None else percent(ledger.goodput)
    summary = f"{duration(ledger.elapsed_s)}, {len(ledger.attempts)} attempt(s), goodput {goodput}"
    name = html.escape(run_id).replace("-", "-<wbr>")
    return f'<tr><td class="id">{name}</td><td class="bar">{_bar(ledger)}</td><td>{summary}</td></tr>'


def _bar(ledger: RunLedger) -> str:
    parts: list[tuple[str, str, float]] = [
        (kind.value, word, ledger.seconds.get(kind, 0.0)) for kind, word in WORDS.items()
    ]
    parts.append((_UNKNOWN, _UNKNOWN, ledger.unknown_s))
    drawn, x = "", 0.0
    for name, word, seconds in parts:
        width = _WIDTH * seconds / ledger.elapsed_s
        if width <= 0:
            continue
        share = percent(seconds / ledger.elapsed_s)
        drawn += f'<rect class="k-{name}" x="{x:.2f}" y="0" width="{width:.2f}" height="{_HEIGHT}">'
        drawn += f"<title>{word}: {duration(seconds)}, {share}</title></rect>"
        if width >= _NARROW:
            middle = f"{seconds / ledger.elapsed_s:.0%}"
            drawn += f'<text class="mid" x="{x + width / 2:.1f}" y="{_HEIGHT / 2}" dy="0.35em">{middle}</text>'
        x += width
    line = html.escape(ledger_line(ledger) or "")
    return f'<svg class="bar" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{line}">{drawn}</svg>'


def _legend(kinds: Sequence[Kind], *, is_unknown: bool) -> str:
    named = [(kind.value, WORDS[kind]) for kind in kinds] + ([(_UNKNOWN, _UNKNOWN)] if is_unknown else [])
    items = "".join(
        f'<li><svg class="box" viewBox="0 0 12 12"><rect class="k-{name}" width="12" height="12"/></svg>{word}</li>'
        for name, word in named
    )
    return f'<ul class="legend">{items}</ul>'
