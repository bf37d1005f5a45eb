"""The training of the scenarios: digits and a small net that wait at gates. Copied into each test's folder.

A gate is a file that the test makes and removes. A rank that comes to a closed gate says so, and waits. A run that
meets no gate trains at full speed: that is the undisturbed run.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.training.data import digits

GATES = Path(__file__).parent / "gates"
RANK = int(os.environ.get("SLURM_PROCID", "0"))
_HELD: list[Any] = []


def pass_gate(name: str) -> None:
    """Waits while the gate `name` is closed; says so if a stop signal comes meanwhile."""
    gate = GATES / f"{name}.closed"
    if gate.exists():
        flag = getattr(signal.getsignal(signal.SIGUSR2), "__self__", None)
        (GATES / f"{name}.rank-{RANK}").touch()
        while gate.exists():
            if flag is not None and flag.is_set:
                (GATES / f"{name}.signalled-{RANK}").touch()
            time.sleep(0.01)


class Gated(digits.Digits):
    """The digits. In the train split: a pace in seconds a batch, an error or a hunger for memory, if asked."""

    split = "train"

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        pass_gate(self.split)
        pass_gate(f"{self.split}-of-{RANK}")
        if self.split == "train":
            if (GATES / f"raise.rank-{RANK}").exists():
                raise RuntimeError(f"the disk of rank {RANK} is gone")
            if (GATES / "eat_mb").exists():
                _HELD.append(bytearray(b"x") * (int((GATES / "eat_mb").read_text()) << 20))
            pace = GATES / "pace_s"
            time.sleep(float(pace.read_text() or 0) if pace.exists() else 0.0)
        return super().__getitems__(indices)


def build(split: str) -> Gated:
    pass_gate(f"build-{split}")
    whole = digits.build(DigitsConfig(num_eval=360), split)
    gated = Gated(whole.images, whole.targets, 0.0, 1.0)  # nobody asks what its pixels were
    gated.split = split
    return gated


class Net(nn.Module):
    """Two layers with dropout: enough that a wrong random state or a step too many shows in the weights."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        _be_alone(torch.initial_seed())
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, num_classes)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        pass_gate("save")
        return super().state_dict(*args, **kwargs)


def _be_alone(start: int) -> None:
    """Holds a lock as long as this process lives: a second incarnation of the same run leaves a mark.

    `start` is what torch draws from, which tells the runs of one array apart.
    """
    GATES.mkdir(exist_ok=True)
    lock = (GATES / f"run-{start}.rank-{RANK}.lock").open("a+")
    _HELD.append(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        (GATES / "two_at_once").write_text(f"rank {RANK}: {os.getpid()} beside {lock.read()}")
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
