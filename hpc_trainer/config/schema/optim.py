"""`optim/`: the optimizer."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_trainer.config.schema.feature_keys import of_feature, with_feature_keys
from hpc_trainer.config.schema.key import ALWAYS, COUNTS, INCOMPATIBLE, ONCE_SET, RULED, key, only_with


class LrScaling(str, enum.Enum):
    """Growth of the learning rate with the batch."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


class MuonScale(str, enum.Enum):
    """Size of a Muon step of a matrix of m x n, as a share of the learning rate."""

    match_rms_adamw = "match_rms_adamw"
    original = "original"


@dataclass(kw_only=True, slots=True)
@with_feature_keys
class OptimConfig:
    """Base class of every optimizer; not a choice itself."""

    # Facts that `plan` needs about each kind; a custom optimizer may do anything.
    updates_each_weight_alone: ClassVar[bool] = False
    """True if a weight's update needs only its own gradient and state, and the group's constant numbers: weights may
    then be updated in pieces."""

    name: str = key("???", ALWAYS, COUNTS, INCOMPATIBLE)
    lr: float = key(1e-3, ALWAYS, COUNTS, limits="> 0")
    """Peak learning rate."""
    lr_scaling: LrScaling = key(LrScaling.none, ALWAYS, ONCE_SET)
    """linear and sqrt: lr is meant for a batch of lr_base_batch samples. It is multiplied by k = global_batch_size /
    lr_base_batch (linear: Goyal et al. 2017, for SGD) or by the root of k (sqrt: Malladi et al. 2022, for Adam and
    AdamW)."""
    lr_base_batch: int | None = key(
        None, only_with("optim.lr_scaling=linear", "optim.lr_scaling=sqrt"), ONCE_SET, limits="≥ 1"
    )
    """Samples of the batch that lr is meant for; only with lr_scaling."""
    lr_of: dict[str, float] = of_feature("lr_of")
    layer_decay: float = of_feature("lr_of")
    weight_decay: float = key(0.0, ALWAYS, COUNTS, limits="≥ 0")
    """Decay of weights with two or more dimensions; biases and norms have none."""
    in_backward: bool = of_feature("in_backward")
    offload: bool = of_feature("offload")

    @property
    def num_moments(self) -> int:
        """Least number of state values for each weight; 0 for a custom optimizer, whose state is unknown."""
        return 0


@dataclass(kw_only=True, slots=True)
class SgdConfig(OptimConfig):
    name: str = "sgd"
    lr: float = 0.1
    momentum: float = key(0.9, RULED, COUNTS, limits="[0, 1)")
    """Share of the last update that is kept."""
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
    """Decay rates of the two moments."""
    eps: float = key(1e-8, ALWAYS, COUNTS, limits="> 0")
    """Number added to the denominator."""

    updates_each_weight_alone: ClassVar[bool] = True

    @property
    def num_moments(self) -> int:
        return 2


@dataclass(kw_only=True, slots=True)
class LionConfig(OptimConfig):
    """Lion (Chen et al. 2023): needs an lr 3 to 10 times smaller than AdamW's, and a weight_decay as much larger."""

    name: str = "lion"
    lr: float = 1e-4
    weight_decay: float = 0.1
    betas: list[float] = key([0.9, 0.99], RULED, COUNTS, limits="[0, 1)")
    """Share of the momentum in an update, and in the next momentum."""

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
    """Momentum of Muon."""
    nesterov: bool = key(True, RULED, COUNTS)
    """Nesterov's momentum in Muon."""
    ns_steps: int = key(5, ALWAYS, COUNTS, limits="1 to 99")
    """Newton-Schulz iterations that make an update orthogonal."""
    adjust_lr: MuonScale = key(MuonScale.match_rms_adamw, ALWAYS, COUNTS)
    """match_rms_adamw: lr x 0.2 x sqrt(max(m, n)), so that lr and weight_decay of AdamW fit (arXiv 2502.16982);
    original: lr x sqrt(max(1, m / n)), which needs an lr of about 0.02."""
    adamw_lr: float | None = key(None, ALWAYS, COUNTS, limits="> 0")
    """Peak learning rate of the other weights; it follows the same schedule. null: lr."""
    adamw_weights: list[str] = key([], ALWAYS, COUNTS)
    """Names of weights, with * and ?, that AdamW updates besides embeddings, the output layer (the last linear layer
    outside blocks) and all weights that do not have two dimensions."""
    betas: list[float] = key([0.9, 0.95], RULED, COUNTS, limits="[0, 1)")
    """Decay rates of the two moments of AdamW."""
    eps: float = key(1e-8, ALWAYS, COUNTS, limits="> 0")
    """Number added to the denominator of AdamW."""

    @property
    def num_moments(self) -> int:
        return 1


@dataclass(kw_only=True, slots=True)
class CustomOptimConfig(OptimConfig):
    """Any optimizer whose state_dict holds all state: `Target(groups, lr=lr, **kwargs)`, groups with `weight_decay`."""

    name: str = "custom"
    _target_: str = key("???", ALWAYS, COUNTS, INCOMPATIBLE)
    kwargs: dict[str, Any] = key({}, ALWAYS, COUNTS)
    """Keyword arguments of the class named by `_target_`, besides the groups and lr."""
