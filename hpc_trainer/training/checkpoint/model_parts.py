"""Modules that are part of a model, as a pipeline stage is: their checkpoint has all names, as that of one rank.

A feature decides how a model is cut. A tensor that a rank does not hold is in the rank's tree as a `Shard` without
memory: rank 0 describes all tensors, and each rank writes its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from hpc_trainer.runtime.tensors import is_sharded, local_tensor

_ATTRIBUTE = "whole_model"


class WholeModel(Protocol):
    """Model of which a module is a part, and the names in it that this rank writes."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the weights that the optimizers of all parts have together, in the model's order."""

    @property
    def owned(self) -> frozenset[str]:
        """Names that this part writes; a weight that is in two parts is written by the first one."""

    @property
    def has_buffers(self) -> bool:
        """True if any part has buffers; the same on all ranks."""

    def state(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state_dict of the whole model from that of the part, with a `Shard` for each tensor."""

    def optimizer_state(
        self,
        state: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Sequence[str]],
        names: Sequence[str],
        owned: Collection[str],
    ) -> tuple[dict[str, Any], list[list[str]]]:
        """Return (state of all weights, names of the weights of each group), merged from all parts. Collective.

        Args:
            state: this rank's state, by name of the weight.
            groups: names of the weights of each group of this rank.
            names: names of all weights, in the model's order.
            owned: names of the weights that this rank's part writes.
        """


def set_whole(model: nn.Module, whole: WholeModel) -> None:
    """Mark `model`, and later copies of it, as a part of `whole`."""
    setattr(model, _ATTRIBUTE, whole)


def find_whole(value: Any) -> tuple[str, WholeModel] | None:
    """Return (prefix of the part's names in `value`, whole model) if `value` is or contains a part; else None."""
    if not isinstance(value, nn.Module):
        return None
    for name, module in value.named_modules():
        whole = vars(module).get(_ATTRIBUTE)
        if whole is not None:
            return (f"{name}." if name else ""), whole
    return None


def module_state(value: nn.Module) -> dict[str, Any]:
    """Return the state_dict of `value`, or of the whole model if `value` is a part.

    Buffers that are equal on tensor-parallel ranks are plain tensors in the result: a DTensor knows only these ranks,
    so each group of data-parallel copies would write it.
    """
    state = value.state_dict()
    for name, buffer in value.named_buffers():
        if name in state and is_sharded(buffer) and all(each.is_replicate() for each in buffer.placements):  # type: ignore[attr-defined]
            state[name] = local_tensor(buffer.detach())
    part = find_whole(value)
    if part is None:
        return state
    prefix, whole = part
    around: dict[str, Any] = {key: each for key, each in state.items() if not key.startswith(prefix)}
    held = {key.removeprefix(prefix): each for key, each in state.items() if key.startswith(prefix)}
    return around | {prefix + name: each for name, each in whole.state(held).items()}
