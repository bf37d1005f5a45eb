"""What the loop costs over a hand-written one that does the same work: the same model, data, optimizer and clipping."""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from hpc_trainer.config.compose import Composer
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.validate import validate
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training import loop as training_loop
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.optim import build_optimizer, set_learning_rate
from hpc_trainer.training.schedule import learning_rate

STEPS = 400
PAIRS = 21


def _config() -> TrainConfig:
    with Composer() as composer:
        config = composer.compose(
            ["cluster=local", "experiment=digits", "model=mlp", f"train.num_steps={STEPS}", "train.eval_every_steps=0",
             "checkpoint.every_steps=1000000", "monitor.log_every_steps=100", "model.hidden_dim=64"]
        )  # fmt: skip
    validate(config)
    return config


def _ours(config: TrainConfig) -> float:
    """Seconds of STEPS steps of the shared loop, from the first step to the last; evaluation and saving left out."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        paths = RunPaths(Path(name) / "run")
        paths.checkpoints.mkdir(parents=True)
        for folder in (paths.folder, paths.checkpoints):
            folder.chmod(0o700)
        group = RankGroup()
        run = RunContext(
            paths=paths, env=read_rank_env({}), group=group, stop=StopFlag(), attempt=0, num_steps=STEPS,
            store=CheckpointStore(paths.checkpoints, group=group, keep_last=1, attempt=0),
        )  # fmt: skip
        ends: list[float] = []
        begins: list[float] = []
        evaluate, clock = training_loop.evaluate, training_loop._Clock

        def timed_evaluate(*args: object, **kwargs: object) -> dict[str, float]:
            ends.append(time.perf_counter())
            return {"eval_loss": 0.0}

        class TimedClock(clock):  # type: ignore[misc, valid-type]
            def __init__(self, step: int) -> None:
                begins.append(time.perf_counter())
                super().__init__(step)

        training_loop.evaluate, training_loop._Clock = timed_evaluate, TimedClock  # type: ignore[assignment, misc]
        try:
            training_loop.train(config, run)
        finally:
            training_loop.evaluate, training_loop._Clock = evaluate, clock  # type: ignore[misc]
        return ends[0] - begins[0]


def _by_hand(config: TrainConfig) -> float:
    """The same work in the plainest words: no autocast, scaler, vote, metrics or heartbeat."""
    torch.manual_seed(0)
    dataset = training_loop.build_dataset(config, "train")
    model = training_loop.build_model(config, dataset)
    optimizer = build_optimizer(config.optim, model)
    batch_size, count = config.train.global_batch_size, len(dataset)
    begin = time.perf_counter()
    order = torch.randperm(count)
    position = 0
    total = torch.zeros(())
    for step in range(STEPS):
        if position + batch_size > count:
            order, position = torch.randperm(count), 0
        inputs, targets = dataset.__getitems__(order[position : position + batch_size].numpy())
        position += batch_size
        set_learning_rate(optimizer, learning_rate(config.schedule, config.optim.lr, step, STEPS))
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
    return time.perf_counter() - begin


def run() -> None:
    """Prints microseconds a step, ours and by hand in turn, and their difference pair by pair."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    config = _config()
    _ours(config)
    _by_hand(config)
    pairs = [(_ours(config), _by_hand(config)) for _ in range(PAIRS)]
    extra = [(ours - hand) / STEPS * 1e6 for ours, hand in pairs]
    ours, hand = (statistics.median(column) / STEPS * 1e6 for column in zip(*pairs, strict=True))
    print(f"\ntraining loop (mlp 64-64-64-10, batch 64, AdamW, clipping; {STEPS} steps, n={PAIRS} pairs)")
    print(f"by hand {hand:.0f} µs a step, shared loop {ours:.0f} µs, ratio {ours / hand:.3f}")
    low, middle, high = statistics.quantiles(extra, n=4)
    print(f"added: median {middle:.0f} µs, middle half {low:.0f} to {high:.0f}; budget 20 µs")
