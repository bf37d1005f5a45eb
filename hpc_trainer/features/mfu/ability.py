"""MFU of the steps that are logged, where the peak of the GPU is known. Nothing of it runs in a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.datasets.batch_trees import of_size
from hpc_trainer.features.mfu.flops import flops_per_sample, peak_flops
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.build import build_model
from hpc_trainer.training.state import TrainState

FLOPS_FAILED = "mfu is left out: the operations of a step could not be counted"


class MfuAbility(Ability):
    _peak: float | None = None
    """Of all GPUs of the run together, FLOP/s; None: no mfu."""
    _count: Callable[[], float] | None = None
    """Operations of one sample; asked once, at the first log, as it may take some seconds."""
    _flops: float | None = None

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        run, task, dataset = building.run, building.task, building.dataset
        if run is None or not run.is_rank_zero:  # which logs
            return
        peak = peak_flops(self.config, run.device)
        self._peak = None if peak is None else peak * run.world_size
        if peak is None and run.device.type == "cuda":
            name, products = torch.cuda.get_device_name(run.device), self.config.precision.format.products
            print(f"mfu: unknown, nobody told the peak of {name} for {products} (config/gpu_types.py)")

        def example(size: int) -> Any:
            return of_size(dataset, task, dataset.__getitems__(range(1)), size)

        self._count = partial(flops_per_sample, partial(build_model, self.config, dataset), task, example)

    def logged(self, step: int, values: dict[str, float]) -> None:
        """Adds `mfu`, 0 to 1."""
        if self._peak is None:
            return
        if self._count is not None:
            count, self._count = self._count, None
            try:
                self._flops = count()
            except Exception as error:  # a person's own model may need numbers that are not there, and raise anything
                print(f"{FLOPS_FAILED} ({type(error).__name__}: {error}). A method flops_per_sample() of it may say.")
        if self._flops is not None:
            values["mfu"] = self._flops * values["samples_per_s"] / self._peak


ABILITY = MfuAbility
