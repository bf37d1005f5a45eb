"""`train.lora`: training of adapters (Hu et al. 2021) alone, which peft puts beside the layers."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row


def _problems(config: TrainConfig) -> Iterator[str]:
    problem = missing("train.lora", "peft") if config.train.lora.rank > 0 else None
    if problem is not None:
        yield f"{problem}, or use train.lora.rank=0."


FEATURE = Feature(
    on="train.lora.rank",
    example="train.lora.rank=4",
    excludes=(
        Row("train.freeze", "all weights but the adapters stay as they are"),
        Row("parallel.tensor_parallel", "the model's plan knows no adapters", use="parallel=fsdp"),
        Row("parallel.pipeline_parallel", "a stage may be left with nothing to train", use="parallel=fsdp"),
        Row("precision=fp8|bf16_sr", "nobody has tried both", use="precision=bf16"),
        Row("optim=muon", "it trains other weights beside hidden matrices, and adapters are these alone"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
    after=("init_from",),
    before=("compile", "custom_optim", "in_backward", "lr_of", "muon", "recompute"),
)
