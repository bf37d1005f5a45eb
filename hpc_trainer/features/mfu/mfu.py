"""MFU of the steps that are logged, if the peak of the GPU is known. It costs nothing within a step."""

from __future__ import annotations

import torch
from torch import nn

from hpc_trainer.config.load import to_plain
from hpc_trainer.features.mfu.flops import BATCH, peak_flops
from hpc_trainer.runtime.own_process import OwnProcess
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.data.batches import StandIn
from hpc_trainer.training.rng import random_state_kept
from hpc_trainer.training.state import TrainState

FLOPS_FAILED = "mfu is left out: the operations of a step could not be counted"
_COUNT_S = 60.0
"""Seconds for which the first log waits for the count, which began when the run was built."""


class MfuAbility(Ability):
    _peak: float | None = None
    """Peak of all GPUs of the run together, FLOP/s; None: no mfu."""
    _process: OwnProcess | None = None
    """Counts the operations of one sample; None: the count is done, or there is none."""
    _flops: float | None = None

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        run = building.run
        if run is None or not run.is_rank_zero:  # rank 0 logs
            return
        peak = peak_flops(self.config, run.device)
        self._peak = None if peak is None else peak * run.world_size
        if peak is None and run.device.type == "cuda":
            name, products = torch.cuda.get_device_name(run.device), self.config.precision.format.products
            print(f"mfu: unknown, config/gpu_types.py has no peak rate of {name} for {products}")
        if peak is not None:
            self._begin(building)

    @random_state_kept()
    def _begin(self, building: Building) -> None:
        try:
            samples = StandIn.of(building.dataset, building.task, BATCH).to_plain()
        except Exception as error:  # the user's data set may raise anything
            print(f"{FLOPS_FAILED} ({type(error).__name__}: {error}).")
            return
        self._process = OwnProcess("hpc_trainer.features.mfu.flops")
        self._process.send({"config": to_plain(self.config), "samples": samples})

    def logged(self, step: int, values: dict[str, float]) -> None:
        """Add `mfu`, 0 to 1."""
        if self._process is not None:
            answer = self._process.answer(_COUNT_S)
            self.close(None)
            self._flops = answer.get("flops")
            if self._flops is None:
                print(f"{FLOPS_FAILED} ({answer['error']}). A method flops_per_sample() of the model may say.")
        if self._flops is not None and self._peak is not None:
            values["mfu"] = self._flops * values["samples_per_s"] / self._peak

    def close(self, error: BaseException | None) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


ABILITY = MfuAbility
