"""How long a Tab takes, start of Python included, beside sweeps of 10,000 runs: processor time and the clock."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS, REPEATS, BUDGET_S = 10_000, 9, 0.3
# Measures one process alone, and not what this one has loaded.
_MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""
_TABS = {
    "a verb (bash)": ("bash", ["hpc-trainer", ""]),
    "a verb with its help (zsh)": ("zsh", ["hpc-trainer", ""]),
    "groups and keys": ("bash", ["hpc-trainer", "plan", ""]),
    "a choice": ("bash", ["hpc-trainer", "plan", "model", "=", "res"]),
    "a choice, project file": ("bash", ["hpc-trainer", "plan", "experiment", "=", "ri"]),
    "a value of a key": ("bash", ["hpc-trainer", "plan", "cluster.executor", "=", ""]),
    "a sweep of 100": ("bash", ["hpc-trainer", "status", ""]),
    "a run of 10,000": ("bash", ["hpc-trainer", "why", "mlp-digits-lr0.001-s77"]),
    "all of 10,000 runs": ("bash", ["hpc-trainer", "why", "mlp"]),
}


def _make(folder: Path) -> None:
    """A project with a hundred sweeps, of which one has 10,000 runs that began."""
    names = [f"mlp-digits-lr0.001-s{number}-{number:010x}" for number in range(RUNS)]
    for sweep in ("many", *(f"sweep_{number}" for number in range(99))):
        (folder / "runs" / sweep).mkdir(parents=True)
        run_ids = names if sweep == "many" else []
        (folder / "runs" / sweep / "sweep.json").write_text(json.dumps({"run_ids": run_ids}))
    for name in names:
        (folder / "runs" / "many" / name).mkdir()
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "rings.yaml").write_text("")
    (folder / "pyproject.toml").write_text('[tool.hpc_trainer]\nconfig_dir = ["conf"]\nruns_dir = "runs"\n')


def _seconds(words: list[str], folder: Path, environ: dict[str, str]) -> tuple[float, float]:
    bytecode = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", _MEASURE, *words],
        cwd=folder, check=True, capture_output=True, text=True, env={**os.environ, **environ, **bytecode},
    )  # fmt: skip
    return float(done.stdout), time.perf_counter() - begin


def run() -> None:
    """Prints the table: medians and range over 9 Tabs, bytecode kept."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make(folder)
        program = folder / "hpc-trainer"
        program.write_text("from hpc_trainer.cli.main import main\nmain()\n")
        print(f"\n{'Tab':<28} {'CPU s':>7} {'min':>7} {'max':>7} {'clock s':>8} {'budget s':>9}   n={REPEATS}")
        floor = [_seconds([sys.executable, "-c", "pass"], folder, {})[0] for _ in range(REPEATS)]
        print(f"{'python -c pass':<28} {statistics.median(floor):>7.3f} {min(floor):>7.3f} {max(floor):>7.3f}")
        for label, (shell, words) in _TABS.items():
            environ = {
                "_HPC_TRAINER_COMPLETE": f"complete_{shell}", "COMP_WORDS": "\n".join(words),
                "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": " ".join(words),
            }  # fmt: skip
            tabs = [_seconds([sys.executable, str(program)], folder, environ) for _ in range(REPEATS + 1)]
            pairs = tabs[1:]  # the first one writes bytecode
            cpu, clock = ([pair[index] for pair in pairs] for index in (0, 1))
            print(
                f"{label:<28} {statistics.median(cpu):>7.3f} {min(cpu):>7.3f} {max(cpu):>7.3f} "
                f"{statistics.median(clock):>8.3f} {BUDGET_S:>9.1f}"
            )


if __name__ == "__main__":
    run()
