"""Troubles of a run's devices, and remedies, for `why`."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_trainer.runs.monitoring.moves import CAUSES, Move, read_move
from hpc_trainer.runs.monitoring.warnings import DeviceWarning, Trouble, read_warnings
from hpc_trainer.state.status import RunStatus, SweepStatus

_MOST_LINES = 4
_ADVICE = {
    Trouble.slowed: (
        "tell your centre which node it is; monitor.on_overheat=move takes the run to another one, lower_power may do "
        "where you may set power limits"
    ),
    Trouble.ecc: "tell your centre which node it is, and leave it out: hardware.exclude=NODE",
}
_SAME = {Trouble.hot: Trouble.slowed, Trouble.xid: Trouble.ecc, Trouble.lost: Trouble.ecc}


def device_evidence(
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
    left = [attempt.attempt for attempt in run.attempts if attempt.cause in CAUSES]
    moves = [(number, read_move(of_run, number, status.faults_of(run.run_id))) for number in left]
    return [(number, move) for number, move in moves if move is not None]


def _advice(warning: DeviceWarning) -> str:
    return _ADVICE[_SAME.get(warning.trouble, warning.trouble)].replace("NODE", warning.node)
