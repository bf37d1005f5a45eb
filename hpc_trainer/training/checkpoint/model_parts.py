"""A module that is a part of a model, as one stage of a pipeline is: its checkpoint has all names, as of one rank.

How a model is cut is a feature's matter. What a rank does not hold stands in its tree as a `Shard` without memory:
rank 0 describes all, each rank writes its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from hpc_trainer.runtime.tensors import is_sharded, local_tensor

_ATTRIBUTE = "whole_model"


class WholeModel(Protocol):
    """The model of which a module is a part, and what of it this rank writes."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the weights that the optimizers of all parts have together, in their order."""

    @property
    def owned(self) -> frozenset[str]:
        """Names that this part writes; of weights in two parts the first one does."""

    @property
    def has_buffers(self) -> bool:
        """True if any part has buffers; the same on all ranks."""

    def state(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """The state_dict of the whole from that of the part, with a `Shard` for each tensor."""

    def optimizer_state(
        self,
        state: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Sequence[str]],
        names: Sequence[str],
        owned: Collection[str],
    ) -> tuple[dict[str, Any], list[list[str]]]:
        """(state of all weights, the weights of each group) from what each part has of them. Collective.

        Args:
            state: by name of the weight, this rank's.
            groups: names of the weights of each group, this rank's.
            names: of all weights, in their order.
            owned: those that this rank's part writes.
        """


def set_whole(model: nn.Module, whole: WholeModel) -> None:
    """`model` is a part of `whole` from now on; copies of it are, too."""
    setattr(model, _ATTRIBUTE, whole)


def find_whole(value: Any) -> tuple[str, WholeModel] | None:
    """(where in the names of `value`, the whole) of a part, or of what has one in it; None of anything else."""
    if not isinstance(value, nn.Module):
        return None
    for name, module in value.named_modules():
        whole = vars(module).get(_ATTRIBUTE)
        if whole is not None:
            return (f"{name}." if name else ""), whole
    return None


def module_state(value: nn.Module) -> dict[str, Any]:
    """Its state_dict; of a part that of the whole model.

    Buffers that tensor-parallel ranks hold alike are plain tensors in it: as DTensors they know these ranks alone, and
    each group of data-parallel copies would write them.
    """
    state = value.state_dict()
    for name, buffer in value.named_buffers():
        if name in state and is_sharded(buffer) and all(each.is_replicate() for each in buffer.placements):  # type: ignore[attr-defined]
            state[name] = local_tensor(buffer.detach())
    found = find_whole(value)
    if found is None:
        return state
    prefix, whole = found
    around: dict[str, Any] = {key: each for key, each in state.items() if not key.startswith(prefix)}
    held = {key.removeprefix(prefix): each for key, each in state.items() if key.startswith(prefix)}
    return around | {prefix + name: each for name, each in whole.state(held).items()}
