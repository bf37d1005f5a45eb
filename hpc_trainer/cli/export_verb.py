"""`hpc-trainer export`: a run's model in a folder of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import print_json, short_number
from hpc_trainer.cli.given import resolve_runs_dir
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.operate.deploy.export import Wanted, export
from hpc_trainer.operate.show import find_run


def run_export(name: str, sweep: str | None, runs_dir: Path | None, wanted: Wanted, *, as_json: bool) -> None:
    """Writes the folder and says what is in it."""
    done = export(find_run(resolve_runs_dir(runs_dir), name, sweep), wanted)
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    what = "averaged weights" if done.weights == "average" else "weights"
    print(
        as_typed(
            f"{done.run_id}: {what} of step {done.step}, {done.num_tensors} tensors, "
            f"{short_number(done.num_elements)} numbers, {short_number(done.num_bytes)}B. Folder: {done.folder}"
        )
    )
    for line in _measured(done.card):
        print(as_typed(line))
    for note in done.notes:
        print(as_typed(f"Note: {note}"))
    print(as_typed(f"To load it: python {Path(done.folder) / 'load.py'}"))


def _measured(card: dict[str, Any]) -> list[str]:
    """What a person looks for first; the rest stands in card.md."""
    measured, same, lines = card["measured"], card["same"], []
    if measured is not None:
        was, now = measured["original"], measured["exported"]
        lines += [
            f"  {name}: {was['metrics'][name]:.4f} -> {value:.4f}, on {measured['num_samples']} validation samples"
            for name, value in now["metrics"].items()
        ]
        for batch, told in now["latency"].items():
            before, after = (1e3 * each["median_s"] for each in (was["latency"][batch], told))
            lines.append(f"  latency of a batch of {batch}: {before:.3g} ms -> {after:.3g} ms (medians, n={told['n']})")
    if same is not None:
        lines.append(
            f"  outputs differ by at most {same['max_abs_difference']:.3g} on {same['num_samples']} validation samples "
            f"(allowed: {same['tolerance']:.3g})"
        )
    return lines
