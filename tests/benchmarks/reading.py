"""Files of the package that a verb enters, and moves from one file to another: what its reader has to follow.

    python -m tests.benchmarks.reading

`submit` of two runs to the local queue, then `status` of them when they are done, each in a process of its own under
sys.setprofile. Calls count, imports do not. Counts of `status` are exact; those of `submit` vary by some moves, because
it waits for the queue.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_WATCH = """
import json, os, sys
import hpc_trainer
from hpc_trainer.cli.main import main
root, files, moves, last = os.path.dirname(hpc_trainer.__file__), set(), 0, None
def watch(frame, event, argument):
    global moves, last
    if event != "call" or frame.f_code.co_name == "<module>":
        return
    name = frame.f_code.co_filename
    if name != last and name.startswith(root):
        files.add(name)
        moves, last = moves + 1, name
sys.argv = ["hpc-trainer", *sys.argv[1:]]
sys.setprofile(watch)
try:
    main()
except SystemExit:
    pass
sys.setprofile(None)
loaded = [name for name in sys.modules if name.startswith("hpc_trainer")]
print(json.dumps({"files": len(files), "moves": moves, "loaded": len(loaded)}), file=sys.stderr)
"""


def count(*words: str) -> dict[str, int]:
    """Return `files` that are entered, `moves` between them, and modules that are `loaded`, by one verb."""
    done = subprocess.run([sys.executable, "-c", _WATCH, *words], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stderr.splitlines()[-1]))


def run() -> None:
    """Print a table in Markdown."""
    with tempfile.TemporaryDirectory(prefix="reading-") as folder:
        submitted = count(
            "submit", "experiment=digits", "seed=1,2", "hardware=cpu_x1", "cluster=local", "train.num_steps=2",
            "schedule.warmup_steps=1", f"paths.runs_dir='{folder}'",
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while len(list(Path(folder).glob("*/*/DONE"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.5)
        looked = count("status", "--runs-dir", folder)
    print("| verb | files entered | moves between files | modules loaded |\n|---|---|---|---|")
    for name, found in (("submit of two runs", submitted), ("status of two runs", looked)):
        print(f"| {name} | {found['files']} | {found['moves']:,} | {found['loaded']} |")


if __name__ == "__main__":
    run()
