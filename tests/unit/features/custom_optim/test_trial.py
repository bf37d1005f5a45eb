"""optim=custom that cannot update parts of weights is told so in a sentence, before data are read."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.schema.optim import CustomOptimConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.custom_optim.custom_optim import try_without_ranks
from hpc_trainer.features.memory import estimate
from tests.unit.record.builders import make_config

HERE = __name__ if "." in __name__ else f"tests.unit.features.custom_optim.{__name__}"
SHARED = {
    "fsdp": ("parallel=fsdp", "hardware=gpu_x2"),
    "hsdp": ("parallel=hsdp", "hardware=gpu_x8", "parallel.data_parallel_replicate=2"),
    "tp": ("parallel=tp", "hardware=gpu_x2", "model=gpt", "data=text_bytes"),
    "fsdp_tp": ("parallel=fsdp_tp", "hardware=gpu_x8", "model=gpt", "data=text_bytes"),
}


class _Plain(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self.move(weight, weight.grad)

    def move(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.sub_(gradient)


class Masked(_Plain):
    """A mask of parts, as Rprop has it: DTensor has no rule for it."""

    def move(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient[gradient.gt(0)] = 0.5


class Mixed(_Plain):
    """State that is made whole, beside weights in parts."""

    def move(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.sub_(gradient.mul(torch.ones(weight.shape, device=gradient.device)))


class Broken(_Plain):
    """Its own error, whatever it is given."""

    def move(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        raise RuntimeError("out of luck")


def _config(way: str, name: str) -> Any:
    target = CustomOptimConfig(_target_=name if "." in name else f"{HERE}.{name}")
    return make_config(*SHARED[way], "cluster=slurm", optim=target, trust=["tests"])


@pytest.mark.parametrize("way", SHARED)
@pytest.mark.parametrize("name", ["Masked", "Mixed", "torch.optim.Adafactor", "torch.optim.Rprop"])
def test_one_that_cannot_do_parts_is_named_with_operation_layout_and_fix(way: str, name: str) -> None:
    config = _config(way, name)
    with pytest.raises(ConfigError) as error:
        try_without_ranks(config)
    said = str(error.value)
    assert "\n" not in said
    assert said.startswith(f"optim._target_={config.optim._target_} must be able to update parts of weights (DTensor)")
    assert re.search(r"its step fails on them in (aten[.:])?\w+", said), said
    assert ("tp 2" if way == "tp" else "dp_shard ") in said
    assert said.endswith("Use optim=adamw, or parallel=ddp parallel.tensor_parallel=1.")


@pytest.mark.parametrize("way", SHARED)
@pytest.mark.parametrize("name", ["_Plain", "Broken", "torch.optim.AdamW", "torch.optim.RAdam", "torch.optim.SGD"])
def test_one_that_can_and_one_that_cannot_step_at_all_are_let_go_on(way: str, name: str) -> None:
    try_without_ranks(_config(way, name))
    assert not torch.distributed.is_initialized()


def test_the_estimate_at_plan_time_says_the_sentence() -> None:
    with pytest.raises(ConfigError, match=r"must be able to update parts of weights \(DTensor\)"):
        estimate._answer(
            {"config": to_plain(_config("fsdp", "Masked"))}
        )  # the process that asks is told it as an error
