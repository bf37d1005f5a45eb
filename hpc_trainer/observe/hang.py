"""Flight records of all ranks of an attempt: which rank never entered a collective, and a drawing of the last seconds.

The lanes are SVG text without scripts, with the colours of the page's style sheet.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_trainer.observe.flight import Collective, Flight, FlightSpan, read_flights
from hpc_trainer.operate.report.charts import nice_ticks, number
from hpc_trainer.operate.report.page import table
from hpc_trainer.operate.run_page import PagePart, folded, html_list
from hpc_trainer.record.journal import read_heartbeat
from hpc_trainer.record.ledger import WORDS, Kind
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus

# Further ranks are counted, not listed.
_LISTED = 6
# Clause for each kind of span; "for 312 s" follows the clause.
_DID = {
    "data_wait": "it waited for data", "step": "it was in a step", "evaluation": "it was in an evaluation",
    "save_stall": "it was at a save", "restore": "it read a checkpoint", "compile": "it compiled",
    "rendezvous": "it waited for the other ranks to start", "start_up": "it was starting", "imports": "it was starting",
    "shutdown": "it was leaving",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Result of the joint reading. `says` is a sentence, or None if the records explain nothing.

    `lines` has the last action of each rank, one line per rank. `rank` is the rank to look at; None if there is no
    single one.
    """

    says: str | None
    lines: Sequence[str]
    rank: int | None = None


def join(flights: Mapping[int, Flight]) -> Joined:
    """Join the records of one attempt, by rank; a killed rank has no record."""
    if not flights:
        return Joined(says=None, lines=())
    world = max(flight.world_size for flight in flights.values())
    lines = [_last_activity(flight) for flight in list(flights.values())[:_LISTED]]
    if len(flights) > _LISTED:
        lines.append(f"and {len(flights) - _LISTED} more ranks")
    says, rank = _verdict(flights, world)
    return Joined(says=says, lines=lines, rank=rank)


def _verdict(flights: Mapping[int, Flight], world: int) -> tuple[str | None, int | None]:
    """Return the sentence, and the rank to look at."""
    if world == 1:
        flight = flights[min(flights)]
        return (None if flight.error is not None else f"{_name(flight)}: {_doing(flight)}."), flight.rank
    waited = _waited_in(flights)
    silent = [rank for rank in range(world) if rank not in flights]
    behind = _behind(flights)
    if behind is not None:
        flight, group, seq = behind
        others = [
            flight for flight in flights.values() if (collective := _entered(flight, group, seq)) and collective.is_open
        ]
        if others:
            entered = _entered(others[0], group, seq)
            assert entered is not None
            waiting = f"{_described(entered)}, in which {_listed(others)} waited"
            return f"{_name(flight)} never entered {waiting}: {_doing(flight)}.", flight.rank
    if silent:
        left = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {_numbers(silent)}"
        wait = "" if waited is None else f" {_listed(waited[1])} waited in {_described(waited[0])}."
        why = "killed, lost with the node, with Python's lock held, or damaged"
        return f"{left} left no record that can be read: {why}.{wait}", silent[0] if len(silent) == 1 else None
    mixed = _mixed_up(flights)
    if mixed is not None:
        return mixed, None
    if waited is not None and len(waited[1]) == len(flights):
        stuck = "the network, or the library that moves the data, is stuck"
        return f"all {world} ranks are in {_described(waited[0])}: {stuck}.", None
    return None, None


def _behind(flights: Mapping[int, Flight]) -> tuple[Flight, str, int] | None:
    """Return the rank that others wait for, with the group and number of the collective that it never entered.

    If several ranks are behind, the choice is one that waits in no collective itself: a rank that waits in another
    group is behind because of yet another rank.
    """
    behind, seqs = [], {rank: _last_seqs(flight) for rank, flight in flights.items()}
    for group in dict.fromkeys(group for numbers in seqs.values() for group in numbers):
        # Every rank belongs to the default group; a rank belongs to another group if it has collectives in that group.
        last = {rank: numbers.get(group, 0) for rank, numbers in seqs.items() if group in numbers or "default" in group}
        top = max(last.values(), default=0)
        behind += [(flights[rank], group, seq + 1) for rank, seq in last.items() if seq < top]
    if not behind:
        return None
    return min(
        behind,
        key=lambda lagging: (
            _is_waiting(lagging[0]),
            lagging[0].collectives[-1].begin if lagging[0].collectives else 0,
        ),
    )


def _last_seqs(flight: Flight) -> dict[str, int]:
    """Return the number of the last collective in each group; 0 if the group had messages only."""
    last: dict[str, int] = {}
    for collective in flight.collectives:
        last[collective.group] = max(last.get(collective.group, 0), 0 if collective.is_p2p else collective.seq)
    return last


