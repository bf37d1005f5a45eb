"""What `RunContext.save` takes: its state as trees for `pack`, and the way back, with nothing left over.

    object                                      saved                       put back
    has state_dict and load_state_dict          its state_dict              load_state_dict
      nn.Module                                 .. and buffers by rank      .. strict: keys, shapes, number formats
      torch.optim.Optimizer                     ..                          .. strict where torch is not
    torch.Generator, numpy.random.Generator     its state, by rank          set
    torch.Tensor, numpy.ndarray                 its values                  filled in place
    anything else that `pack` takes             as it is                    returned

Not by rank: the same on all ranks, so rank 0's is written. Buffers differ between ranks: batch norm's statistics see
one rank's samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hpc_trainer.errors import CheckpointError
from hpc_trainer.training.rng import arrays_to_tensors, tensors_to_arrays

_RESUME = "The configuration or the code has changed; resume with that which saved, or start anew with --fresh."


def to_trees(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what is the same on all ranks, what is this rank's own), by name.

    The tensors are those in use, not copies: write them before the next step.
    """
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in objects.items():
        if _is_generator(value):
            own[name] = _generator_state(value)
        elif _is_stateful(value):
            shared[name] = value.state_dict()
            if _buffers(value):
                own[name] = _buffers(value)
        else:
            shared[name] = _array_to_tensor(name, value)
    return shared, own


def put_back(objects: Mapping[str, Any], shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `to_trees`: fills what can be filled in place, and returns everything by name. Not collective.

    The trees are used up: their tensors may become an optimizer's own.

    Raises:
        CheckpointError: the first difference, by name. Objects may then be half loaded: build them anew.
    """
    check_keys("checkpoint", shared, {name for name, value in objects.items() if not _is_generator(value)})
    has_own = {name for name, value in objects.items() if _is_generator(value) or _buffers(value)}
    check_keys("checkpoint, this rank's part", own, has_own)
    return {name: _put_one(name, value, shared.get(name), own.get(name)) for name, value in objects.items()}


def check_keys(where: str, saved: Mapping[Any, Any], here: set[Any]) -> None:
    """Raises CheckpointError unless the keys are the same."""
    unread, unfilled = (sorted(map(str, keys)) for keys in (set(saved) - here, here - set(saved)))
    if unread or unfilled:
        raise CheckpointError(
            f"{where}: saved but not here: {unread[:5]}; here but not saved: {unfilled[:5]} "
            f"({len(unread)} and {len(unfilled)} in all). {_RESUME}"
        )


def _put_one(name: str, here: Any, shared: Any, own: Any) -> Any:
    if _is_generator(here):
        _set_generator(here, own)
    elif isinstance(here, nn.Module):
        _load_module(name, here, shared, own or {})
    elif isinstance(here, torch.optim.Optimizer):
        _load_optimizer(name, here, shared)
    elif _is_stateful(here):
        _load_stateful(name, here, shared)
    elif isinstance(here, torch.Tensor):
        _check_form(name, shared, here)
        here.detach().copy_(shared)
    elif isinstance(here, np.ndarray):
        _check_form(name, shared, _array_to_tensor(name, here))
        here[...] = shared.numpy()
    else:
        return shared
    return here


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


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


def _load_module(name: str, model: nn.Module, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    _check_forms(name, saved, model.state_dict())
    buffers = _buffers(model)
    _check_forms(f"{name}, buffers", own, buffers)
    model.load_state_dict(saved)
    for key, buffer in buffers.items():
        buffer.copy_(own[key])


def _buffers(value: Any) -> dict[str, torch.Tensor]:
    """Buffers that a model's state holds; non-persistent ones are made anew by the model. {} of anything else."""
    if not isinstance(value, nn.Module):
        return {}
    saved = value.state_dict()
    return {name: saved[name] for name, _ in value.named_buffers() if name in saved}


def _load_stateful(name: str, value: Any, saved: Any) -> None:
    """Strict whatever the class is: what it says afterwards must have the keys and shapes of what was saved."""
    wanted = _outline(saved)
    if wanted == _outline(value.state_dict()) == {}:  # a disabled GradScaler: nothing to load
        return
    try:
        value.load_state_dict(saved)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        kind = type(value).__name__
        raise CheckpointError(f"{name}: {kind}.load_state_dict refuses what was saved: {error}. {_RESUME}") from error
    loaded = _outline(value.state_dict())
    check_keys(name, wanted, set(loaded))
    for key, form in wanted.items():
        if form != loaded[key]:
            raise _unlike(name, key, form, loaded[key])


def _outline(tree: Any, path: str = "") -> dict[str, str]:
    """Path -> form of each leaf; numbers and texts are all alike."""
    if isinstance(tree, torch.Tensor):
        return {path: _form(tree)}
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    else:
        return {path: "value"}
    return {key: form for name, item in items for key, form in _outline(item, f"{path}.{name}".strip(".")).items()}


def _load_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Strict where torch is not: a fresh state_dict is empty, unknown keys pass, and floats are cast.

    So what the optimizer says afterwards is compared with what was saved.
    """
    groups = optimizer.state_dict()["param_groups"]
    if len(groups) != len(saved["param_groups"]):
        raise CheckpointError(
            f"{name}: {len(saved['param_groups'])} groups of weights are saved and {len(groups)} are here. {_RESUME}"
        )
    for index, (here, there) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        check_keys(f"{name}, group {index}", there, set(here))
        if here["params"] != there["params"]:
            raise CheckpointError(
                f"{name}, group {index}: {len(there['params'])} weights are saved and {len(here['params'])} are here, "
                f"or in another order. {_RESUME}"
            )
    _check_shapes(name, optimizer, saved["state"])
    optimizer.load_state_dict(dict(saved))
    loaded = optimizer.state_dict()["state"]
    check_keys(f"{name} state", saved["state"], set(loaded))
    for index, values in saved["state"].items():
        _check_forms(f"{name} state of weight {index}", values, loaded[index])


def _check_shapes(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Strict where torch is not: it takes moments of any shape and fails in the next step."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for index, values in saved.items():
        if index not in range(len(weights)):
            raise CheckpointError(
                f"{name} state is saved for weight {index}, and there are {len(weights)} here. {_RESUME}"
            )
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != weights[index].shape:
                raise CheckpointError(
                    f"{name} state of weight {index}: {key} is saved with shape {list(value.shape)} and the weight "
                    f"has {list(weights[index].shape)} here. {_RESUME}"
                )


def _check_forms(where: str, saved: Mapping[Any, Any], here: Mapping[Any, Any]) -> None:
    """Same keys, and tensors of the same shape and number format."""
    check_keys(where, saved, set(here))
    for key, value in here.items():
        if _form(saved[key]) != _form(value):
            raise _unlike(where, key, _form(saved[key]), _form(value))


def _check_form(name: str, saved: Any, here: Any) -> None:
    if _form(saved) != _form(here):
        raise _unlike("checkpoint", name, _form(saved), _form(here))


def _unlike(where: str, key: str, saved: str, here: str) -> CheckpointError:
    return CheckpointError(f"{where}: {key} is saved as {saved} and is {here} here; they must be alike. {_RESUME}")


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
