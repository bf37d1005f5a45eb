"""Conversion of the objects of `RunContext.save` to trees for `pack`, and back, with nothing left over.

    object                                      saved                       put back
    has state_dict and load_state_dict          its state_dict              load_state_dict
      nn.Module                                 .. and buffers by rank      .. strict: keys, shapes, number formats
      torch.optim.Optimizer                     ..                          .. strict where torch is not
    torch.Generator, numpy.random.Generator     its state, by rank          set
    torch.Tensor, numpy.ndarray                 its values                  filled in place
    anything else that `pack` takes             as it is                    returned

An object with `differs_by_rank = True`, or one passed to `differ_by_rank`, has its own state on each rank (weights of
ranks that step alone, errors of PowerSGD): all of it is saved by rank, and can only be loaded on as many ranks. For a
module, rank 0's state is also saved as shared.

State that is not saved by rank is the same on all ranks, so rank 0 writes it; of sharded tensors (DTensors) each rank
writes its part. Buffers differ between ranks: batch norm's statistics see one rank's samples. On another number of
ranks those of rank 0 are used, as in DDP, which sends them at each forward pass, and in evaluations
(`fully_sharded.buffers_shared`).

Loading reads only what this rank needs: a whole tensor, or this rank's part of it. It makes no difference how the
tensor was cut when it was saved: by one rank, by DDP, ZeRO-1 or FSDP, on any number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import nn

from hpc_trainer.errors import CheckpointError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded, local_tensor
from hpc_trainer.training.checkpoint.tensor_files import SavedTensor, fill, like, whole_tree
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES, DTYPES, Box, Shard, pack, unpack
from hpc_trainer.training.rng import arrays_to_tensors, tensors_to_arrays

# Comparison of a saved state with the present one: keys, shapes and number formats must be the same.

RESUME = (
    "The configuration or the code has changed; resume with those that saved the checkpoint, or start anew with "
    "--fresh."
)


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
            f"{where}: {key} is saved as {form(saved)} and is {form(here)} here; both must be the same. {RESUME}"
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


# Modules that are part of a model, as a pipeline stage is: their checkpoint has all names, as that of one rank.
#
# A feature decides how a model is cut. A tensor that a rank does not hold is in the rank's tree as a `Shard` without
# memory: rank 0 describes all tensors, and each rank writes its own.

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
        if name in state and is_sharded(buffer) and all(placement.is_replicate() for placement in buffer.placements):  # type: ignore[attr-defined]
            state[name] = local_tensor(buffer.detach())
    part = find_whole(value)
    if part is None:
        return state
    prefix, whole = part
    around: dict[str, Any] = {key: entry for key, entry in state.items() if not key.startswith(prefix)}
    held = {key.removeprefix(prefix): entry for key, entry in state.items() if key.startswith(prefix)}
    return around | {prefix + name: entry for name, entry in whole.state(held).items()}


# Optimizer state by names of weights, so that it can be loaded however ranks share the weights or the state.
#
#     ranks share by           weights         moments are saved                    and loaded
#     DDP, or one rank         whole           whole, by rank 0                     whole
#     ZeRO-1                   whole           whole, each by the rank that has it  by that rank
#     FSDP2, tensor parallel   as DTensors     in pieces, as the weight             in the pieces of the weight here
#     pipeline stages          some of them    each by a rank of its stage          by the ranks of its stage
#
# A weight's name consists of the names of module and parameter, `model.0.weight`; it is `<group>.<index>` if no module
# that is saved with the optimizer holds the weight.


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
                names.of_all += tuple(f"{name}.{prefix}{own_name}" for own_name in whole.trained)
                names.owned |= {f"{name}.{prefix}{own_name}" for own_name in whole.owned}
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
    if names.whole is not None and {key for group in here for key in group} <= set(names.of_all):
        saved = _of_part(name, saved, here, names.of_all)
    _check_groups(name, optimizer, here, saved["param_groups"])
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    by_name = dict(zip([key for group in here for key in group], weights, strict=True))
    _check_shapes(name, by_name, saved["state"])

    local = optimizer.optim if _is_zero(optimizer) else optimizer
    local_groups = _named_groups(local, {id(weight): key for key, weight in by_name.items()})
    number = {key: index for index, key in enumerate(key for group in local_groups for key in group)}
    wanted = {key: values for key, values in saved["state"].items() if key in number}
    groups = [
        {**group, "params": [number[key] for key in mine]}
        for group, mine in zip(saved["param_groups"], local_groups, strict=True)
    ]
    in_host = torch.device("cpu") if local in _IN_HOST else None
    state = {number[key]: _place(values, by_name[key], in_host) for key, values in wanted.items()}
    kept: dict[int, dict[str, Any]] = {}
    # torch would copy all state to the weights' device at once, and round moments to the format of their weight.
    if in_host is not None or any(_is_wider(values, by_name[key]) for key, values in wanted.items()):
        kept = {index: _only(values, has_moments=True) for index, values in state.items()}
        state = {index: _only(values, has_moments=False) for index, values in state.items()}
    local.load_state_dict({**saved, "state": state, "param_groups": groups})
    for key in wanted if kept else ():
        local.state[by_name[key]].update(kept[number[key]])

    if local is not optimizer:  # ZeRO passes its groups to the local optimizer at each step
        for group, own in zip(optimizer.param_groups, local.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
    loaded = local.state_dict()["state"]
    check_keys(f"{name} state", {number[key]: key for key in wanted}, set(loaded))
    for key, values in wanted.items():
        check_forms(f"{name} state of weight {key}", values, loaded[number[key]])


def _is_zero(optimizer: torch.optim.Optimizer) -> Any:
    """Return True for a ZeroRedundancyOptimizer, without importing its module: if there is one, it is imported."""
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
    forms = {key: [DTYPE_NAMES[tensor.dtype], list(tensor.shape)] for key, tensor in tensors.items()}
    group = RankGroup(
        rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size(), device=weights[0].device
    )
    state: dict[str, Any] = {}
    for rank, report in enumerate(group.gather({"structure": structure, "forms": forms})):
        parts = {
            key: Shard(tuple(shape), DTYPES[dtype], Box.whole(shape), tensors[key] if rank == group.rank else None)
            for key, (dtype, shape) in report["forms"].items()
        }
        state |= unpack(parts, report["structure"])
    return {key: state[key] for key in named if key in state}


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
    unknown = sorted({key for group in saved["param_groups"] for key in group["params"]}.difference(names))
    if unknown:
        raise CheckpointError(f"{name}: saved but not here: {unknown[:5]} ({len(unknown)} in all). {RESUME}")
    wanted = {key for group in here for key in group}
    return {
        **saved,
        "state": {key: values for key, values in saved["state"].items() if key in wanted},
        "param_groups": [
            {**group, "params": [key for key in group["params"] if key in wanted]} for group in saved["param_groups"]
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
    for weight_name, values in saved.items():
        if weight_name not in weights:
            raise CheckpointError(f"{name} state is saved for weight {weight_name}, which is not here. {RESUME}")
        for key, value in values.items():
            is_tensor = isinstance(value, (torch.Tensor, SavedTensor))
            if is_tensor and value.ndim and tuple(value.shape) != tuple(weights[weight_name].shape):
                raise CheckpointError(
                    f"{name} state of weight {weight_name}: {key} is saved with shape {list(value.shape)} and the "
                    f"weight has {list(weights[weight_name].shape)} here. {RESUME}"
                )


def to_trees(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trees (state that ranks share, state of this rank alone) of the objects, by name.

    Collective if one of them is a ZeroRedundancyOptimizer or the optimizer of a pipeline stage. The tensors are those
    in use, not copies: write them before the next step.
    """
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    names = weight_names(objects)
    for name, value in objects.items():
        if _is_generator(value):
            own[name] = _generator_state(value)
        elif isinstance(value, torch.optim.Optimizer):
            (own if _differs(value) else shared)[name] = optimizer_tree(value, names)
        elif _is_own(value):
            own[name] = value.state_dict()
        elif _is_stateful(value):
            shared[name] = module_state(value) if isinstance(value, nn.Module) else value.state_dict()
            if _has_buffers(value):
                own[name] = _buffers(value)
        else:
            shared[name] = _array_to_tensor(name, value)
    return shared, own


