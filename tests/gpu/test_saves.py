"""A state of 1.5 GB is saved from the GPU while training goes on, and comes back with the same bits."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from tests.gpu.runs import ON_GPU, Figures, Runs

pytestmark = ON_GPU

_WORDS = (
    "experiment=gpt2_124m", "train.compile=false", "train.global_batch_size=16", "train.num_steps=210",
    "monitor.log_every_steps=2", "schedule.warmup_steps=1", "train.eval_every_steps=0", "data.num_eval=8",
    "checkpoint.every_steps=60",
)  # fmt: skip

_SAVED = (60, 120, 180)


def _stalls(log: str) -> list[tuple[float, float]]:
    found = re.findall(r"checkpoint saved in ([\d.]+) s(?:; training stopped for ([\d.]+) s)?", log)
    return [(float(whole), float(stall or whole)) for whole, stall in found]


def test_training_hardly_stands_still_for_a_save(runs: Runs, figures: Figures) -> None:
    waited = runs.train(*_WORDS, "checkpoint.asynchronous=false")
    behind = runs.train(*_WORDS, "checkpoint.asynchronous=true")
    stalls = _stalls(behind.log)[1:-1]  # the first one makes its buffers, and training ends with the last one
    stall = statistics.median(stall for _, stall in stalls)
    whole = statistics.median(seconds for seconds, _ in _stalls(waited.log)[1:])
    writes = statistics.median(seconds for seconds, _ in stalls)
    quiet, draining = _step_times(behind.lines, writes)
    figures.tell(
        "save", stall_s=stall, whole_s=whole, share=stall / whole, all_waited=_stalls(waited.log),
        all_behind=_stalls(behind.log), step_s=quiet, step_while_written_s=draining,
    )  # fmt: skip
    assert stall <= 0.1 * whole
    assert draining <= 1.02 * quiet


def _step_times(lines: Sequence[dict[str, float]], seconds: float) -> tuple[float, float]:
    """(median step time between saves, that while one is written: for so many seconds after each but the first)."""
    begins = [line["time"] for line in lines if line["step"] in _SAVED[1:]]
    is_draining = [any(0 < line["time"] - begin <= seconds for begin in begins) for line in lines]
    # The line after a save has its stall in it.
    kept = [
        (line["step_time_s"], draining)
        for line, draining in zip(lines, is_draining, strict=True)
        if line["step"] > 10 and line["step"] - 2 not in _SAVED and line["step"] > _SAVED[1] - 10
    ]
    return tuple(statistics.median(each for each, draining in kept if draining is wanted) for wanted in (False, True))  # type: ignore[return-value]
