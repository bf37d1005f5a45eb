"""`optim/`: the optimizer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.config.schema.effect import only_with


class LrScaling(str, enum.Enum):
    """How the learning rate grows with the batch."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


class MuonScale(str, enum.Enum):
    """How much a step of Muon moves a matrix of m x n, as a share of the learning rate."""

    match_rms_adamw = "match_rms_adamw"
    original = "original"


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """What every optimizer has. Not chosen itself."""

    name: str = "???"
    lr: float = 1e-3
    """Peak learning rate, > 0."""
    lr_scaling: LrScaling = LrScaling.none
    """lr is meant for a batch of lr_base_batch samples, and is multiplied by k = global_batch_size / lr_base_batch
    (linear: Goyal et al. 2017, for SGD) or by its root (sqrt: Malladi et al. 2022, for Adam and AdamW)."""
    lr_base_batch: int | None = field(
        default=None, metadata=only_with("optim.lr_scaling=linear", "optim.lr_scaling=sqrt")
    )
    """Samples of the batch that lr is meant for, ≥ 1; only with lr_scaling."""
    weight_decay: float = 0.0
    """Decay of weights with two or more dimensions; biases and norms have none. ≥ 0."""
    in_backward: bool = False
    """Each weight is updated as soon as its gradient is known, which is then freed: no memory for all gradients. Needs
    parallel=none or fsdp, no clipping, no accumulation, no fp16, train.max_skipped_steps=null. The same bits."""
    offload: bool = False
    """Moments live in host memory, each rank's own where ranks share them out, and are brought to the device in pieces
    for each step. The same bits; costs the time of moving them there and back."""


@dataclass(kw_only=True, slots=True)
class SgdConfig(OptimConfig):
    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    """In [0, 1)."""
    nesterov: bool = True
    """Nesterov's momentum; needs momentum > 0."""


@dataclass(kw_only=True, slots=True)
class AdamwConfig(OptimConfig):
    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Two decay rates in [0, 1)."""
    eps: float = 1e-8
    """Added to the denominator, > 0."""


@dataclass(kw_only=True, slots=True)
class MuonConfig(OptimConfig):
    """Muon for hidden matrices, AdamW for all other weights; torch 2.9 or newer."""

    name: str = "muon"
    lr: float = 1e-3
    """Peak learning rate of the hidden matrices, > 0."""
    weight_decay: float = 0.1
    momentum: float = 0.95
    """Of Muon, in [0, 1)."""
    nesterov: bool = True
    """Nesterov's momentum, of Muon."""
    ns_steps: int = 5
    """Newton-Schulz iterations that make an update orthogonal, 1 to 99."""
    adjust_lr: MuonScale = MuonScale.match_rms_adamw
    """match_rms_adamw: lr x 0.2 x sqrt(max(m, n)), so that the lr and weight_decay of an AdamW fit (arXiv 2502.16982);
    original: lr x sqrt(max(1, m / n)), which wants an lr of about 0.02."""
    adamw_lr: float | None = None
    """Peak learning rate of the other weights, > 0; it follows the same schedule. null: lr."""
    adamw_weights: list[str] = field(default_factory=list)
    """Names of weights, with * and ?, that AdamW takes besides embeddings, the output layer (the last linear layer
    outside of blocks) and all that have not two dimensions."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Of AdamW: two decay rates in [0, 1)."""
    eps: float = 1e-8
    """Of AdamW: added to the denominator, > 0."""


@dataclass(kw_only=True, slots=True)
class CustomOptimConfig(OptimConfig):
    """Any optimizer whose state_dict tells all: `Target(groups, lr=lr, **kwargs)`, groups with `weight_decay`."""

    name: str = "custom"
    _target_: str = "???"
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class named by `_target_`, besides the groups and lr."""
