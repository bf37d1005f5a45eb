"""A hand-written PyTorch loop that survives preemption; docs/own_loop.md explains each call.

Command:  jobs/own_loop.sh [KEY=VALUE]...     which says train.main=own_loop.main
Cost:     half a minute on one CPU core; no GPU, no Slurm. Expected: eval_accuracy ≥ 0.95.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpc_trainer import RunContext
from hpc_trainer.datasets import digits


def main(config, run: RunContext) -> None:
    train_set, eval_set = digits.build(config.data, "train"), digits.build(config.data, "eval")
    width, lr = config.params.get("width", 128), config.params.get("lr", 0.002)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))
    model.to(run.device)
    # find_unused_parameters keeps the order of sums: without it the first step after a resume has another.
    net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if run.world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    step = run.restore(model=model, optimizer=optimizer).step
    while step < run.num_steps:
        chance = torch.Generator().manual_seed(config.seed * 1_000_003 + step)  # the batch follows from the step
        rows = torch.randint(len(train_set), (64,), generator=chance)[run.rank :: run.world_size]
        loss = cross_entropy(net(train_set.images[rows].to(run.device)), train_set.targets[rows].to(run.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            run.log(step, {"loss": loss})
        should_stop = run.should_stop(step)
        if should_stop or run.should_save(step) or step == run.num_steps:
            run.save(step, model=model, optimizer=optimizer)
        if should_stop:
            return
    right = model.eval()(eval_set.images.to(run.device)).argmax(dim=1).cpu() == eval_set.targets
    run.finish({"eval_accuracy": right.float().mean()})
