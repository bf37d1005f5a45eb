"""Findings of observation for `why` and the report: hangs, stragglers, GPU problems, moves, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_trainer.observe.advice import advise_runs, count_advice, next_command_of_sweep, sweep_lines
from hpc_trainer.observe.hang import flights_of, join
from hpc_trainer.observe.straggler_log import Straggler, read_stragglers, straggler_lines
from hpc_trainer.observe.telemetry import DeviceWarning, Trouble, read_warnings
from hpc_trainer.observe.telemetry_views import render_telemetry, telemetry_charts
from hpc_trainer.operate.report.data import ReportPart
from hpc_trainer.operate.why import Clues
from hpc_trainer.record.journal import MOVE_CAUSES, Move, read_move
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus

_ADVISED = (RunState.COMPLETED, RunState.RUNNING)
_MOST_SLOW = 20
_MOST_STRAGGLERS = 20


def clues_of(status: SweepStatus, run: RunStatus, *, is_alone: bool) -> Clues:
    """Return the evidence and advice on a run from its flight records, stragglers, GPUs and advice rules.

    Args:
        status: the sweep.
        run: the run.
        is_alone: True if this is the only run to explain; only then flight records and advice are read.
    """
    joined = join(flights_of(status, run) if is_alone else {})
    slow = read_stragglers(status.sweep.run(run.run_id), status.faults_of(run.run_id))
    moves = moves_of(status, run)
    device_evidence, device_advice = _device_clues(status, run, moves)
    count = count_advice(status, run) if is_alone and run.state in _ADVISED else 0
    advised = f"hpc-trainer advise {run.run_id}: {count} suggestion(s) to make it faster or cheaper"
    return Clues(
        headline=joined.says,
        rank=joined.rank,
        evidence=straggler_lines(slow),
        late_evidence=device_evidence,
        advice=[advised] if count else (),
        late_advice=device_advice,
        events=[*_move_events(moves), *_straggler_events(slow[-_MOST_SLOW:])],
    )


def _move_events(moves: Sequence[tuple[int, Move]]) -> Iterator[tuple[float, str]]:
    for attempt, move in moves:
        yield move.time, f"attempt {attempt}: {move.text}"


def _straggler_events(slow: Sequence[Straggler]) -> Iterator[tuple[float, str]]:
    for line in slow:
        yield line.time, f"attempt {line.attempt}, step {line.step}: {line.in_words()}"


def report_part(status: SweepStatus) -> ReportPart:
    """Return the sections of a sweep's report on stragglers, advice and telemetry."""
    stragglers = [
        f"{run.run_id}: {line}"
        for run in status.runs
        for line in straggler_lines(read_stragglers(status.sweep.run(run.run_id), status.faults_of(run.run_id)))
    ]
    tuned = advise_runs(status, [*status.specs])[0]
    return ReportPart(
        notes=stragglers[:_MOST_STRAGGLERS],
        advice=sweep_lines(tuned),
        next=next_command_of_sweep(tuned, status.sweep.name),
        section=render_telemetry(telemetry_charts(status)),
        has_series=True,
    )


_MOST_LINES = 4
_ADVICE = {
    Trouble.slowed: (
        "tell your centre which node it is; monitor.on_overheat=move moves the run to another node, and lower_power "
        "helps if you may set power limits"
    ),
    Trouble.ecc: "tell your centre which node it is, and leave it out: hardware.exclude=NODE",
}
_SAME = {Trouble.hot: Trouble.slowed, Trouble.xid: Trouble.ecc, Trouble.lost: Trouble.ecc}


def _device_clues(
    status: SweepStatus, run: RunStatus, moves: Sequence[tuple[int, Move]]
) -> tuple[list[str], list[str]]:
    """Return (evidence, advice) on the devices of the newest attempt, and the moves of all attempts.

    Args:
        status: the sweep.
        run: the run.
        moves: `moves_of` the run.
    """
    if not run.attempts:
        return [], []
    warnings = read_warnings(status.sweep.run(run.run_id), run.attempts[-1].attempt, status.faults_of(run.run_id))
    lines = [f"attempt {number}: {move.text}" for number, move in moves]
    lines += [warning.text for warning in warnings[:_MOST_LINES]]
    if len(warnings) > _MOST_LINES:
        lines.append(f"and {len(warnings) - _MOST_LINES} more such warnings")
    if moves and moves[-1][0] == run.attempts[-1].attempt:
        return lines, [f"tell your centre about {moves[-1][1].node}"]
    return lines, list(dict.fromkeys(_advice(warning) for warning in warnings))


def moves_of(status: SweepStatus, run: RunStatus) -> list[tuple[int, Move]]:
    """Return (attempt, its move) for all attempts that ended to move the run to another node."""
    of_run = status.sweep.run(run.run_id)
    left = [attempt.attempt for attempt in run.attempts if attempt.cause in MOVE_CAUSES]
    moves = [(number, read_move(of_run, number, status.faults_of(run.run_id))) for number in left]
    return [(number, move) for number, move in moves if move is not None]


def _advice(warning: DeviceWarning) -> str:
    return _ADVICE[_SAME.get(warning.trouble, warning.trouble)].replace("NODE", warning.node)
