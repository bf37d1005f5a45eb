"""Pools: what a run costs beyond its program, and runs a minute beside a job for each run on the same Slurm.

python -m tests.benchmarks.pools [RUNS [SECONDS]]  through 8 slots on this machine; each run sleeps for SECONDS
python -m tests.benchmarks.pools --slurm [RUNS]    a pool of 4 slots, and a job for each run, on the test Slurm
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.record.files import make_folder
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import append_specs
from hpc_trainer.record.states import DONE
from hpc_trainer.record.submissions import write_confirmation, write_intent

RUNS, SLOTS, SLURM_RUNS, SLURM_SLOTS = 1_000, 8, 60, 4
_PROGRAM = "/bin/true"


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _bare_s(program: str, count: int) -> float:
    """Return the processor seconds of a start of the program alone."""
    begin = _cpu_s()
    for _ in range(count):
        subprocess.run(program.split(), check=True)
    return (_cpu_s() - begin) / count


def run(runs: int = RUNS, seconds: int = 0) -> None:
    """Print a table: `runs` of a program that does nothing for `seconds`, through 8 slots of this machine."""
    program = f"/bin/sleep {seconds}" if seconds else _PROGRAM
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"seed=range({runs})", "cluster=local", f"train.command='{program}'", f"paths.runs_dir={folder}",
            "sweep_name=pool", "snapshot=off", f"train.command_dir={folder}",
        ]  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            grid = freeze_grid(words)
        paths = SweepPaths(Path(folder) / "pool")
        make_folder(paths.folder)
        append_specs(paths, list(grid.specs))
        intent = write_intent(
            paths, executor="local", hardware="cpu_x1", run_ids=[spec.run_id for spec in grid.specs], slots=SLOTS,
            per_node=1,
        )  # fmt: skip
        write_confirmation(paths, intent, "benchmark:1:1.0")
        bare_s, before, begin = _bare_s(program, 5 if seconds else 50), _cpu_s(), time.monotonic()
        words = ["-m", "hpc_trainer.worker", "--sweep-dir", str(paths.folder), "--pool", intent.uuid]
        load = psutil.getloadavg()[0]
        subprocess.run([sys.executable, *words, "--slots", str(SLOTS)], check=True, stdout=subprocess.DEVNULL)
        wall_s, cpu_s = time.monotonic() - begin, (_cpu_s() - before) / runs
        done = sum(path.exists() for path in (paths.run(spec.run_id).marker(DONE) for spec in grid.specs))
        lines = [line for path in paths.folder.glob("slot-*/ends.jsonl") for line in path.read_text().splitlines()]
        took_s = [json.loads(line)["seconds"] for line in lines]
    loads = f"load {load:.1f} before the start, {psutil.getloadavg()[0]:.1f} at the end"
    print(f"pool: {done} of {runs} runs of `{program}` through {SLOTS} slots, {loads}")
    print("| | a run |\n|---|---|")
    print(f"| processor time beyond the program | {cpu_s - bare_s:.3f} s |")
    print(f"| processor time of the program | {bare_s:.4f} s |")
    print(f"| from claim to end, median | {statistics.median(took_s):.2f} s |")
    print(f"| wall clock of a slot beyond the program | {SLOTS * wall_s / runs - seconds:.2f} s |")
    print(f"| wall clock of all slots together | {wall_s / runs:.3f} s, {60 * runs / wall_s:.0f} runs a minute |")


def run_slurm(runs: int = SLURM_RUNS) -> None:
    """Print a table: the same runs in a pool, and with a job for each, on the test Slurm."""
    from tests.slurm.driver import Driver
    from tests.slurm.testbed import bed
    from tests.slurm.testbed.cluster import SlurmCluster
    from tests.slurm.testbed.spec import Spec

    spec = Spec()
    is_started = bed.up(spec, lambda text: print(text, file=sys.stderr))
    cluster = SlurmCluster.attach(spec)
    try:
        with tempfile.TemporaryDirectory() as folder:
            driver = Driver(cluster, Path(folder))
            rows = {
                name: _minutes(driver, name, runs, words)
                for name, words in (("a pool", [f"pool.jobs={SLURM_SLOTS}"]), ("a job each", []))
            }
    finally:
        cluster.tidy()
        if is_started:
            bed.down(spec)
    print(f"| {runs} runs on Slurm {spec.release} | seconds | runs a minute |\n|---|---|---|")
    for name, seconds in rows.items():
        print(f"| {name} | {seconds:.0f} | {60 * runs / seconds:.0f} |")
    print(f"ratio {rows['a job each'] / rows['a pool']:.1f}, load {psutil.getloadavg()[0]:.1f} at the end")


def _minutes(driver: object, name: str, runs: int, words: Sequence[str]) -> float:
    sweep = name.replace(" ", "-")
    driver.submit(  # type: ignore[attr-defined]
        "hardware=testbed_x1", "--command", _PROGRAM, f"seed=range({runs})", f"sweep_name={sweep}", "snapshot=off",
        *words,
    )  # fmt: skip
    begin = time.monotonic()
    folder = driver.runs / sweep  # type: ignore[attr-defined]
    while sum(1 for _ in folder.glob(f"*/{DONE}")) < runs:
        time.sleep(1)
    return time.monotonic() - begin


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--slurm"]
    chosen = run_slurm if "--slurm" in sys.argv else run
    chosen(*map(int, arguments))
