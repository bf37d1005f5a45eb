"""Choice of weights that decay: two or more dimensions, but not in a norm, and no bias."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

_NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def decaying(model: nn.Module) -> dict[nn.Parameter, bool]:
    """Return for each weight of `model` that requires a gradient whether it decays, in the model's order.

    A weight with two dimensions or more decays, unless a norm holds it (`nn.LayerNorm([4, 16])` has a gain and a bias
    of two dimensions) or its name is `bias`. A tied weight decays if it does in all of its places.
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
    """Return groups for an optimizer: the `weights` that decay, and the others.

    Args:
        weights: whether each weight decays.
        weight_decay: the decay of the first group; the other group has 0.
        kinds: groups to make even if they are empty, True: weights that decay. None: groups that are not empty.
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
