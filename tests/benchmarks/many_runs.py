"""10,000 runs in a sweep: processor time and memory of the verbs, beside a loop that shows how fast the machine is.

`python -m tests.benchmarks.many_runs` prints the table of 10,000 runs. With the word `large` it submits 100,000 runs to
a stand-in for Slurm, and shows their status.
"""

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
from tests.unit.slurm.fake_slurm import FakeSlurm

RUNS, REPEATS, ARRAY = 10_000, 5, 1_000
BUDGET_S, BUDGET_MIB = 1.0, 120
LARGE, LARGE_BUDGETS_S = 100_000, {"submit": 40.0, "status": 5.0}
# Takes 0.4 to 0.6 s on a usual machine. Figures of two machines can be compared by their ratio to this loop.
_LOOP = """
total = 0
for number in range(10_000_000):
    total += number
"""
# What the file system alone takes for the folders and hard links that `cancel` of waiting runs makes.
_MAKE = f"""
import os, sys
os.mkdir(sys.argv[1])
marker = sys.argv[1] + "/CANCEL"
open(marker, "w").close()
for index in range({RUNS}):
    folder = sys.argv[1] + "/mlp-digits-lr0.001-s%d-0123456789" % index
    os.mkdir(folder)
    os.link(marker, folder + "/CANCEL")
"""
_MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


def _words(folder: Path, runs: int = RUNS) -> list[str]:
    return [
        f"seed=range({runs})", "cluster=slurm", "hardware=gpu_x1", f"paths.runs_dir={folder}", "sweep_name=many",
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


def _program(verb: str, folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "hpc_trainer", verb, "many", *words, "--runs-dir", str(folder)]


def _line(label: str, figures: list[tuple[float, float]], place: Path, budget: str = "") -> str:
    """Returns a row, with the loop measured just now."""
    seconds, (loop_s, _) = [each for each, _ in figures], _measured([sys.executable, "-c", _LOOP], place)
    median = statistics.median(seconds)
    return (
        f"{label:<32} {median:>7.2f} {min(seconds):>6.2f} {max(seconds):>6.2f} {max(mib for _, mib in figures):>5.0f} "
        f"{loop_s:>7.2f} {median / loop_s:>6.2f} {budget}"
    )


def _head(label: str, repeats: int) -> str:
    columns = f"{'CPU s':>7} {'min':>6} {'max':>6} {'MiB':>5} {'loop s':>7} {'ratio':>6}"
    return f"\n{label:<32} {columns}   n={repeats}"


def run() -> None:
    """Prints the table. Processor time: what a command takes on a machine that does nothing else."""
    set_umask(False)
    with tempfile.TemporaryDirectory() as name:
        waiting, finished = Path(name) / "waiting", Path(name) / "finished"
        for folder in (waiting, finished):
            folder.mkdir()
        _submitted(waiting)
        _finish(*_submitted(finished))
        print(f"{_head('10,000 runs', REPEATS)}, budget {BUDGET_S} s and {BUDGET_MIB} MiB")
        for folder in (waiting, finished):
            place = _commands(folder)
            verbs = {
                "python -c pass": [sys.executable, "-c", "pass"],
                "folders and links, made": [sys.executable, "-c", _MAKE, str(folder / "made")],
                "status": _program("status", folder),
                "status --all": _program("status", folder, "--all"),
                "results, first look": _program("results", folder),
                "results": _program("results", folder),
                "results --group-by": _program("results", folder, "--group-by", "seed"),
                "submit again": [sys.executable, "-m", "hpc_trainer", "submit", *_words(folder)],
                "cancel": _program("cancel", folder),
            }
            for label, words in verbs.items():
                if folder is finished and label.startswith("folders"):
                    continue  # the same figure, and the folders take minutes to remove
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
                print(_line(f"{label}, {folder.name}", figures, place), flush=True)


def run_large() -> None:
    """Prints the figures of 100,000 new runs; a stand-in for Slurm takes them, and its own time is in the figures."""
    set_umask(False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        folder.mkdir()
        place = FakeSlurm(Path(name)).bin
        _measured([sys.executable, "-m", "hpc_trainer", "plan", *_words(folder, 1)], place)  # makes the bytecode
        print(_head(f"{LARGE:,} runs", 1))
        for verb, budget_s in LARGE_BUDGETS_S.items():
            words = _program("status", folder)
            if verb == "submit":
                words = [sys.executable, "-m", "hpc_trainer", "submit", *_words(folder, LARGE)]
            print(_line(verb, [_measured(words, place)], place, f"  budget {budget_s:g} s"), flush=True)


if __name__ == "__main__":
    run_large() if "large" in sys.argv[1:] else run()