def from_trees(
    objects: Mapping[str, Any],
    shared: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    *,
    is_same_world: bool = True,
) -> dict[str, Any]:
    """Undo `to_trees`: fill objects in place where possible, and return all of them by name. Not collective.

    Do not use the trees afterwards: an optimizer may take over their tensors, which are in memory or still on the disk.

    Args:
        own: the tree of this rank alone; None if fewer ranks saved: generators then stay as they are.
        is_same_world: True if as many ranks saved as there are now; else buffers are rank 0's.

    Raises:
        CheckpointError: a difference; the message names the first one. Objects may then be half loaded: rebuild them.
        OSError: a file cannot be read.
    """
    by_rank = sorted(name for name, value in objects.items() if _differs(value))
    if by_rank and not is_same_world:
        raise CheckpointError(
            f"checkpoint: {', '.join(by_rank)} differ from rank to rank, and another number of ranks saved them. "
            "Resume on as many ranks, or start anew with --fresh."
        )
    check_keys("checkpoint", shared, {name for name, value in objects.items() if not _is_own(value)})
    if own is not None:
        has_own = {name for name, value in objects.items() if _is_own(value) or _has_buffers(value)}
        check_keys("checkpoint, this rank's part", own, has_own)
    names, own = weight_names(objects), own or {}
    loaded = {}
    for name, value in objects.items():
        if _is_generator(value):
            if name in own:
                _set_generator(value, whole_tree(own[name]))
            loaded[name] = value
        elif _is_own(value):
            loaded[name] = _load_one(name, value, own[name], None, names)
        else:
            buffers = own.get(name, {}) if is_same_world else None
            loaded[name] = _load_one(name, value, shared[name], buffers, names)
    return loaded


