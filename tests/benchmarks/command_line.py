"""How long the login node waits: --help, plan, status of 100 runs; the limit is Python's own start."""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import append_specs
from hpc_trainer.record.states import DONE, RunState

REPEATS = 9


def _seconds(words: list[str], folder: Path) -> list[float]:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        subprocess.run(words, cwd=folder, check=True, capture_output=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
        times.append(time.perf_counter() - begin)
    return times


def _make_sweep(folder: Path, num_runs: int) -> None:
    """A sweep of finished runs, written by the real writers."""
    with contextlib.redirect_stdout(io.StringIO()):
        grid = freeze_grid([f"seed=range({num_runs})", "cluster=local", f"paths.runs_dir={folder}", "sweep_name=many"])
    paths = SweepPaths(folder / "many")
    paths.folder.mkdir()
    paths.folder.chmod(0o700)
    append_specs(paths, list(grid.specs))
    paths.specs.chmod(0o600)
    for spec in grid.specs:
        run = paths.run(spec.run_id)
        run.folder.mkdir()
        journal = Journal(run)
        journal.start(0, job_id="1_0", restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
        journal.resume(0, 0)
        journal.end(0, state=RunState.COMPLETED, cause="done", step=200)
        write_json(run.result, {"metrics": {"eval_accuracy": 0.5}})
        write_json(run.marker(DONE), {})


def run() -> None:
    """Prints the table: median and range over 9 runs, each beside the bare interpreter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_sweep(folder, 100)
        program = [sys.executable, "-m", "hpc_trainer"]
        rows = {
            "python -c pass": ([sys.executable, "-c", "pass"], None),
            "--help": ([*program, "--help"], 0.2),
            "status, 100 runs": ([*program, "status", "many", "--runs-dir", name], 0.4),
            "plan, 2 x 2 grid": ([*program, "plan", "experiment=digits", "sweep=digits_grid", "cluster=local"], None),
        }
        print(f"\n{'command line':<20} {'median s':>9} {'min':>7} {'max':>7} {'budget s':>9}   n={REPEATS}")
        for label, (words, budget) in rows.items():
            times = _seconds(words, folder)
            shown = "-" if budget is None else f"{budget:.1f}"
            print(f"{label:<20} {statistics.median(times):>9.3f} {min(times):>7.3f} {max(times):>7.3f} {shown:>9}")
