"""`train.lora`: training of small matrices beside frozen layers."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, key, only_with

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
    """Names of layers, with * and ?, as ['*.query_key_value']; []: every linear layer inside blocks."""
    also: list[str] = key([], _WITH_RANK)
    """Names of weights, with * and ?, that are trained themselves, as ['score.*'] for a new head."""
