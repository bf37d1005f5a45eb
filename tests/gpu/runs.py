"""Runs of the worker on this machine's GPU, as `hpc-trainer train` starts them, and a loop by hand beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.spec import append_specs
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.optim.schedule import learning_rate
from hpc_trainer.training.rng import seed_everything
from tests.benchmarks.by_hand import optimizer_by_hand

HARDWARE = os.environ.get("HPC_TRAINER_TEST_HARDWARE", "gpu_x1")
DEVICE = torch.device("cuda" if HARDWARE.startswith("gpu") else "cpu")
ON_GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="means nothing on a CPU")


@dataclass(frozen=True, slots=True)
class Figures:
    """What tests measure, a line of JSON each, kept as it comes: a session that is cut off loses none."""

    file: Path

    def tell(self, name: str, **values: object) -> None:
        """Print and keep the figures of one test."""
        line = json.dumps({"name": name, **values}, default=str)
        print(line)
        with self.file.open("a") as sink:
            sink.write(f"{line}\n")


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that has ended. `error`: what the worker printed, with its log, if it failed."""

    paths: RunPaths
    config: TrainConfig
    exit_code: int
    error: str

    @property
    def lines(self) -> list[dict[str, float]]:
        """Its metrics that tell a loss."""
        told = map(json.loads, self.paths.metrics.read_text().splitlines())
        return [line for line in told if "loss" in line]

    @property
    def losses(self) -> list[float]:
        """One a line of metrics."""
        return [line["loss"] for line in self.lines]

    @property
    def log(self) -> str:
        """What rank 0 printed."""
        return "".join(path.read_text() for path in sorted(self.paths.logs.glob("*rank-0.log")))


def _place(rank: int, count: int) -> dict[str, str]:
    """What the local queue tells each of several ranks of this machine."""
    if count == 1:
        return {}
    names = {"GLOBALID": rank, "LOCALID": rank, "NTASKS": count, "NODEID": 0, "JOB_NUM_NODES": 1, "JOB_ID": 1}
    return {f"SUBMITIT_LOCAL_{name}": str(value) for name, value in names.items()}


@dataclass(frozen=True, slots=True)
class Runs:
    """Sweeps below `folder`."""

    folder: Path

    def freeze(self, *words: str, hardware: str = HARDWARE) -> tuple[RunPaths, TrainConfig]:
        """The run of one configuration, not yet begun."""
        grid = freeze_grid([
            *words, f"hardware={hardware}", "cluster=local", f"paths.runs_dir='{self.folder}'", "snapshot=off",
            f"sweep_name=s{uuid.uuid4().hex[:8]}",
        ])  # fmt: skip
        grid.sweep.folder.mkdir(parents=True, mode=0o700)
        append_specs(grid.sweep, grid.specs)
        return grid.sweep.run(grid.specs[0].run_id), grid.specs[0].typed()

    def train(
        self, *words: str, hardware: str = HARDWARE, program: str | None = None,
        may_fail: bool = False,
    ) -> Trained:  # fmt: skip
        """Train it to its end. `program`: Python that is run in the worker's process, before it."""
        paths, config = self.freeze(*words, hardware=hardware)
        started = ["-m", "hpc_trainer.worker"]
        if program is not None:
            started = ["-c", f"{program}\nimport runpy\nrunpy.run_module('hpc_trainer.worker', run_name='__main__')"]
        command = [sys.executable, *started, "--sweep-dir", str(paths.folder.parent), "--run", paths.run_id]
        count = config.hardware.world_size
        ranks = [
            subprocess.Popen(command, env={**os.environ, **_place(rank, count)}, stderr=subprocess.PIPE, text=True)
            for rank in range(count)
        ]
        errors = [rank.communicate(timeout=400)[1] for rank in ranks]
        error = "".join([*errors, *(path.read_text()[-6000:] for path in paths.logs.glob("*.log"))])
        found = Trained(paths, config, max(rank.returncode for rank in ranks), error)
        assert may_fail or found.exit_code == 0, error
        return found


def by_hand(config: TrainConfig, device: torch.device) -> list[float]:
    """The losses of all steps of the same training by a loop that knows nothing of ours but data, model and order."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision.compute_dtype.value)
    is_tf32 = config.precision.compute_dtype.value == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_tf32
    torch.use_deterministic_algorithms(True)
    seed_everything(config.seed)
    dataset = build_dataset(config, "train", build_task(config))
    model = build_model(config, dataset).to(device)
    optimizer = optimizer_by_hand(config, model)
    scaler = torch.amp.GradScaler(device.type, init_scale=config.precision.init_scale, enabled=dtype is torch.float16)
    order = BatchOrder(len(dataset), config.train.global_batch_size, config.seed)
    losses = []
    for step in range(config.train.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.schedule, config.optim.lr, step, config.train.num_steps)
        inputs, targets = (each.to(device) for each in dataset.__getitems__(order.global_indices(step).copy()))  # type: ignore[arg-type]
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if config.train.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses
