"""The loop that a careful person writes by hand: what the shared loop is measured against, on the CPU and on a GPU."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, SgdConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.training.optim.schedule import learning_rate

Batch = tuple[torch.Tensor, torch.Tensor]


def log_line(file: Any, step: int, loss: torch.Tensor, norm: Any, speed: float) -> float:
    """A line of metrics, when the device has done all steps so far; the clock, for the next one."""
    values = {"step": step, "loss": loss.item(), "norm": float(norm), "speed": speed, "time": time.time()}
    file.write(json.dumps(values) + "\n")
    file.flush()
    return time.perf_counter()


def optimizer_by_hand(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return fused AdamW or SGD, with weight decay for matrices and larger weights only."""
    weights = list(model.parameters())
    groups = [
        {"params": [each for each in weights if each.ndim >= 2], "weight_decay": config.optim.weight_decay},
        {"params": [each for each in weights if each.ndim < 2], "weight_decay": 0.0},
    ]
    optim = config.optim
    if isinstance(optim, AdamwConfig):
        first, second = optim.betas
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(first, second), eps=optim.eps, fused=True)
    assert isinstance(optim, SgdConfig)
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)


def train_by_hand(
    config: TrainConfig, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], model: nn.Module,
    optimizer: torch.optim.Optimizer, batches: Iterator[Batch], device: torch.device, file: Any, *,
    on_step: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """AMP in bf16 with a scaler for the day of fp16, clipping, a line of metrics every so often, a stop flag, saves.

    Args:
        config: gives the steps, the learning rates, when to log and when to save.
        loss_of: inputs and targets to the loss; compiled or not.
        model: whose gradients are clipped.
        batches: one for each step, on the device or in (pinned) host memory.
        file: for the lines.
        on_step: called when a step begins.
    """
    num_steps, log_every, save_every = (
        config.train.num_steps, config.monitor.log_every_steps, config.checkpoint.every_steps,
    )  # fmt: skip
    max_norm = config.train.max_grad_norm
    assert max_norm is not None
    stopped: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: stopped.append(number))
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    begin = time.perf_counter()
    for step in range(num_steps):
        on_step()
        lr = learning_rate(config.schedule, config.optim.lr, step, num_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = next(batches)
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % log_every == 0:
            begin = log_line(file, step + 1, loss, norm, log_every / (time.perf_counter() - begin))
        if stopped or (step + 1) % save_every == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "never")
            break
    signal.signal(signal.SIGUSR2, before)