def _entered(flight: Flight, group: str, seq: int) -> Collective | None:
    matches = (call for call in flight.collectives if (call.group, call.seq, call.is_p2p) == (group, seq, False))
    return next(matches, None)


def _is_waiting(flight: Flight) -> bool:
    return any(collective.is_open for collective in flight.collectives)


def _waited_in(flights: Mapping[int, Flight]) -> tuple[Collective, list[Flight]] | None:
    """Return the collective that most ranks are in, and these ranks; None if no rank is in one."""
    ranks: dict[tuple[str, int, bool], list[tuple[Collective, Flight]]] = {}
    for flight in flights.values():
        oldest = next((collective for collective in flight.collectives if collective.is_open), None)
        if oldest is not None:
            ranks.setdefault((oldest.group, oldest.seq, oldest.is_p2p), []).append((oldest, flight))
    if not ranks:
        return None
    most = max(ranks.values(), key=len)
    return most[0][0], [flight for _, flight in most]


def _mixed_up(flights: Mapping[int, Flight]) -> str | None:
    """Return a sentence if ranks call different collectives with the same number: their code does not agree."""
    first: dict[tuple[str, int], tuple[Flight, Collective]] = {}
    for flight in flights.values():
        for collective in flight.collectives:
            if not collective.is_open or collective.is_p2p:
                continue
            other = first.setdefault((collective.group, collective.seq), (flight, collective))
            if (other[1].name, other[1].shape) != (collective.name, collective.shape):
                return (
                    f"{_name(other[0])} is in {_described(other[1])}, and {_name(flight)} in the same place in "
                    f"{collective.name} of {collective.shape or 'nothing'}: the ranks run different code."
                )
    return None


def _name(flight: Flight) -> str:
    return f"rank {flight.rank} on {flight.node}"


def _described(collective: Collective) -> str:
    """Return a collective in words: `the 812th collective (all-reduce, 4.2 MB, step 41)`."""
    of = [collective.name.replace("_", "-"), size(collective.num_bytes)]
    if collective.step is not None:
        at = (
            f"the evaluation after step {collective.step - 1}"
            if collective.during == "evaluation"
            else f"step {collective.step}"
        )
        of.append(at)
    what = "message" if collective.is_p2p else "collective"
    where = "" if "default" in collective.group else f" of group {collective.group}"
    return f"the {_ordinal(collective.seq)} {what}{where} ({', '.join(of)})"


def _doing(flight: Flight) -> str:
    """Return a clause on the rank's activity and its place in the code; for a failed rank, its error."""
    at = "" if flight.frame is None else f", at {flight.frame}"
    if flight.error is not None:
        return f"it ended with {flight.error}{at}"
    span = last_span(flight)
    if span is None:
        return f"its last activity is unknown{at}"
    did = _DID.get(span.kind, f"it was at {span.kind}")
    return f"{did} for {seconds((flight.time if span.end is None else span.end) - span.begin)}{at}"


def last_span(flight: Flight) -> FlightSpan | None:
    """Return the innermost span that the rank was in, else its newest span; None without spans."""
    return max(flight.spans, key=lambda span: (span.end is None, span.begin), default=None)


def _last_activity(flight: Flight) -> str:
    newest = next((call for call in reversed(flight.collectives) if not call.is_p2p), None)
    step = "" if flight.step is None else f" after step {flight.step}"
    last = ""
    if newest is not None:
        since = f", for {seconds(flight.time - newest.begin)}" if newest.is_open else ""
        last = f"; {'in' if newest.is_open else 'last'} {_described(newest)}{since}"
    return f"{_name(flight)}{step}: {_doing(flight)}{last}"


def _listed(flights: Sequence[Flight]) -> str:
    if len(flights) == 1:
        return _name(flights[0])
    return f"ranks {_numbers([flight.rank for flight in flights])}"


def _numbers(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_LISTED]))
    return shown if len(ranks) <= _LISTED else f"{shown} and {len(ranks) - _LISTED} more"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def size(num_bytes: int) -> str:
    """Return a number of bytes with a unit: `4.2 MB`."""
    for unit, letter in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {letter}"
    return f"{num_bytes} bytes"


def seconds(value: float) -> str:
    """Return a time with its unit: `312 s`, `0.41 s`."""
    return f"{value:.0f} s" if value >= 10 else f"{max(0.0, value):.2g} s"


