"""What the runs of a plan need of a GPU's memory, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hpc_trainer.cli.common import print_table, say
from hpc_trainer.launch.memory import CONTEXT_GB, FRAGMENTS, PARTS, Need


def memory_json(needs: Sequence[Need]) -> list[dict[str, Any]]:
    """The JSON of `plan --memory` (docs/json.md)."""
    return [{**dataclasses.asdict(each), "total_gb": each.total_gb, "warning": each.warning} for each in needs]


def print_needs(needs: Sequence[Need]) -> None:
    """A line for each kind of training, and a warning for each that its GPU cannot hold."""
    if not needs:
        say("Memory: nothing is known of a loop or program of your own (train.main, train.command).")
        return
    shown = [part for part in PARTS if any(each.parts.get(part) for each in needs)]
    say(f"\nGB of a rank's memory; total: and {FRAGMENTS:.0%} lost to fragments, and {CONTEXT_GB:g} GB for CUDA")
    has_measured = any(each.measured_gb is not None for each in needs)
    print_table(
        ["RUNS", "AS", "BATCH", *(part.upper() for part in shown), "TOTAL", *["MEASURED"] * has_measured, "CHECKPOINT"],
        [
            [
                str(each.num_runs), " ".join(f"{key}={value}" for key, value in each.axes.items()) or each.run_id,
                str(each.micro_batch_size),
                *(f"{each.parts[part]:.3g}" for part in shown), f"{each.total_gb or 0:.3g}",
                *["-" if each.measured_gb is None else f"{each.measured_gb:.3g}"] * has_measured,
                f"{each.checkpoint_gb or 0:.3g}",
            ]
            for each in needs if each.parts
        ],
    )  # fmt: skip
    for each in needs:
        for text in (each.problem, each.note):
            if text is not None:
                say(f"Note: {each.run_id}: {text}")
        if each.warning is not None:
            say(each.warning, "[yellow]Warning:[/] ")