def load_objects(
    objects: Mapping[str, Any], shared: Any, own: Any, *, is_same_world: bool
) -> tuple[int, dict[str, Any], Any]:
    """Load a checkpoint of `RunContext.save`; return (step, objects by name, this rank's random state). Not collective.

    Args and errors are those of `from_trees`. The random state is None if `is_same_world` is False.
    """
    check_keys("checkpoint", shared, {"step", "objects"})
    if own is not None:
        check_keys("checkpoint, this rank's part", own, {"rng", "objects"})
    mine = own or {"rng": None, "objects": None}
    values = from_trees(objects, shared["objects"], mine["objects"], is_same_world=is_same_world)
    return shared["step"], values, whole_tree(mine["rng"]) if is_same_world else None


def _load_one(name: str, here: Any, saved: Any, buffers: Mapping[str, Any] | None, names: Names) -> Any:
    if isinstance(here, nn.Module):
        _load_module(name, here, saved, buffers)
    elif isinstance(here, torch.optim.Optimizer):
        load_optimizer(name, here, saved, names)
    elif _is_stateful(here):
        _load_stateful(name, here, saved)
    elif isinstance(here, torch.Tensor):
        check_form("checkpoint", name, saved, here)
        fill(here, saved)
    elif isinstance(here, np.ndarray):
        check_form("checkpoint", name, saved, _array_to_tensor(name, here))
        here[...] = whole_tree(saved).numpy()
    else:
        return whole_tree(saved)
    return here


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


_DIFFERING: WeakValueDictionary[int, Any] = WeakValueDictionary()


def differ_by_rank(*objects: Any) -> None:
    """Save and load these objects by rank from now on, like those with `differs_by_rank = True`."""
    _DIFFERING.update({id(value): value for value in objects})


def _differs(value: Any) -> bool:
    return id(value) in _DIFFERING or getattr(value, "differs_by_rank", False) is True


def _is_own(value: Any) -> bool:
    """Return True if `value` is saved only by rank."""
    return _is_generator(value) or (_differs(value) and _is_stateful(value) and not isinstance(value, nn.Module))


def _is_generator(value: Any) -> bool:
    return isinstance(value, (torch.Generator, np.random.Generator))


def _generator_state(generator: torch.Generator | np.random.Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return arrays_to_tensors(generator.bit_generator.state)


def _set_generator(generator: torch.Generator | np.random.Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = tensors_to_arrays(state)


def _array_to_tensor(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    try:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name} is an array of {value.dtype}; a checkpoint holds numbers and booleans. Convert it."
        ) from error


def _load_module(name: str, model: nn.Module, saved: Mapping[str, Any], buffers: Mapping[str, Any] | None) -> None:
    """Load a module tensor by tensor into its existing memory: there are never two models in memory."""
    here = model.state_dict()
    check_forms(name, saved, module_state(model))
    if buffers is not None:
        check_forms(f"{name}, buffers", buffers, _buffers(model))
    for key, value in here.items():
        if isinstance(value, torch.Tensor):
            fill(value, (buffers or {}).get(key, saved[key]))
        else:
            here[key] = whole_tree(saved[key])
    model.load_state_dict(here)  # the model's own tensors, so that its load hooks run


def _buffers(value: Any) -> dict[str, torch.Tensor]:
    """Return the buffers in a model's state, and its weights too if they differ by rank; {} for other objects.

    Non-persistent buffers are left out: the model creates them again.
    """
    if not isinstance(value, nn.Module):
        return {}
    saved = value.state_dict()
    if _differs(value):
        return {name: tensor for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}
    names = (name for name, buffer in value.named_buffers() if name in saved and not is_sharded(buffer))
    return {name: saved[name] for name in names}


def _has_buffers(value: Any) -> bool:
    """Return True if `value` is a model with buffers; the same on all ranks, even if this rank's part has none."""
    whole = find_whole(value)
    return isinstance(value, nn.Module) and ((whole is not None and whole[1].has_buffers) or bool(_buffers(value)))


def _load_stateful(name: str, value: Any, saved: Any) -> None:
    """Load the state, and check that the object's state afterwards has the keys and forms of the saved state."""
    wanted, here = outline(saved), value.state_dict()
    if wanted == outline(here) == {}:  # a disabled GradScaler: nothing to load
        return
    try:
        value.load_state_dict(like(saved, here))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        kind = type(value).__name__
        raise CheckpointError(f"{name}: {kind}.load_state_dict refuses what was saved: {error}. {RESUME}") from error
    loaded = outline(value.state_dict())
    check_keys(name, wanted, set(loaded))
    for key, form in wanted.items():
        if form != loaded[key]:
            raise CheckpointError(
                f"{name}: {key} is saved as {form} and is {loaded[key]} here; both must be the same. {RESUME}"
            )
