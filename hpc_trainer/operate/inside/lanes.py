"""Last actions of each rank as lanes on one time axis: SVG text, no scripts, colours of the page's style sheet."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from hpc_trainer.operate.inside.hang import open_collectives, seconds
from hpc_trainer.operate.report.charts import nice_ticks, number
from hpc_trainer.runs.monitoring.flight import Flight
from hpc_trainer.runtime.spans import Kind
from hpc_trainer.state.monitoring.ledger_words import WORDS

MOST_LANES = 32
_WIDTH, _LEFT, _RIGHT, _LANE, _GAP, _TOP, _BOTTOM = 1160, 120, 16, 34, 10, 8, 46
_LABEL_PX = 70
# The view starts before the oldest span still open at the end, by this fraction, and covers at least `_LEAST_S`.
_BEFORE, _LEAST_S, _NEWEST = 0.15, 2.0, 20

LANES_STYLE = (
    ".lane{fill:none;stroke:var(--line)}.entered{stroke:var(--ink);stroke-width:1}"
    ".open{fill:none;stroke:var(--bad);stroke-width:2;stroke-dasharray:5 3}"
    "svg text.name{fill:var(--ink);font-weight:600}svg text.in{fill:#fff;font-size:11px;font-weight:600}"
    "svg text.bad{fill:var(--bad);font-weight:600}"
    "pre{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;"
    "font-size:12.5px;line-height:1.45}summary{cursor:pointer;overflow-wrap:anywhere}.verdict{font-size:18px}"
    "li{overflow-wrap:anywhere}"
)
"""Rules that a page with lanes adds to its style sheet."""


def lanes(flights: Mapping[int, Flight]) -> str:
    """Draw a lane for each rank, at most 32; "" without ranks. Times are seconds before the newest record."""
    shown = list(flights.values())[:MOST_LANES]
    if not shown:
        return ""
    end = max(flight.time for flight in shown)
    begin = _begin(shown, end)
    height = _TOP + len(shown) * (_LANE + _GAP) + _BOTTOM
    body = [_axis(begin, end, height)]
    for place, flight in enumerate(shown):
        body.append(_lane(flight, _TOP + place * (_LANE + _GAP), begin, end))
    name = f"what {len(shown)} rank(s) did in the last {seconds(end - begin)}"
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{name}"><title>{name}</title>'
    kinds = {span.kind for flight in shown for span in flight.spans if span.end is None or span.end > begin}
    return f"{head}{''.join(body)}</svg>{_legend(kinds)}"


def _begin(flights: Sequence[Flight], end: float) -> float:
    """Return the start of the view: some time before the oldest open collective or innermost open span."""
    starts = [call.begin for flight in flights for call in open_collectives(flight)]
    for flight in flights:
        inner = [span.begin for span in flight.spans if span.end is None]
        starts += inner[-1:] if len(inner) > 1 else []
    if not starts:
        starts = [span.begin for flight in flights for span in flight.spans[-_NEWEST:] if span.end is not None]
    oldest = min(starts, default=end - _LEAST_S)
    return min(oldest - _BEFORE * (end - oldest), end - _LEAST_S)


def _x(time: float, begin: float, end: float) -> float:
    share = (min(max(time, begin), end) - begin) / (end - begin)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _axis(begin: float, end: float, height: int) -> str:
    bottom = height - _BOTTOM
    parts = []
    for tick in nice_ticks(begin - end, 0.0, 8):
        if tick < begin - end - 1e-9 or tick > 1e-9:
            continue
        x = f"{_x(end + tick, begin, end):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick mid" x="{x}" y="{bottom + 18}">{html.escape(number(tick))}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="label mid" x="{middle:.0f}" y="{height - 8}">seconds before the end</text>')
    return "".join(parts)


def _lane(flight: Flight, top: float, begin: float, end: float) -> str:
    name = f"rank {flight.rank}" + ("" if flight.step is None else f" · {flight.step}")
    parts = [f'<text class="name end" x="{_LEFT - 10}" y="{top + _LANE / 2}" dy="0.35em">{html.escape(name)}</text>']
    # Inner spans are drawn on top of outer ones.
    for span in sorted(flight.spans, key=lambda span: span.begin):
        until = flight.time if span.end is None else span.end
        if until <= begin:
            continue
        x, width = _x(span.begin, begin, end), _x(until, begin, end) - _x(span.begin, begin, end)
        word = _word(span.kind)
        step = "" if span.step is None else f", step {span.step + 1}"
        told = html.escape(f"{word}{step}: {seconds(until - span.begin)}")
        parts.append(
            f'<rect class="{_class(span.kind)}" x="{x:.1f}" y="{top}" width="{max(width, 0.5):.1f}" height="{_LANE}">'
            f"<title>{told}</title></rect>"
        )
        if width >= _LABEL_PX:
            parts.append(f'<text class="in" x="{x + 6:.1f}" y="{top + 11}" dy="0.35em">{html.escape(word)}</text>')
    for collective in flight.collectives:
        if collective.begin < begin:
            continue
        x = _x(collective.begin, begin, end)
        told = html.escape(f"{collective.name}, the {collective.seq}. of {collective.group}")
        parts.append(
            f'<line class="entered" x1="{x:.1f}" x2="{x:.1f}" y1="{top + _LANE - 9}" y2="{top + _LANE}">'
            f"<title>{told}</title></line>"
        )
    for collective in list(open_collectives(flight))[:1]:
        x, until = _x(collective.begin, begin, end), _x(flight.time, begin, end)
        words = html.escape(f"in {collective.name} {collective.seq} for {seconds(flight.time - collective.begin)}")
        parts.append(
            f'<rect class="open" x="{x:.1f}" y="{top + 1}" width="{max(until - x, 1):.1f}" height="{_LANE - 2}">'
            f"<title>{words}</title></rect>"
        )
        if until - x >= 3 * _LABEL_PX:
            parts.append(f'<text class="in" x="{x + 6:.1f}" y="{top + _LANE - 9}" dy="0.35em">{words}</text>')
    return "".join(parts)


def _known(kind: str) -> Kind | None:
    try:
        return Kind(kind)
    except ValueError:
        return None


def _class(kind: str) -> str:
    known_kind = _known(kind)
    return "k-unknown" if known_kind is None else f"k-{known_kind.value}"


def _word(kind: str) -> str:
    known_kind = _known(kind)
    return kind if known_kind is None else WORDS[known_kind]


def _legend(kinds: set[str]) -> str:
    items = "".join(
        f'<li><svg class="box" viewBox="0 0 12 12"><rect class="{_class(kind)}" width="12" height="12"/></svg>'
        f"{html.escape(_word(kind))}</li>"
        for kind in sorted(kinds)
    )
    more = (
        '<li><svg class="box" viewBox="0 0 12 12"><line class="entered" x1="6" x2="6" y1="1" y2="11"/></svg>'
        'a collective is entered</li><li><svg class="box" viewBox="0 0 12 12"><rect class="open" x="1" y="1" '
        'width="10" height="10"/></svg>in a collective at the end</li>'
    )
    return f'<ul class="legend">{items}{more}</ul>'
