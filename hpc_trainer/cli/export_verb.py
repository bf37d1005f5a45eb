"""`hpc-trainer export`: a run's weights in a folder of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hpc_trainer.cli.common import print_json, short_number
from hpc_trainer.cli.given import resolve_runs_dir
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.operate.export import Wanted, export
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
    for note in done.notes:
        print(as_typed(f"Note: {note}"))
    print(as_typed(f"To load them: python {Path(done.folder) / 'load.py'}"))
