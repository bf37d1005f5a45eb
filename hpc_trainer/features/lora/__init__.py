"""`train.lora`: training of only the adapters (Hu et al. 2021) that peft puts beside the layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, ONCE_SET, key, only_with, section
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


_WITH_RANK = only_with("train.lora.rank")


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    rank: int = key(0, ALWAYS, limits="≥ 0")
    """Rank of the two matrices beside each chosen layer (Hu et al. 2021, arXiv:2106.09685); all other weights are
    frozen. 0: off."""
    alpha: float = key(16.0, _WITH_RANK, limits="> 0")
    """The output of the matrices is multiplied by alpha / rank."""
    dropout: float = key(0.0, _WITH_RANK, limits="[0, 1)")
    """Dropout probability for the input of the matrices."""
    targets: list[str] = key([], _WITH_RANK)
    """Names of layers, with * and ?, such as ['*.query_key_value']; []: every linear layer inside blocks."""
    also: list[str] = key([], _WITH_RANK)
    """Names of weights, with * and ?, that are trained themselves, such as ['score.*'] for a new head."""


class Keys:
    """Key in the section `train`."""

    lora: LoraConfig = section(LoraConfig, ONCE_SET, INCOMPATIBLE)


def _problems(config: TrainConfig) -> Iterator[str]:
    problem = missing("train.lora", "peft")
    if problem is not None:
        yield f"{problem}, or use train.lora.rank=0."


FEATURE = Feature(
    on="train.lora.rank",
    example="train.lora.rank=4",
    excludes=(
        Row("train.freeze", "all weights but the adapters stay as they are"),
        Row("parallel.tensor_parallel", "the model's plan knows no adapters", use="parallel=fsdp"),
        Row("parallel.pipeline_parallel", "a stage may be left with nothing to train", use="parallel=fsdp"),
        Row("precision=fp8|bf16_sr", "the combination is untested", use="precision=bf16"),
        Row("optim=muon", "it trains other weights beside hidden matrices, and adapters are only hidden matrices"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
    after=("init_from",),
    before=("compile", "custom_optim", "in_backward", "lr_of", "muon", "recompute"),
)
