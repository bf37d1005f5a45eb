"""Files of the package that a verb enters, and moves from one file to another: what its reader has to follow.

    python -m tests.benchmarks.reading [--pairs N]

`submit` of two runs to the local queue, then `status` of them when they are done, each in a process of its own under
sys.setprofile. Calls count; what runs while a module is imported (class bodies, tables) does not. Counts of `status`
are exact; those of `submit` vary by some moves, because it waits for the queue. `--pairs` also prints the N most
frequent moves, and every file with the calls that it got.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_WATCH = """
import collections, json, os, sys
import hpc_trainer
from hpc_trainer.cli.main import main
root = os.path.dirname(hpc_trainer.__file__) + os.sep
calls, pairs, functions, last, imports = collections.Counter(), collections.Counter(), collections.Counter(), None, 0
def watch(frame, event, argument):
    global last, imports
    if event not in ("call", "return"):
        return
    if frame.f_code.co_name == "<module>":
        imports += 1 if event == "call" else -1
        return
    name = frame.f_code.co_filename
    if event == "call" and not imports and name.startswith(root):
        calls[name] += 1
        if name != last:
            pairs[last, name] += 1
            functions[name, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)] += 1
            last = name
sys.argv = ["hpc-trainer", *sys.argv[1:]]
sys.setprofile(watch)
try:
    main()
except SystemExit:
    pass
sys.setprofile(None)
def short(name):
    return (name or root + "start")[len(root):]
print(json.dumps({
    "files": len(calls),
    "moves": sum(pairs.values()),
    "loaded": sum(name.startswith("hpc_trainer") for name in sys.modules),
    "calls": {short(name): count for name, count in calls.most_common()},
    "pairs": [[short(one), short(other), count] for (one, other), count in pairs.most_common()],
    "functions": [[short(name), function, count] for (name, function), count in functions.most_common()],
    "modules": sorted(name for name in sys.modules if name.startswith("hpc_trainer")),
}), file=sys.stderr)
"""


def count(folder: Path, *words: str) -> dict[str, Any]:
    """Return what one verb enters, run in `folder`: `files`, `moves` between them, modules `loaded`, and details."""
    done = subprocess.run(
        [sys.executable, "-c", _WATCH, *words], capture_output=True, text=True, check=True, cwd=folder
    )
    return dict(json.loads(done.stderr.splitlines()[-1]))


def read_two_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the counts of `submit` of two runs into `folder`, and of `status` of them when they are done."""
    submitted = count(
        folder, "submit", "experiment=digits", "seed=1,2", "hardware=cpu_x1", "cluster=local", "train.num_steps=2",
        "schedule.warmup_steps=1", f"paths.runs_dir='{folder}/runs'",
    )  # fmt: skip
    deadline = time.monotonic() + 480
    while len(list(folder.glob("runs/*/*/DONE"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    return {"submit": submitted, "status": count(folder, "status", "--runs-dir", f"{folder}/runs")}


def run(pairs: int) -> None:
    """Print a table in Markdown, then `pairs` of the most frequent moves."""
    with tempfile.TemporaryDirectory(prefix="reading-") as folder:
        counts = read_two_runs(Path(folder))
    print("| verb | files entered | moves between files | modules loaded |\n|---|---|---|---|")
    for verb, found in counts.items():
        print(f"| {verb} of two runs | {found['files']} | {found['moves']:,} | {found['loaded']} |")
    for verb, found in counts.items() if pairs else ():
        print(f"\n{verb}: moves from file to file")
        for one, other, moves in found["pairs"][:pairs]:
            print(f"{moves:6} {one} -> {other}")
        print(f"\n{verb}: functions that are moved to")
        for name, function, moves in found["functions"][:pairs]:
            print(f"{moves:6} {name} {function}")
        print(f"\n{verb}: files, with their calls")
        for name, calls in found["calls"].items():
            print(f"{calls:6} {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=0, help="how many of the most frequent moves to print")
    run(parser.parse_args().pairs)
