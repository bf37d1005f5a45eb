"""What was saved against what is here: the same keys, shapes and number formats, or an error by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpc_trainer.errors import CheckpointError
from hpc_trainer.training.checkpoint.shards import Shard
from hpc_trainer.training.checkpoint.tensor_files import SavedTensor

RESUME = "The configuration or the code has changed; resume with that which saved, or start anew with --fresh."


def check_keys(where: str, saved: Mapping[Any, Any], here: set[Any]) -> None:
    """Raises CheckpointError unless the keys are the same."""
    unread, unfilled = (sorted(map(str, keys)) for keys in (set(saved) - here, here - set(saved)))
    if unread or unfilled:
        raise CheckpointError(
            f"{where}: saved but not here: {unread[:5]}; here but not saved: {unfilled[:5]} "
            f"({len(unread)} and {len(unfilled)} in all). {RESUME}"
        )


def check_forms(where: str, saved: Mapping[Any, Any], here: Mapping[Any, Any]) -> None:
    """Same keys, and tensors of the same shape and number format; else CheckpointError."""
    check_keys(where, saved, set(here))
    for key, value in here.items():
        check_form(where, key, saved[key], value)


def check_form(where: str, key: Any, saved: Any, here: Any) -> None:
    """Tensors of the same shape and number format, values of the same type; else CheckpointError."""
    if form(saved) != form(here):
        raise CheckpointError(
            f"{where}: {key} is saved as {form(saved)} and is {form(here)} here; they must be alike. {RESUME}"
        )


def form(value: Any) -> str:
    """`float32 [3, 4]` of any tensor, sharded ones as a whole; the name of the type of anything else."""
    if isinstance(value, (torch.Tensor, SavedTensor, Shard)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def outline(tree: Any, path: str = "") -> dict[str, str]:
    """Path -> form of each leaf; numbers and texts are all alike."""
    if isinstance(tree, (torch.Tensor, SavedTensor)):
        return {path: form(tree)}
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    else:
        return {path: "value"}
    return {key: form for name, item in items for key, form in outline(item, f"{path}.{name}".strip(".")).items()}
