"""Which weights decay: matrices and larger ones, but nothing that a norm holds, and no bias."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

_NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def decaying(model: nn.Module) -> dict[nn.Parameter, bool]:
    """Whether each weight of `model` that requires a gradient decays, in the model's order.

    It does with two dimensions or more, unless a norm holds it (`nn.LayerNorm([4, 16])` has a gain and a bias of two)
    or it is called `bias`. A tied weight decays if it does in all of its places.
    """
    exempt = {
        weight
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(module, _NORMS) or name == "bias"
    }
    return {weight: weight.ndim >= 2 and weight not in exempt for weight in model.parameters() if weight.requires_grad}


def decay_groups(
    weights: Mapping[nn.Parameter, bool], weight_decay: float, kinds: Collection[bool] | None = None
) -> list[dict[str, Any]]:
    """Groups for an optimizer: the `weights` that decay, and the others.

    `kinds`: the groups to make although they may be empty, by whether they decay. None: those that are not empty.
    """
    wanted = set(weights.values()) if kinds is None else kinds
    return [
        {
            "params": [weight for weight, decays in weights.items() if decays is kind],
            "weight_decay": weight_decay if kind else 0.0,
        }
        for kind in (True, False)
        if kind in wanted
    ]
