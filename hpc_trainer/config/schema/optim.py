"""`optim/` and `schedule/`: the optimizer, its learning rate for a batch, and the learning rate over steps."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_trainer.config.schema.key import (
    ALWAYS,
    COUNTS,
    INCOMPATIBLE,
    ONCE_SET,
    RULED,
    key,
    of_feature,
    only_with,
    with_feature_keys,
)


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


class ScheduleName(str, enum.Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    step = "step"
    one_cycle = "one_cycle"


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    name: ScheduleName = key(ScheduleName.constant, ALWAYS, COUNTS)
    """After the warm-up: constant stays at lr. linear and cosine (Loshchilov and Hutter 2016) fall, and reach lr ×
    min_lr_ratio when train.num_steps updates are done; wsd (warm-up, stable, decay; Hu et al. 2024) falls in its last
    `decay_steps` only. step: × `gamma` every `every_steps`. one_cycle (Smith and Topin 2018; torch's OneCycleLR): from
    lr / 25 up to lr by a half cosine, then down by another. At the last update it reaches lr × min_lr_ratio or lr /
    250,000, whichever is more; momentum goes the other way."""
    warmup_steps: int | None = key(None, ALWAYS, COUNTS, limits="≥ 0")
    """Steps of linear warm-up from lr / warmup_steps, less than train.num_steps; for one_cycle the steps of its rise.
    null: none, and for one_cycle 30 % of train.num_steps."""
    cycle_momentum: bool | None = key(None, only_with("schedule.name=one_cycle"), ONCE_SET)
    """one_cycle: the momentum of SGD and Muon, and the first of betas, go from 0.95 to 0.85 while the rate rises, and
    back; a momentum of 0 stays 0. null: true. false: they stay as optim sets them."""
    min_lr_ratio: float = key(
        0.0,
        only_with("schedule.name=linear", "schedule.name=cosine", "schedule.name=wsd", "schedule.name=one_cycle"),
        COUNTS,
        limits="[0, 1]",
    )
    """Learning rate at the end, as a share of the peak; not for constant and step."""
    decay_steps: int | None = key(None, only_with("schedule.name=wsd"), ONCE_SET, limits="≥ 1")
    """wsd: number of last steps in which the rate falls; null: a fifth of train.num_steps."""
    every_steps: int | None = key(None, only_with("schedule.name=step"), ONCE_SET, limits="≥ 1")
    """step: steps between two reductions; null: a third of train.num_steps."""
    gamma: float = key(0.1, only_with("schedule.name=step"), ONCE_SET, limits="(0, 1]")
    """step: factor of each reduction."""


def lr_factor(scaling: LrScaling, base_batch: int | None, global_batch_size: int) -> float:
    """Return the factor on `optim.lr` for this batch; 1 without scaling.

    linear: k = global_batch_size / base_batch (Goyal et al. 2017, arXiv:1706.02677, for SGD);
    sqrt: its root (Malladi et al. 2022, arXiv:2205.10287, for Adam and its kin).
    """
    if scaling is LrScaling.none or not base_batch:
        return 1.0
    ratio = global_batch_size / base_batch
    return ratio if scaling is LrScaling.linear else math.sqrt(ratio)


def peak_lr(optim: OptimConfig, global_batch_size: int) -> float:
    """Return the learning rate at the top of the schedule, for the batch of this run."""
    return optim.lr * lr_factor(optim.lr_scaling, optim.lr_base_batch, global_batch_size)


def scaling_line(plain: Mapping[str, Any]) -> str | None:
    """Describe in one line the scaled learning rate of a frozen configuration; None without scaling."""
    optim, batch = plain["optim"], int(plain["train"]["global_batch_size"])
    scaling = LrScaling(optim.get("lr_scaling", "none"))  # specs older than this key mean none
    if scaling is LrScaling.none:
        return None
    peak = optim["lr"] * lr_factor(scaling, optim["lr_base_batch"], batch)
    return (
        f"learning rate {peak:.4g}: optim.lr={optim['lr']:g} is for {optim['lr_base_batch']} samples, and "
        f"train.global_batch_size={batch} (optim.lr_scaling={scaling.value})."
    )
