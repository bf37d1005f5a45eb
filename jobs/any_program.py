"""A plain program that survives preemption: no hpc_trainer in its training, one line for its metrics.

Command:  jobs/any_program.sh [KEY=VALUE]...     docs/any_program.md explains it
Cost:     some seconds a run on one CPU core; no GPU, no Slurm. Expected: error below 0.001 for both.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

from hpc_trainer import log_metrics

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--steps", type=int, default=200)
arguments = parser.parse_args()

saved = Path(os.environ.get("HPC_TRAINER_CHECKPOINTS", "."), "line.json")
start, weights = json.loads(saved.read_text()) if saved.exists() else (0, [0.0] * 4)
for step in range(start + 1, arguments.steps + 1):
    inputs = np.random.default_rng(step).normal(size=(32, 4))
    miss = inputs @ np.array(weights) - inputs.sum(axis=1)
    weights = list(np.array(weights) - arguments.lr * inputs.T @ miss / 32)
    time.sleep(0.01)  # a real program has more to do
    if step % 10 == 0:
        saved.with_suffix(".new").write_text(json.dumps([step, weights]))
        saved.with_suffix(".new").replace(saved)
        log_metrics(step, error=float(np.square(miss).mean()), num_steps=arguments.steps)