def open_collectives(flight: Flight) -> Iterator[Collective]:
    """Return the collectives that the rank had entered and not left when the record was written."""
    return (collective for collective in flight.collectives if collective.is_open)


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
        title = html.escape(f"{word}{step}: {seconds(until - span.begin)}")
        parts.append(
            f'<rect class="{_class(span.kind)}" x="{x:.1f}" y="{top}" width="{max(width, 0.5):.1f}" height="{_LANE}">'
            f"<title>{title}</title></rect>"
        )
        if width >= _LABEL_PX:
            parts.append(f'<text class="in" x="{x + 6:.1f}" y="{top + 11}" dy="0.35em">{html.escape(word)}</text>')
    for collective in flight.collectives:
        if collective.begin < begin:
            continue
        x = _x(collective.begin, begin, end)
        title = html.escape(f"{collective.name}, the {collective.seq}. of {collective.group}")
        parts.append(
            f'<line class="entered" x1="{x:.1f}" x2="{x:.1f}" y1="{top + _LANE - 9}" y2="{top + _LANE}">'
            f"<title>{title}</title></line>"
        )
    for collective in list(open_collectives(flight))[:1]:
        x, until = _x(collective.begin, begin, end), _x(flight.time, begin, end)
        title = html.escape(f"in {collective.name} {collective.seq} for {seconds(flight.time - collective.begin)}")
        parts.append(
            f'<rect class="open" x="{x:.1f}" y="{top + 1}" width="{max(until - x, 1):.1f}" height="{_LANE - 2}">'
            f"<title>{title}</title></rect>"
        )
        if until - x >= 3 * _LABEL_PX:
            parts.append(f'<text class="in" x="{x + 6:.1f}" y="{top + _LANE - 9}" dy="0.35em">{title}</text>')
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


# States without anything to explain: the run ended as it should.
_AT_PEACE = (RunState.COMPLETED, RunState.CANCELLED)
# Seconds by which the clocks of two nodes may differ.
_CLOCKS_S = 30.0
_COLLECTIVES, _RANKS_LISTED = 6, 8


def flights_of(status: SweepStatus, run: RunStatus) -> dict[int, Flight]:
    """Return the flight records of the newest attempt's end, by rank; {} if there are none or the run is well."""
    newest = run.attempts[-1] if run.attempts else None
    if newest is None or run.state in _AT_PEACE or (run.state.is_active and not newest.has_ended):
        return {}
    paths = status.sweep.run(run.run_id)
    flights = read_flights(paths, newest.attempt, status.faults_of(run.run_id))
    # A rank that was silent for long and then continued has left a record that does not describe the end.
    beat = float(read_heartbeat(paths.heartbeat, Faults()).get("time", 0.0))
    return {rank: flight for rank, flight in flights.items() if flight.time > beat - _CLOCKS_S}


def page_part(status: SweepStatus, run: RunStatus) -> PagePart:
    """Return the sections of a run's page on the last moments of its ranks."""
    flights = flights_of(status, run)
    return PagePart(before_logs=last_moments(flights), style=LANES_STYLE)


def last_moments(flights: Mapping[int, Flight]) -> str:
    """Return the sections on what ranks did last and where their code was; an empty string without records."""
    return _last_moments(flights) + _stacks(flights)


def _last_moments(flights: Mapping[int, Flight]) -> str:
    if not flights:
        return ""
    more = "" if len(flights) <= MOST_LANES else f" The first {MOST_LANES} of {len(flights)} ranks."
    return (
        f'<h2>What the ranks did last</h2><p class="soft">The newest step of each rank is beside its name.{more}</p>'
        f"<figure>{lanes(flights)}</figure>{html_list(join(flights).lines)}{_collectives(flights)}\n"
    )


def _collectives(flights: Mapping[int, Flight]) -> str:
    rows = []
    for flight in list(flights.values())[:_RANKS_LISTED]:
        for call in flight.collectives[-_COLLECTIVES:]:
            what = f"{call.name}{' (to one rank)' if call.is_p2p else ''}"
            state = f"in it for {seconds(flight.time - call.begin)}" if call.is_open else "over"
            rows.append(
                [f"rank {flight.rank}", call.group, str(call.seq), what, call.shape or "-", size(call.num_bytes),
                 "-" if call.step is None else str(call.step), seconds(flight.time - call.begin), state]
            )  # fmt: skip
    if not rows:
        return ""
    columns = ["Rank", "Group", "Number", "Collective", "Tensors", "Size", "Step", "Before the end", "State"]
    left = len(flights) - _RANKS_LISTED
    more = f'<p class="soft">{left} more ranks are in their files.</p>' if left > 0 else ""
    return f"<h3>The last collectives</h3>{table(columns, rows, first_num=len(columns))}{more}"


def _stacks(flights: Mapping[int, Flight]) -> str:
    parts = [
        folded(f"rank {flight.rank} on {flight.node}: {flight.why}", flight.stack)
        for flight in list(flights.values())[:MOST_LANES]
        if flight.stack
    ]
    return f"<h2>Where their code was</h2>{''.join(parts)}\n" if parts else ""
