"""10,000 runs in a sweep: processor time and memory of the verbs, beside the bare interpreter's."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hpc_trainer.launch.freeze import Grid, freeze_grid
from hpc_trainer.launch.frozen_code.archive import store_code
from hpc_trainer.launch.frozen_code.snapshot import read_code
from hpc_trainer.record.files import make_folder, set_umask
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import append_specs
from hpc_trainer.record.states import DONE, RunState
from hpc_trainer.record.submissions import write_confirmation, write_intent

RUNS, REPEATS, ARRAY = 10_000, 5, 1_000
BUDGET_S, BUDGET_MIB = 1.0, 120
# What the file system alone takes for as many folders with a marker in each, as `cancel` of waiting runs makes them.
_MAKE = f"""
import os, sys
os.mkdir(sys.argv[1])
for index in range({RUNS}):
    folder = sys.argv[1] + "/mlp-digits-lr0.001-s%d-0123456789" % index
    os.mkdir(folder)
    with open(folder + "/CANCEL", "w") as file:
        file.write("x")
"""
_MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


def _words(folder: Path) -> list[str]:
    return [
        f"seed=range({RUNS})", "cluster=slurm", "hardware=gpu_x1", f"paths.runs_dir={folder}", "sweep_name=many",
    ]  # fmt: skip


def _submitted(folder: Path) -> tuple[SweepPaths, Grid]:
    """A sweep in arrays of 1,000, and a squeue that shows them waiting."""
    with contextlib.redirect_stdout(io.StringIO()):
        grid = freeze_grid(_words(folder))
    paths = SweepPaths(folder / "many")
    make_folder(paths.folder)
    append_specs(paths, list(grid.specs))
    code = read_code(grid.specs, folder)  # None where hpc_trainer is installed: nothing is compared then
    if code is not None:
        store_code(paths, code)
    run_ids = [spec.run_id for spec in grid.specs]
    rows = ["JOBID|STATE|NODELIST|REASON|COMMENT|NAME|end"]
    for number, start in enumerate(range(0, RUNS, ARRAY), start=1000):
        part = run_ids[start : start + ARRAY]
        intent = write_intent(
            paths, executor="slurm", hardware="gpu_x1", run_ids=part, code=code.digest if code is not None else None
        )
        write_confirmation(paths, intent, str(number))
        rows += [f"{number}_{index}|PENDING||Priority|{intent.uuid}|many|end" for index in range(len(part))]
    (folder / "queue").write_text("\n".join(rows) + "\n")
    return paths, grid


def _finish(paths: SweepPaths, grid: Grid) -> None:
    for index, spec in enumerate(grid.specs):
        run = paths.run(spec.run_id)
        make_folder(run.folder)
        journal = Journal(run)
        job_id = f"{1000 + index // ARRAY}_{index % ARRAY}"
        journal.start(0, job_id=job_id, restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
        journal.end(0, state=RunState.COMPLETED, cause="done", step=200)
        run.result.write_text('{"step": 200, "metrics": {"eval_accuracy": 0.5}}\n')
        run.marker(DONE).write_text("{}\n")


def _commands(folder: Path) -> Path:
    """squeue shows the queue; the others say nothing."""
    place = folder / "bin"
    place.mkdir()
    for name in ("squeue", "sacct", "scancel", "sbatch", "scontrol"):
        script = place / name
        script.write_text(f"#!/bin/sh\n{f'cat {folder}/queue' if name == 'squeue' else 'exit 0'}\n")
        script.chmod(0o755)
    return place


def _measured(words: list[str], place: Path) -> tuple[float, float]:
    # As installed, with the bytecode that pip makes: without it each start compiles the package anew, in 0.1 s.
    bytecode = {"PYTHONPYCACHEPREFIX": str(place.parent.parent / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    environ = {**os.environ, **bytecode, "PATH": f"{place}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *words], env=environ, check=True, capture_output=True, text=True
    )
    seconds, mib = done.stdout.split()
    return float(seconds), float(mib)


def run() -> None:
    """Prints the table. Processor time: what a command takes on a machine that does nothing else."""
    set_umask(False)
    with tempfile.TemporaryDirectory() as name:
        waiting, finished = Path(name) / "waiting", Path(name) / "finished"
        for folder in (waiting, finished):
            folder.mkdir()
        _submitted(waiting)
        _finish(*_submitted(finished))
        program = [sys.executable, "-m", "hpc_trainer"]
        print(f"\n{'10,000 runs':<28} {'CPU s':>7} {'min':>6} {'max':>6} {'MiB':>5}   n={REPEATS}, budget {BUDGET_S} s")
        for folder in (waiting, finished):
            place = _commands(folder)
            verbs = {
                "python -c pass": [sys.executable, "-c", "pass"],
                "folders and files, made": [sys.executable, "-c", _MAKE, str(folder / "made")],
                "status": [*program, "status", "many", "--runs-dir", str(folder)],
                "status --all": [*program, "status", "--all", "many", "--runs-dir", str(folder)],
                "results, first look": [*program, "results", "many", "--runs-dir", str(folder)],
                "results": [*program, "results", "many", "--runs-dir", str(folder)],
                "results --group-by": [*program, "results", "many", "--group-by", "seed", "--runs-dir", str(folder)],
                "submit again": [*program, "submit", *_words(folder)],
                "cancel": [*program, "cancel", "many", "--runs-dir", str(folder)],
            }
            for label, words in verbs.items():
                figures = []
                if label.startswith(("status", "results", "submit")):
                    _measured(words, place)  # makes the bytecode
                for _ in range(REPEATS):
                    if label == "results, first look":
                        (folder / "many" / "summaries.jsonl").unlink(missing_ok=True)
                    figures.append(_measured(words, place))
                    shutil.rmtree(folder / "made", ignore_errors=True)
                    if label == "cancel":
                        for marker in (folder / "many").glob("*/CANCEL"):
                            shutil.rmtree(marker.parent) if folder is waiting else marker.unlink()
                seconds = [each for each, _ in figures]
                print(
                    f"{label + ', ' + folder.name:<28} {statistics.median(seconds):>7.2f} {min(seconds):>6.2f} "
                    f"{max(seconds):>6.2f} {max(mib for _, mib in figures):>5.0f}"
                )
