"""The model of which ranks hold stages: its checkpoint has all names, as of one rank, and a rank some of them.

Each stage builds the whole model before it lets go of the rest, so every rank knows all names, and what they are. What
a rank does not hold stands in its tree as a `Shard` without memory: rank 0 describes all, each rank writes its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpc_trainer.errors import CheckpointError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.compare import RESUME
from hpc_trainer.training.checkpoint.shards import Box, Shard
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES, DTYPES, pack_sharded, unpack
from hpc_trainer.training.tensors import is_sharded, local_tensor

_ATTRIBUTE = "whole_model"
Form = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Whole:
    """The model of which a module is one stage.

    Args:
        forms: number format and shape by name, of all that the whole model's state_dict holds, in its order.
        trained: names of the weights that the optimizer has, in their order.
        buffers: names of the buffers among `forms`.
        owned: names that this stage writes; of weights in two stages the first one does.
        is_writer: this rank is the first of its stage: it writes what the stage's ranks hold alike.
    """

    forms: Mapping[str, Form]
    trained: tuple[str, ...]
    buffers: frozenset[str]
    owned: frozenset[str] = frozenset()
    is_writer: bool = True

    @classmethod
    def of(cls, model: nn.Module) -> Whole:
        """Describes a whole model; before its stage is cut out of it."""
        state = model.state_dict()
        return cls(
            forms={name: (each.dtype, tuple(each.shape)) for name, each in state.items()},
            trained=tuple(name for name, weight in model.named_parameters() if weight.requires_grad),
            buffers=frozenset(name for name, _ in model.named_buffers() if name in state),
        )


def set_whole(model: nn.Module, whole: Whole) -> None:
    """`model` is a stage of `whole` from now on; copies of it are, too."""
    setattr(model, _ATTRIBUTE, whole)


def find_whole(value: Any) -> tuple[str, Whole] | None:
    """(where in the names of `value`, the whole) of a stage, or of what has one in it; None of anything else."""
    if not isinstance(value, nn.Module):
        return None
    for name, module in value.named_modules():
        whole = vars(module).get(_ATTRIBUTE)
        if whole is not None:
            return (f"{name}." if name else ""), whole
    return None


def module_state(value: nn.Module) -> dict[str, Any]:
    """Its state_dict; of a stage that of the whole model, with a `Shard` for each tensor.

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
    merged: dict[str, Any] = {key: each for key, each in state.items() if not key.startswith(prefix)}
    for name, form in whole.forms.items():
        merged[prefix + name] = _shard(state.get(prefix + name), form, whole, name)
    return merged


def has_buffers(value: nn.Module) -> bool:
    """True if any stage of the module has buffers of its own; the same on all ranks. False of what is no stage."""
    found = find_whole(value)
    return found is not None and bool(found[1].buffers)


def merged_optimizer(
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Sequence[str]],
    names: Sequence[str],
    owned: Collection[str],
) -> tuple[dict[str, Any], list[list[str]]]:
    """(state of all weights, the weights of each group) from what each stage has of them. Collective.

    Args:
        state: by name of the weight, this rank's.
        groups: names of the weights of each group, this rank's.
        names: of all weights, in their order.
        owned: those that this rank's stage writes.
    """
    mine = {name: pack_sharded(values) for name, values in state.items()}
    told = {
        name: {
            "structure": structure,
            "whole": {leaf: [DTYPE_NAMES[each.dtype], list(each.shape)] for leaf, each in tensors.items()},
            "cut": {leaf: [DTYPE_NAMES[each.dtype], list(each.shape)] for leaf, each in shards.items()},
        }
        for name, (tensors, shards, structure) in mine.items()
    }
    group = _all_ranks()
    all_told = group.gather({"state": told, "groups": [list(each) for each in groups]})
    listed = [{name for each in all_told for name in each["groups"][index]} for index in range(len(groups))]
    ordered = [[name for name in names if name in each] for each in listed]
    merged: dict[str, Any] = {}
    for name in itertools.chain(*ordered):  # as one rank has them
        teller = next((rank for rank, each in enumerate(all_told) if name in each["state"]), None)
        if teller is None:  # no state yet
            continue
        entry = all_told[teller]["state"][name]
        tensors, shards, _ = mine.get(name, ({}, {}, None))
        whole = {
            leaf: _form_shard(form, tensors.get(leaf) if group.rank == teller else None)
            for leaf, form in entry["whole"].items()
        }
        cut = {
            leaf: shards[leaf] if leaf in shards and name in owned else _form_shard(form, None)
            for leaf, form in entry["cut"].items()
        }
        merged[name] = unpack(whole, entry["structure"], cut)
    return merged, ordered


def of_stage(
    name: str, saved: Mapping[str, Any], here: Sequence[Sequence[str]], names: Sequence[str]
) -> dict[str, Any]:
    """What a stage needs of a saved optimizer: of the weights that are `here`, by group, of all `names`.

    Raises CheckpointError: weights are saved that no stage has.
    """
    unknown = sorted({each for group in saved["param_groups"] for each in group["params"]}.difference(names))
    if unknown:
        raise CheckpointError(f"{name}: saved but not here: {unknown[:5]} ({len(unknown)} in all). {RESUME}")
    wanted = {each for group in here for each in group}
    return {
        **saved,
        "state": {each: values for each, values in saved["state"].items() if each in wanted},
        "param_groups": [
            {**group, "params": [each for each in group["params"] if each in wanted]} for group in saved["param_groups"]
        ],
    }


def _shard(here: torch.Tensor | None, form: Form, whole: Whole, name: str) -> Any:
    is_owner = here is not None and name in whole.owned
    if is_owner and is_sharded(here):
        return here
    dtype, shape = form
    return Shard(shape, dtype, Box.whole(shape), here if is_owner and whole.is_writer else None)


def _form_shard(form: Sequence[Any], local: torch.Tensor | None) -> Shard:
    dtype, shape = DTYPES[form[0]], tuple(form[1])
    return Shard(shape, dtype, Box.whole(shape), local)


def _all_ranks() -> RankGroup:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    backend = torch.distributed.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return RankGroup(rank=rank, world_size=world_size, device=device)
