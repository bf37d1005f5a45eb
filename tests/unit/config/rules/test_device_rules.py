"""What a kind of device cannot do is said before anything runs, with what it can."""

from __future__ import annotations

import pytest

from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.cluster import Device
from hpc_trainer.config.schema.parallel import Dtype
from tests.unit.record.builders import make_config


@pytest.mark.parametrize("device", [Device.mps, Device.xla])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hardware__tasks_per_node", 2, ("is for one rank", "hardware.tasks_per_node=1")),
        ("hardware__num_nodes", 2, ("is for one rank", "hardware.num_nodes=1")),
        ("hardware__gpus_per_node", 1, ("hardware.gpus_per_node=1", "Use hardware.gpus_per_node=0")),
        ("precision__compute_dtype", Dtype.fp16, ("precision=fp16", "Use precision=bf16")),
        ("precision__compute_dtype", Dtype.tf32, ("precision=tf32", "Use precision=bf16")),
        ("train__compile", True, ("train.compile=true", "or train.compile=false")),
        ("train__micro_batch_size", "auto", ("train.micro_batch_size=auto", "or train.micro_batch_size=null")),
        ("optim__offload", True, ("optim.offload=true", "or optim.offload=false")),
    ],
)
def test_what_it_cannot_do(device: Device, key: str, value: object, words: tuple[str, ...]) -> None:
    problems = list(find_problems(make_config(hardware__device=device, **{key: value})))
    about = [each for each in problems if f"hardware.device={device.value}" in each]
    assert len(about) == 1, problems
    assert all(word in about[0] for word in words), about


@pytest.mark.parametrize("device", [Device.mps, Device.xla])
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
def test_what_it_can_do(device: Device, dtype: Dtype) -> None:
    config = make_config(hardware__device=device, precision__compute_dtype=dtype)
    assert list(find_problems(config)) == []
    assert config.hardware.device_type == device.value
