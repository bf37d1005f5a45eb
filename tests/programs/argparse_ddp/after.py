"""A DDP script for torchrun, as in torch's own tutorials: rank 0 saves."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpc_trainer import log_metrics

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--out", type=Path, required=True)
arguments = parser.parse_args()
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
last, done = arguments.out / "model.pt", 0
if last.exists():
    saved = torch.load(last, weights_only=True)
    done = saved["step"]
    model.module.load_state_dict(saved["model"])
for step in range(done + 1, arguments.steps + 1):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
    log_metrics(step, loss=loss, num_steps=arguments.steps)
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.4f}", flush=True)
        torch.save({"step": step, "model": model.module.state_dict()}, last.with_suffix(".new"))
        last.with_suffix(".new").rename(last)
dist.destroy_process_group()
