"""Optimizer state by names of weights, so that it can be loaded however ranks share the weights or the state.

    ranks share by           weights         moments are saved                    and loaded
    DDP, or one rank         whole           whole, by rank 0                     whole
    ZeRO-1                   whole           whole, each by the rank that has it  by that rank
    FSDP2, tensor parallel   as DTensors     in pieces, as the weight             in the pieces of the weight here
    pipeline stages          some of them    each by a rank of its stage          by the ranks of its stage

A weight's name consists of the names of module and parameter, `model.0.weight`; it is `<group>.<index>` if no module
that is saved with the optimizer holds the weight.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from hpc_trainer.errors import CheckpointError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.checkpoint.compare import RESUME, check_forms, check_keys
from hpc_trainer.training.checkpoint.model_parts import WholeModel, find_whole
from hpc_trainer.training.checkpoint.shards import Box, Shard
from hpc_trainer.training.checkpoint.tensor_files import SavedTensor, fill, whole_tree
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES, DTYPES, pack, unpack


class Names(dict[int, str]):
    """Names of weights by their id.

    `of_all` and `owned` are empty unless ranks hold parts of a model (`model_parts`). `of_all`: names of the trained
    weights of all parts, in the model's order. `owned`: those that this rank's part writes.
    """

    whole: WholeModel | None = None
    of_all: tuple[str, ...] = ()
    owned: frozenset[str] = frozenset()


_IN_HOST: WeakSet[torch.optim.Optimizer] = WeakSet()


def keep_in_host(optimizer: torch.optim.Optimizer) -> None:
    """Load this optimizer's moments into host memory from now on, so that they are never all on the weights' device."""
    _IN_HOST.add(optimizer)


def weight_names(objects: Mapping[str, Any]) -> Names:
    """Return the names of the weights of all modules in `objects`; tied weights have their first name."""
    names = Names()
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            # After a forward pass without a backward pass FSDP still shows whole weights; `state_dict` makes it put the
            # optimizer's weights back.
            value.state_dict()
            for key, weight in value.named_parameters():
                names.setdefault(id(weight), f"{name}.{key}")
            part = find_whole(value)
            if part is not None:
                prefix, names.whole = part
                whole = names.whole
                names.of_all += tuple(f"{name}.{prefix}{each}" for each in whole.trained)
                names.owned |= {f"{name}.{prefix}{each}" for each in whole.owned}
    return names


def optimizer_tree(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """Return the optimizer's state_dict with names of weights instead of their indices.

    Collective with ZeRO, or if ranks hold parts of a model: ranks send each other what they hold.
    """
    groups_here = _named_groups(optimizer, names)
    named = [name for group in groups_here for name in group]
    if _is_zero(optimizer):
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        tree: dict[str, Any] = {"state": _zero_state(optimizer, names, named), "param_groups": groups}
    else:
        tree = optimizer.state_dict()
        tree = {**tree, "state": {named[key]: value for key, value in tree["state"].items()}}
    if names.whole is not None and set(named) <= set(names.of_all):
        tree["state"], groups_here = names.whole.optimizer_state(tree["state"], groups_here, names.of_all, names.owned)
    pairs = zip(tree["param_groups"], groups_here, strict=True)
    return {**tree, "param_groups": [{**group, "params": params} for group, params in pairs]}


def load_optimizer(name: str, optimizer: Any, saved: Mapping[str, Any], names: Names) -> None:
    """Load the state of `optimizer_tree` into any kind of optimizer in the table above. Not collective.

    This is stricter than torch: a fresh state_dict is empty, unknown keys pass, and floats are cast. So the state of
    the optimizer afterwards is compared with the saved state.

    Raises:
        CheckpointError: they differ; the message names the first difference.
    """
    here = _named_groups(optimizer, names)
    if names.whole is not None and {each for group in here for each in group} <= set(names.of_all):
        saved = _of_part(name, saved, here, names.of_all)
    _check_groups(name, optimizer, here, saved["param_groups"])
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    by_name = dict(zip([each for group in here for each in group], weights, strict=True))
    _check_shapes(name, by_name, saved["state"])

    local = optimizer.optim if _is_zero(optimizer) else optimizer
    local_groups = _named_groups(local, {id(weight): each for each, weight in by_name.items()})
    number = {each: index for index, each in enumerate(each for group in local_groups for each in group)}
    wanted = {each: values for each, values in saved["state"].items() if each in number}
    groups = [
        {**group, "params": [number[each] for each in mine]}
        for group, mine in zip(saved["param_groups"], local_groups, strict=True)
    ]
    in_host = torch.device("cpu") if local in _IN_HOST else None
    state = {number[each]: _place(values, by_name[each], in_host) for each, values in wanted.items()}
    kept: dict[int, dict[str, Any]] = {}
    # torch would copy all state to the weights' device at once, and round moments to the format of their weight.
    if in_host is not None or any(_is_wider(values, by_name[each]) for each, values in wanted.items()):
        kept = {index: _only(values, has_moments=True) for index, values in state.items()}
        state = {index: _only(values, has_moments=False) for index, values in state.items()}
    local.load_state_dict({**saved, "state": state, "param_groups": groups})
    for each in wanted if kept else ():
        local.state[by_name[each]].update(kept[number[each]])

    if local is not optimizer:  # ZeRO passes its groups to the local optimizer at each step
        for group, own in zip(optimizer.param_groups, local.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
    loaded = local.state_dict()["state"]
    check_keys(f"{name} state", {number[each]: each for each in wanted}, set(loaded))
    for each, values in wanted.items():
        check_forms(f"{name} state of weight {each}", values, loaded[number[each]])


def _is_zero(optimizer: torch.optim.Optimizer) -> Any:
    """Return True for a ZeroRedundancyOptimizer, without importing its module: who has one has imported it."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _named_groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    return [
        [names.get(id(weight), f"{number}.{index}") for index, weight in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]


