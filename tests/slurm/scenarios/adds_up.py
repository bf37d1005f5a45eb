"""A program that goes on from its own checkpoint: `adds_up.py STEPS PACE_FILE`. Each bit of its state counts."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS, PACE = int(sys.argv[1]), Path(sys.argv[2])
RANK = int(os.environ["SLURM_PROCID"])
STATE = Path(os.environ["HPC_TRAINER_CHECKPOINTS"]) / f"state-{RANK}.json"
_ASKED = []


def main() -> int:
    """0 when it is done, 75 when it wants to go on later."""
    signal.signal(signal.SIGTERM, lambda number, frame: _ASKED.append(number))
    step, value = json.loads(STATE.read_text()) if STATE.exists() else (0, 0.1 + 0.01 * RANK)
    while step < STEPS and not _ASKED:
        step, value = step + 1, 3.99 * value * (1.0 - value)  # the logistic map: a lost bit shows in 50 steps
        if RANK == 0:
            with Path(os.environ["HPC_TRAINER_METRICS"]).open("a") as file:
                file.write(json.dumps({"step": step, "num_steps": STEPS, "value": value}) + "\n")
        time.sleep(0.02 if PACE.exists() else 0.0)
    STATE.write_text(json.dumps([step, value]))
    return 0 if step == STEPS else 75


sys.exit(main())
