"""Make pool.svg: which run each place of a real pool had, second by second; one of the runs fails.

.venv/bin/python docs/pictures/pool.py     # half a minute; 20 runs through two slots of three places on this machine
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.turns import read_turn

HERE = Path(__file__).parent
PROGRAM = Path(sys.executable).with_name("hpc-trainer")
_FIT = "#!/bin/sh\nsleep $((2 + $1 * 5 % 7))\ntest $1 != 7\n"
"""Program that takes 2 to 8 seconds, by the seed; that of seed 7 fails at its end."""
_WIDTH, _ROW, _LEFT, _TOP = 760, 26, 96, 8
_COLOURS = {RunState.COMPLETED: "#4c9a64", RunState.FAILED: "#c0483c"}


@dataclass(frozen=True, slots=True)
class Bar:
    """Turn of a run in a place: slot and place from 0, begin and end in seconds since the epoch."""

    slot: int
    place: int
    begin: float
    end: float
    seed: str
    state: RunState


def play(folder: Path) -> list[Bar]:
    """Run the pool to its end, and return the turns of its runs."""
    program = folder / "fit.sh"
    program.write_text(_FIT)
    program.chmod(0o755)
    words = "submit cluster=local pool.jobs=2 pool.per_node=3 sweep_name=packed seed=range(0,20) --wait --command"
    env = {**os.environ, "HPC_TRAINER_RUNS": str(folder / "runs")}
    subprocess.run([PROGRAM, *words.split(), f"{program} {{seed}}"], cwd=folder, env=env, check=False)
    status = read_status(SweepPaths(folder / "runs" / "packed"))
    bars = []
    for run in status.runs:
        turn, attempt = read_turn(status.sweep, run.run_id, 0), run.attempts[-1]
        assert turn is not None
        assert attempt.end_time is not None
        slot = int(turn.holder.slot.rpartition("-")[2])
        bars.append(Bar(slot, turn.place, turn.time, attempt.end_time, run.spec.axes["seed"], run.state))
    return bars


def picture(bars: Sequence[Bar]) -> str:
    """Return an SVG with a row for each place of each slot, and a bar for each run."""
    begin, end = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    rows = sorted({(bar.slot, bar.place) for bar in bars})
    bottom = _TOP + _ROW * len(rows)

    def x(at: float) -> float:
        return _LEFT + (at - begin) / (end - begin) * (_WIDTH - _LEFT - 16)

    parts = []
    for number, (slot, place) in enumerate(rows):
        parts.append(f'<text x="4" y="{_TOP + _ROW * number + 17}">slot {slot}, place {place}</text>')
    for bar in bars:
        y = _TOP + _ROW * rows.index((bar.slot, bar.place)) + 2
        width = max(1.0, x(bar.end) - x(bar.begin) - 1)
        parts.append(
            f'<rect x="{x(bar.begin):.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" rx="2" '
            f'fill="{_COLOURS[bar.state]}"/>'
        )
        parts.append(f'<text x="{x(bar.begin) + 4:.1f}" y="{y + 15}" fill="white">{bar.seed}</text>')
    parts += [
        f'<text x="{x(begin + second):.1f}" y="{bottom + 16}" text-anchor="middle">{second} s</text>'
        for second in range(0, int(end - begin) + 1, 5)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 24}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Write the picture beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        (HERE / "pool.svg").write_text(picture(play(Path(folder))))


if __name__ == "__main__":
    main()