def _zero_state(optimizer: Any, names: Names, named: list[str]) -> dict[str, Any]:
    """Return the state of all weights: this rank's own, and the forms of other ranks' state. Collective.

    torch's own consolidate_state_dict pickles, and gathers everything in the memory of one rank.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    name_of = dict(zip(map(id, weights), named, strict=True))
    here = [name_of[id(weight)] for group in optimizer.optim.param_groups for weight in group["params"]]
    # Not from the attribute `state`: it may still be on its way to host memory (optim.offload).
    mine = {here[number]: values for number, values in optimizer.optim.state_dict()["state"].items()}
    tensors, structure = pack(mine)
    forms = {each: [DTYPE_NAMES[tensor.dtype], list(tensor.shape)] for each, tensor in tensors.items()}
    group = RankGroup(
        rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size(), device=weights[0].device
    )
    state: dict[str, Any] = {}
    for rank, report in enumerate(group.gather({"structure": structure, "forms": forms})):
        parts = {
            each: Shard(tuple(shape), DTYPES[dtype], Box.whole(shape), tensors[each] if rank == group.rank else None)
            for each, (dtype, shape) in report["forms"].items()
        }
        state |= unpack(parts, report["structure"])
    return {each: state[each] for each in named if each in state}


def _of_part(
    name: str, saved: Mapping[str, Any], here: Sequence[Sequence[str]], names: Sequence[str]
) -> dict[str, Any]:
    """Return the part of a saved optimizer that belongs to the weights in `here`, by group.

    Args:
        name: name of the optimizer, for the message.
        saved: tree of `optimizer_tree`.
        here: names of the weights of each group on this rank.
        names: names of the weights of all parts.

    Raises:
        CheckpointError: a weight was saved that no part has.
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


def _is_wider(values: Mapping[str, Any], weight: torch.Tensor) -> bool:
    """Return True if a moment is fp32 and its weight has 16 bits."""
    tensors = (value for value in values.values() if isinstance(value, (torch.Tensor, SavedTensor)) and value.ndim)
    return weight.itemsize == 2 and any(tensor.dtype is torch.float32 for tensor in tensors)


def _only(values: Mapping[str, Any], *, has_moments: bool) -> dict[str, Any]:
    """Return the tensors with dimensions in a weight's state, the moments; or, if `has_moments` is False, the rest."""
    return {
        key: value
        for key, value in values.items()
        if (isinstance(value, torch.Tensor) and value.ndim > 0) is has_moments
    }


def _place(values: Any, weight: torch.Tensor, device: torch.device | None = None) -> Any:
    """Load a weight's state, sharded like the weight, to its device or to `device`; single numbers to the CPU."""
    if isinstance(values, Mapping):
        return {key: _place(value, weight, device) for key, value in values.items()}
    if not isinstance(values, (torch.Tensor, SavedTensor)) or not values.ndim:
        return whole_tree(values)
    if is_sharded(weight) or tuple(values.shape) == tuple(weight.shape):
        # In the weight's memory layout (channels_last): fused kernels read both side by side.
        new = torch.empty_like(weight.detach(), dtype=values.dtype, device=device)
    else:
        new = torch.empty(values.shape, dtype=values.dtype, device=device or weight.device)
    fill(new, values)
    return new


def _check_groups(
    name: str, optimizer: torch.optim.Optimizer, here: list[list[str]], saved: list[dict[str, Any]]
) -> None:
    if len(here) != len(saved):
        raise CheckpointError(f"{name}: {len(saved)} groups of weights are saved and {len(here)} are here. {RESUME}")
    for index, (group, there) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        check_keys(f"{name}, group {index}", there, set(group))
        if here[index] != there["params"]:
            check_keys(f"{name}, group {index}, weights", dict.fromkeys(there["params"]), set(here[index]))
            raise CheckpointError(f"{name}, group {index}: the weights are saved in another order. {RESUME}")


def _check_shapes(name: str, weights: Mapping[str, torch.Tensor], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the shapes of saved moments: torch accepts any shape and fails in the next step."""
    for each, values in saved.items():
        if each not in weights:
            raise CheckpointError(f"{name} state is saved for weight {each}, which is not here. {RESUME}")
        for key, value in values.items():
            is_tensor = isinstance(value, (torch.Tensor, SavedTensor))
            if is_tensor and value.ndim and tuple(value.shape) != tuple(weights[each].shape):
                raise CheckpointError(
                    f"{name} state of weight {each}: {key} is saved with shape {list(value.shape)} and the weight "
                    f"has {list(weights[each].shape)} here. {RESUME}"
                )
