"""What gpt needs at least is what it really has, and never more than an estimate with torch says."""

from __future__ import annotations

import pytest

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.memory import least_bytes, memory_line
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.memory.estimate import estimate
from tests.composed import composed

_GPT = ["experiment=gpt_bytes", "cluster=slurm", "hardware=gpu_x8", "hardware.gpu_type=a100_40gb", "model.num_layers=2"]
_KNOWN_ALL = (
    "", "optim=sgd", "optim=lion", "precision=bf16_sr", "optim.offload=true", "train.ema_decay=0.9",
    "parallel.zero1=true",
)  # fmt: skip
_HUGE = ["model.num_layers=32", "model.embed_dim=4096", "model.num_heads=32"]


def _config(*words: str) -> TrainConfig:
    config = composed([*_GPT, *words])
    validate(config)
    return config


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "words",
    [
        [], ["optim=sgd"], ["precision=bf16_sr"], ["optim=lion"], ["optim=muon"], ["optim.offload=true"],
        ["train.ema_decay=0.9"], ["parallel.zero1=true"], ["precision=bf16_sr", "parallel=fsdp"],
        ["parallel=fsdp"], ["parallel=hsdp"], ["parallel=fsdp_tp"], ["parallel=tp"], ["parallel=pp",
        "train.grad_accum_steps=2"], ["data=synthetic_tokens", "model.vocab_multiple=128", "data.vocab_size=1000"],
        ["model.positions=rope", "model.norm=rmsnorm", "model.mlp=swiglu", "model.num_kv_heads=2"],
        ["parallel=fsdp", "optim.offload=true"], ["parallel.zero1=true", "optim.offload=true"],
        ["parallel=pp", "train.grad_accum_steps=2", "optim.offload=true"],
        ["parallel=fsdp", "train.ema_decay=0.9"], ["parallel=fsdp_tp", "train.ema_decay=0.9"],
        ["parallel=fsdp", "optim.in_backward=true", "train.max_grad_norm=null", "train.max_skipped_steps=null"],
        ["parallel=diloco", "train.eval_every_steps=0", "parallel.sync_every_steps=300"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_it_is_no_more_than_the_estimate(words: list[str]) -> None:
    config = _config(*words)
    least, found = least_bytes(to_plain(config), config.hardware.world_size), estimate(config)
    assert least is not None
    held = found.weights + found.gradients + found.average + (0 if config.optim.offload else found.optimizer)
    assert least <= held
    if " ".join(words) in _KNOWN_ALL:
        assert held < 1.01 * least, "of copies it is all but the counters of steps"


@pytest.mark.parametrize("words", [["experiment=digits", "model=mlp"], ["train.main=torch.nn.x"]], ids=" ".join)
def test_of_what_nobody_knows_nothing_is_said(words: list[str]) -> None:
    config = composed([*_GPT, *words] if "train" in words[0] else ["hardware=gpu_x1", *words])
    assert least_bytes(to_plain(config), 8) is None
    assert memory_line(to_plain(config), 8) is None


def test_a_model_that_cannot_fit_is_told_and_one_that_may_is_not() -> None:
    """32 blocks, 4096 wide: 6.4e9 weights, four times four bytes of each."""
    line = memory_line(to_plain(_config(*_HUGE)), 8)
    assert line is not None
    assert line.startswith("model=gpt needs at least 103.1 GB a rank (for weights, gradients and optimizer state only)")
    assert "hardware.gpu_type=a100_40gb has 40 GB. `plan --memory` estimates all of it" in line
    assert memory_line(to_plain(_config(*_HUGE, "parallel=fsdp")), 8) is None
    alone = ("hardware.gpu_type=b200", "hardware.gpus_per_node=1")
    line = memory_line(to_plain(_config(*_HUGE, *alone)), 1, per_gpu=2)
    assert "has 180 GB for the 2 runs that share it (pool.per_gpu)." in (line or "")
    for gpu in ("hardware.gpu_type=b200", "hardware.gpu_type=new", "hardware.gpu_type=null"):
        assert memory_line(to_plain(_config(*_HUGE, gpu)), 8) is None
