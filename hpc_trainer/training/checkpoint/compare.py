"""Comparison of a saved state with the present one: keys, shapes and number formats must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpc_trainer.errors import CheckpointError
from hpc_trainer.training.checkpoint.shards import Shard
from hpc_trainer.training.checkpoint.tensor_files import SavedTensor

RESUME = "The configuration or the code has changed; resume with that which saved, or start anew with --fresh."


def check_keys(where: str, saved: Mapping[Any, Any], here: set[Any]) -> None:
    """Check that the keys of both are the same.

    Raises:
        CheckpointError: the keys differ; the message names the first ones.
    """
    unread, unfilled = (sorted(map(str, keys)) for keys in (set(saved) - here, here - set(saved)))
    if unread or unfilled:
        raise CheckpointError(
            f"{where}: saved but not here: {unread[:5]}; here but not saved: {unfilled[:5]} "
            f"({len(unread)} and {len(unfilled)} in all). {RESUME}"
        )


def check_forms(where: str, saved: Mapping[Any, Any], here: Mapping[Any, Any]) -> None:
    """Check that both have the same keys, and values of the same form (`check_form`).

    Raises:
        CheckpointError: they differ.
    """
    check_keys(where, saved, set(here))
    for key, value in here.items():
        check_form(where, key, saved[key], value)


def check_form(where: str, key: Any, saved: Any, here: Any) -> None:
    """Check that both are tensors of the same shape and number format, or values of the same type.

    Raises:
        CheckpointError: they differ.
    """
    if form(saved) != form(here):
        raise CheckpointError(
            f"{where}: {key} is saved as {form(saved)} and is {form(here)} here; they must be alike. {RESUME}"
        )


def form(value: Any) -> str:
    """Return format and shape of a tensor, `float32 [3, 4]` (a sharded one's whole shape), or the type's name."""
    if isinstance(value, (torch.Tensor, SavedTensor, Shard)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def outline(tree: Any, path: str = "") -> dict[str, str]:
    """Return path -> form of each leaf; all numbers and texts have the form `value`."""
    if isinstance(tree, (torch.Tensor, SavedTensor)):
        return {path: form(tree)}
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    else:
        return {path: "value"}
    return {key: form for name, item in items for key, form in outline(item, f"{path}.{name}".strip(".")).items()}
