"""Fits digits by scikit-learn, batch after batch; saves every tenth one. It knows nothing of signals."""

import argparse
import os
import pickle
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

from hpc_trainer import log_metrics

parser = argparse.ArgumentParser()
parser.add_argument("--alpha", type=float, required=True)
parser.add_argument("--steps", type=int, required=True)
arguments = parser.parse_args()
saved = Path(os.environ["HPC_TRAINER_CHECKPOINTS"], "model.pickle")
images, labels = load_digits(return_X_y=True)
model, done = SGDClassifier(alpha=arguments.alpha, random_state=0), 0
if saved.exists():
    done, model = pickle.loads(saved.read_bytes())
print(f"begins after step {done}")
for step in range(done + 1, arguments.steps + 1):
    rows = np.random.default_rng(step).integers(1400, size=32)
    model.partial_fit(images[rows], labels[rows], classes=np.arange(10))
    time.sleep(0.02)
    if step % 10 == 0:
        saved.with_suffix(".new").write_bytes(pickle.dumps((step, model)))
        saved.with_suffix(".new").rename(saved)
    log_metrics(step, num_steps=arguments.steps, accuracy=model.score(images[1400:], labels[1400:]))
