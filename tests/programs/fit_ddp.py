"""A plain DDP script for torchrun: rank 0 saves every tenth step, and all go on from there."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpc_trainer import log_metrics

STEPS = int(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
saved = Path(os.environ["HPC_TRAINER_CHECKPOINTS"], "model.pt")
done = 0
if saved.exists():
    state = torch.load(saved, weights_only=True)
    done = state["step"]
    model.load_state_dict(state["model"])
print(f"begins after step {done}, rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
for step in range(done + 1, STEPS + 1):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
    if step % 10 == 0 and dist.get_rank() == 0:
        torch.save({"step": step, "model": model.state_dict()}, saved.with_suffix(".new"))
        saved.with_suffix(".new").rename(saved)
    log_metrics(step, loss=loss, num_steps=STEPS)
dist.destroy_process_group()
