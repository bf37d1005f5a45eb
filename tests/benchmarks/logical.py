"""What logical ranks cost on two ranks over gloo: seconds a step against plain DDP, in turn."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.build import open_training
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.loop import open_batches

WORLD_SIZE = 2
STEPS = 20
ROUNDS = 7
KINDS = {
    "ddp": [],
    "logical_ranks=2": ["train.logical_ranks=2"],
    "logical_ranks=4": ["train.logical_ranks=4"],
    "logical_ranks=8": ["train.logical_ranks=8"],
}
MODELS = {
    "mlp 512": ["model=mlp", "model.hidden_dim=512", "train.global_batch_size=256"],
    "gpt 2x128": ["model=gpt", "data=text_bytes", "data.seq_len=64", "model.num_layers=2", "model.embed_dim=128",
                  "train.global_batch_size=32"],
}  # fmt: skip


def _config(words: list[str]) -> TrainConfig:
    with Composer() as composer:
        config = composer.compose(
            [
                "cluster=local",
                "experiment=digits",
                f"train.num_steps={STEPS}",
                "hardware=cpu_x2",
                "schedule.warmup_steps=0",
                *words,
            ]
        )
    validate(config)
    assert config.parallel.strategy is Strategy.ddp
    return config


def _seconds(config: TrainConfig, group: RankGroup, folder: Path) -> float:
    """Of STEPS steps, without what surrounds them."""
    store = CheckpointStore(folder / "checkpoints", group=group, keep_last=1, attempt=0)
    run = RunContext(
        paths=RunPaths(folder), env=read_rank_env({}), group=group, stop=StopFlag(), store=store, attempt=0,
        num_steps=STEPS,
    )  # fmt: skip
    with open_training(config, run) as training, contextlib.closing(open_batches(config, training)) as batches:
        begin = 0.0
        for step in range(STEPS):
            if step == 3:  # the first ones lay out buckets and buffers
                group.barrier()
                begin = time.perf_counter()
            training.stepper.step(training.state, batches, lr=1e-3, wish_to_stop=False)
            training.state.step += 1
        group.barrier()
        return (time.perf_counter() - begin) / (STEPS - 3)


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = dist.FileStore(str(folder / "rendezvous"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=300))
    group = RankGroup(rank=rank, world_size=WORLD_SIZE)
    found: dict[str, list[float]] = {}
    configs = {(m, k): _config([*words, *more]) for m, words in MODELS.items() for k, more in KINDS.items()}
    for _ in range(ROUNDS + 1):
        for (model, kind), config in configs.items():
            found.setdefault(f"{model}, {kind}", []).append(_seconds(config, group, folder))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({key: values[1:] for key, values in found.items()}))
    dist.destroy_process_group()


def run() -> None:
    """Prints milliseconds a step, and the ratio to DDP round by round."""
    with tempfile.TemporaryDirectory() as name:
        quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        ranks = [
            subprocess.Popen([sys.executable, "-m", "tests.benchmarks.logical", str(rank), name], env=quiet)
            for rank in range(WORLD_SIZE)
        ]
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a rank of the benchmark failed")
        found = json.loads((Path(name) / "found.json").read_text())
    print(f"\nlogical ranks on {WORLD_SIZE} gloo ranks, {STEPS - 3} steps a round, n={ROUNDS} rounds in turn")
    for model in MODELS:
        ddp = found[f"{model}, ddp"]
        for kind in KINDS:
            values = found[f"{model}, {kind}"]
            low, middle, high = statistics.quantiles([a / b for a, b in zip(values, ddp, strict=True)], n=4)
            print(
                f"{model}, {kind}: {statistics.median(values) * 1e3:.2f} ms a step, {middle:.2f} × ddp "
                f"(middle half {low:.2f} to {high:.2f})"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _rank(int(sys.argv[1]), Path(sys.argv[2]))
        os._exit(0)
    run()
