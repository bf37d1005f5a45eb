"""A program that writes, deletes and links every name that it is given, in its own folder, and tells two metrics.

python hostile.py SEED EXIT_CODE NAMES.json: a seed of 0 leaves all names alone.
"""

import contextlib
import json
import os
import random
import shutil
import sys
from pathlib import Path

seed, code, names = int(sys.argv[1]), int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
draw, folder = random.Random(seed), Path(os.environ["HPC_TRAINER_RUN_DIR"])
LIES = (
    "", "no JSON", '{"time": 1.0}\n', '{"step": 99, "num_steps": 99, "metrics": {"loss": 99.0}, "time": 1.0}\n',
    '{"event": "end", "attempt": 0, "time": 1.0, "state": "COMPLETED", "cause": "done"}\n',
    '{"exit_code": 0, "value": 99, "loss": 99.0, "step": 99, "incarnation": "x", "job_id": "1", "restart_count": 0}\n',
)  # fmt: skip


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def disturb(name: str) -> None:
    """Do something to the name, whatever has it."""
    for place in (folder, Path(os.environ["HPC_TRAINER_CHECKPOINTS"]), Path.cwd()):
        path = place / name
        remove(path)
        act = draw.choice(("write", "write", "delete", "folder", "link", "loop", "pipe"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if act == "write":
            path.write_text(draw.choice(LIES))
        elif act == "folder":
            path.mkdir()
        elif act == "link":
            path.symlink_to(draw.choice(("/etc/passwd", "/nonexistent", str(folder), "/dev/zero")))
        elif act == "loop":
            path.symlink_to(path.name)
        elif act == "pipe":
            os.mkfifo(path)


with Path(os.environ["HPC_TRAINER_METRICS"]).open("a") as told:
    for step in (1, 2):
        for name in draw.sample(names, len(names)) if seed else ():
            with contextlib.suppress(OSError):  # a name below one that is a file or a link now
                disturb(name)
        print(json.dumps({"step": step, "num_steps": 2, "loss": 1 / step}), file=told, flush=True)
print(f"ends with {code}")
sys.exit(code)
