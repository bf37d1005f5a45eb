"""What freezing the code costs: `python -m tests.benchmarks.frozen_code`; medians of 11, in milliseconds.

A checkout of so many modules of 6 kB, and hpc_trainer's own; budget at submit: 150 ms for some hundred files.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpc_trainer.launch.frozen_code.archive import store_code
from hpc_trainer.launch.frozen_code.snapshot import read_code
from hpc_trainer.record.layout import SweepPaths
from tests.unit.launch.frozen_code.projects import git, write_files
from tests.unit.record.builders import make_spec

REPEATS = 11


def _timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def measure(folder: Path, num_modules: int) -> dict[str, float]:
    """first, again: read and store at submit; frozen, installed: a worker that leaves at once."""
    modules = {f"my_lab/part{number % 20}/module{number}.py": f"x = {number}\n" * 800 for number in range(num_modules)}
    write_files(folder, {"my_lab/__init__.py": "", ".gitignore": "runs/\n", **modules})
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    os.chdir(folder)
    os.umask(0o077)
    target = "my_lab.part0.module0.build"
    spec = make_spec("cluster=local", "data=custom", f"data._target_={target}", trust=["my_lab"])
    figures: dict[str, list[float]] = {"first": [], "again": [], "frozen": [], "installed": []}

    def submit(paths: SweepPaths) -> Path:
        code = read_code([spec], folder / "runs")
        assert code is not None
        return store_code(paths, code)

    for number in range(REPEATS):
        paths = SweepPaths(folder / "runs" / str(number))
        paths.folder.mkdir(parents=True)
        figures["first"].append(_timed(lambda paths=paths: submit(paths)))  # type: ignore[misc]
        figures["again"].append(_timed(lambda paths=paths: submit(paths)))  # type: ignore[misc]
    archive = submit(paths)
    paths.specs.touch()
    for name, start in (("frozen", [str(archive)]), ("installed", ["-m", "hpc_trainer.worker"])):
        words = [sys.executable, *start, "--sweep-dir", str(paths.folder), "--run", "none"]
        for _ in range(REPEATS):
            figures[name].append(_timed(lambda words=words: subprocess.run(words, capture_output=True, check=False)))  # type: ignore[misc]
    return {name: statistics.median(values) for name, values in figures.items()}


def run() -> None:
    """Prints a line for each size."""
    for num_modules in (0, 100, 300):
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(Path(folder).resolve() / "project", num_modules)
            os.chdir("/")
            print(num_modules, *(f"{name} {value:.0f} ms" for name, value in figures.items()), sep="  ")


if __name__ == "__main__":
    run()
