"""Exported file as a module that takes a batch: the model that its `load.py` makes, without running `load.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hpc_trainer.features.qat.rounding import import_torchao
from hpc_trainer.worker.deploy.graphs import read_onnx, read_program
from hpc_trainer.worker.deploy.weights import read_weights


class Opened(nn.Module):
    """Module around a function that runs a file. It has no trainable weights, and only one mode."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._run = (run,)  # no submodule: a graph refuses a change of its mode

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs for a batch of inputs."""
        return self._run[0](inputs)


def open_file(path: Path, to: str, quantize: str | None, build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model in the file.

    Args:
        build: returns the model, with any weights, that a file of weights alone is loaded into.
    """
    if to == "onnx":
        return Opened(read_onnx(path))
    if quantize is not None:
        import_torchao()
    if to == "torch_export":
        return Opened(read_program(path))
    model = build()
    model.load_state_dict(read_weights(path), assign=quantize is not None)
    return model.eval().requires_grad_(False)
