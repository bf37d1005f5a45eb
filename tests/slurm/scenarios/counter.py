"""The program of campaigns: it counts along a chain of hashes, saves where it is, and tells it. Copied into a folder.

python counter.py GATES SEED NUM_STEPS SAVED_EVERY

It costs a thirtieth of a training with torch to start, so a campaign can kill thirty times as often. What an
interruption loses or doubles shows in the chain.
"""

import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

gates, seed, num_steps, saved_every = Path(sys.argv[1]), *map(int, sys.argv[2:])
saved = Path(os.environ["HPC_TRAINER_CHECKPOINTS"]) / "state.json"
stops: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))


def be_alone() -> object:
    """Hold a lock as long as this process lives: a second incarnation of the run leaves a mark."""
    gates.mkdir(exist_ok=True)
    lock = (gates / f"run-{seed}.rank-0.lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        (gates / "two_at_once").write_text(f"{os.getpid()} beside {lock.read()}")
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    (gates / f"run-{seed}.worker-0.lock").write_text(str(os.getppid()))  # to be killed, as ranks are
    return lock


def save(step: int, link: str) -> None:
    """Replace the state, as it is on the server when this returns."""
    part = saved.with_suffix(".part")
    with part.open("w") as file:
        json.dump({"step": step, "link": link}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(saved)


def pace_s() -> float:
    """Return the seconds that a step takes."""
    try:
        return float((gates / "pace_s").read_text() or 0)
    except OSError:
        return 0.0


held = be_alone()
step, link = 0, str(seed)
if saved.exists():
    state = json.loads(saved.read_text())
    step, link = state["step"], state["link"]
print(f"begins after step {step}", flush=True)
while step < num_steps:
    if stops:
        save(step, link)
        sys.exit(75)
    time.sleep(pace_s())
    step += 1
    link = hashlib.sha256(f"{link} {step}".encode()).hexdigest()
    if step % 10 == 0:
        line = {"step": step, "num_steps": num_steps, "loss": int(link[:8], 16) / 2**32}
        with Path(os.environ["HPC_TRAINER_METRICS"]).open("a") as told:
            told.write(f"{json.dumps(line)}\n")
    if step % saved_every == 0 or step == num_steps:
        save(step, link)
