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

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn

from hpc_trainer.errors import CheckpointError
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.checkpoint.compare import RESUME, check_form, check_forms, check_keys, outline
from hpc_trainer.training.checkpoint.model_parts import find_whole, module_state
from hpc_trainer.training.checkpoint.optimizers import Names, load_optimizer, optimizer_tree, weight_names
from hpc_trainer.training.checkpoint.tensor_files import fill, like, whole_tree
from hpc_trainer.training.rng import arrays_to_tensors, tensors_to_arrays


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
            f"{name} is an array of {value.dtype}; a checkpoint holds numbers and truth values. Convert it."
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

    Non-persistent buffers are left out: the model creates them anew.
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
    """Load strictly, whatever the class does: its state afterwards must have the keys and forms of the saved state."""
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
                f"{name}: {key} is saved as {form} and is {loaded[key]} here; they must be alike. {RESUME}"
            )
