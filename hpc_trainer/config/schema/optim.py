"""`optim/`: the optimizer."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_trainer.config.schema.key import ALWAYS, COUNTS, INCOMPATIBLE, ONCE_SET, RULED, key, only_with


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

    # What `plan` has to know of each kind; an own optimizer may do anything.
    updates_each_weight_alone: ClassVar[bool] = False
    """A weight's update needs that weight's gradient and state alone, and the group's numbers, which stay: weights may
    be updated in pieces."""

    name: str = key("???", ALWAYS, COUNTS, INCOMPATIBLE)
    lr: float = key(1e-3, ALWAYS, COUNTS, limits="> 0")
    """Peak learning rate."""
    lr_scaling: LrScaling = key(LrScaling.none, ALWAYS, ONCE_SET)
    """lr is meant for a batch of lr_base_batch samples, and is multiplied by k = global_batch_size / lr_base_batch
    (linear: Goyal et al. 2017, for SGD) or by its root (sqrt: Malladi et al. 2022, for Adam and AdamW)."""
    lr_base_batch: int | None = key(
        None, only_with("optim.lr_scaling=linear", "optim.lr_scaling=sqrt"), ONCE_SET, limits="≥ 1"
    )
    """Samples of the batch that lr is meant for; only with lr_scaling."""
    lr_of: dict[str, float] = key({}, ALWAYS, ONCE_SET, INCOMPATIBLE, limits="> 0")
    """Names of weights, with * and ? -> what their learning rate is multiplied by at all steps, as {'stem.*': 0.1}."""
    layer_decay: float = key(1.0, ALWAYS, ONCE_SET, INCOMPATIBLE, limits="(0, 1]")
    """Layer by layer below the head the learning rate is multiplied by this once more (Howard and Ruder 2018): after
    the last block by 1, in the last block by layer_decay, .. before the first block by layer_decay^(blocks + 1)."""
    weight_decay: float = key(0.0, ALWAYS, COUNTS, limits="≥ 0")
    """Decay of weights with two or more dimensions; biases and norms have none."""
    in_backward: bool = key(False, ALWAYS, ONCE_SET)
    """Each weight is updated as soon as its gradient is known, which is then freed: no memory for all gradients. Needs
    parallel=none or fsdp, no clipping, no accumulation, no fp16, train.max_skipped_steps=null. The same bits."""
    offload: bool = key(False, ALWAYS, ONCE_SET)
    """Moments live in host memory, each rank's own where ranks share them out, and are brought to the device in pieces
    for each step. The same bits; costs the time of moving them there and back."""

    @property
    def num_moments(self) -> int:
        """Numbers of the state for each weight, at least; of an own optimizer nobody knows."""
        return 0


@dataclass(kw_only=True, slots=True)
class SgdConfig(OptimConfig):
    name: str = "sgd"
    lr: float = 0.1
    momentum: float = key(0.9, RULED, COUNTS, limits="[0, 1)")
    """Share of the last update that goes on."""
    nesterov: bool = key(True, RULED, COUNTS)
    """Nesterov's momentum; needs momentum > 0."""

    updates_each_weight_alone: ClassVar[bool] = True

    @property
    def num_moments(self) -> int:
        return int(self.momentum > 0)


@dataclass(kw_only=True, slots=True)
class AdamwConfig(OptimConfig):
    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: list[float] = key([0.9, 0.999], RULED, COUNTS, limits="[0, 1)")
    """Two decay rates."""
    eps: float = key(1e-8, ALWAYS, COUNTS, limits="> 0")
    """Added to the denominator."""

    updates_each_weight_alone: ClassVar[bool] = True

    @property
    def num_moments(self) -> int:
        return 2


@dataclass(kw_only=True, slots=True)
class LionConfig(OptimConfig):
    """Lion (Chen et al. 2023): wants an lr 3 to 10 times smaller than AdamW's, and a weight_decay as much larger."""

    name: str = "lion"
    lr: float = 1e-4
    weight_decay: float = 0.1
    betas: list[float] = key([0.9, 0.99], RULED, COUNTS, limits="[0, 1)")
    """The momentum's share in an update, and in the momentum that goes on."""

    updates_each_weight_alone: ClassVar[bool] = True

    @property
    def num_moments(self) -> int:
        return 1


@dataclass(kw_only=True, slots=True)
class MuonConfig(OptimConfig):
    """Muon for hidden matrices, AdamW for all other weights; torch 2.9 or newer."""

    name: str = "muon"
    lr: float = 1e-3
    """Peak learning rate of the hidden matrices, > 0."""
    weight_decay: float = 0.1
    momentum: float = key(0.95, RULED, COUNTS, limits="[0, 1)")
    """Of Muon."""
    nesterov: bool = key(True, RULED, COUNTS)
    """Nesterov's momentum, of Muon."""
    ns_steps: int = key(5, ALWAYS, COUNTS, limits="1 to 99")
    """Newton-Schulz iterations that make an update orthogonal."""
    adjust_lr: MuonScale = key(MuonScale.match_rms_adamw, ALWAYS, COUNTS)
    """match_rms_adamw: lr x 0.2 x sqrt(max(m, n)), so that the lr and weight_decay of an AdamW fit (arXiv 2502.16982);
    original: lr x sqrt(max(1, m / n)), which wants an lr of about 0.02."""
    adamw_lr: float | None = key(None, ALWAYS, COUNTS, limits="> 0")
    """Peak learning rate of the other weights; it follows the same schedule. null: lr."""
    adamw_weights: list[str] = key([], ALWAYS, COUNTS)
    """Names of weights, with * and ?, that AdamW takes besides embeddings, the output layer (the last linear layer
    outside of blocks) and all that have not two dimensions."""
    betas: list[float] = key([0.9, 0.95], RULED, COUNTS, limits="[0, 1)")
    """Of AdamW: two decay rates."""
    eps: float = key(1e-8, ALWAYS, COUNTS, limits="> 0")
    """Of AdamW: added to the denominator."""

    @property
    def num_moments(self) -> int:
        return 1


@dataclass(kw_only=True, slots=True)
class CustomOptimConfig(OptimConfig):
    """Any optimizer whose state_dict tells all: `Target(groups, lr=lr, **kwargs)`, groups with `weight_decay`."""

    name: str = "custom"
    _target_: str = key("???", ALWAYS, COUNTS, INCOMPATIBLE)
    kwargs: dict[str, Any] = key({}, ALWAYS, COUNTS)
    """Keyword arguments of the class named by `_target_`, besides the groups and lr."""
