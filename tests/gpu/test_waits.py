"""In the steady state the host never waits for the GPU, and a stop is answered a step later."""

from __future__ import annotations

import pytest

from tests.gpu.runs import ON_GPU, Figures, Runs

pytestmark = ON_GPU

# Counts from the begin of step 22 to that of step 40, between two lines of metrics; torch warns of each wait.
_COUNT = """
import collections, traceback, warnings, torch
from hpc_trainer.training.step import Stepper
plain, seen, count = Stepper.step, collections.Counter(), [0]
def show(message, *rest, **more):
    if 'called a synchronizing' in str(message):
        stack = [each for each in traceback.extract_stack() if 'warnings' not in each.filename][:-1]
        ours = [f'{each.filename.rpartition("/")[2]}:{each.lineno}' for each in stack if 'hpc_trainer' in each.filename]
        seen[' '.join(ours[-3:])] += 1
def step(self, *args, **kwargs):
    count[0] += 1
    if count[0] == 22:
        warnings.simplefilter('always')
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode('warn')
    if count[0] == 40:
        torch.cuda.set_sync_debug_mode('default')
        print('WAITS', dict(seen), flush=True)
    return plain(self, *args, **kwargs)
Stepper.step = step
"""
TRAININGS = {
    "gpt": ("experiment=gpt_bytes", "precision=bf16"),
    "gpt_fp16": ("experiment=gpt_bytes", "precision=fp16"),
    "gpt_accumulated": ("experiment=gpt_bytes", "train.micro_batch_size=4"),
    "resnet": ("experiment=resnet_synthetic", "train.channels_last=true", "train.deterministic=false"),
    "averaged": ("experiment=gpt_bytes", "train.ema_decay=0.99"),
    "lion": ("experiment=gpt_bytes", "optim=lion"),
    "muon": ("experiment=gpt_bytes", "optim=muon"),
    "chunked": ("experiment=gpt_bytes", "train.loss_chunk_size=512"),
    "guarded": ("experiment=gpt_bytes", "train.guard.on_spike=skip"),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_step_waits_for_nothing(name: str, runs: Runs, figures: Figures) -> None:
    done = runs.train(
        *TRAININGS[name], "train.num_steps=60", "monitor.log_every_steps=20", "train.eval_every_steps=0",
        "checkpoint.every_steps=1000", program=_COUNT,
    )  # fmt: skip
    (told,) = (line for line in done.log.splitlines() if "WAITS" in line)
    figures.tell(name, waits=told.partition("WAITS ")[2])
    assert told.endswith("WAITS {}"), told
