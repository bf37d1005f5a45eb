"""Averaged weights (`train.ema_decay`): updated after each step, and used by evaluations in place of the model's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.checkpoint.objects import find_whole, set_whole
from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded
from hpc_trainer.training.state import TrainState


class AveragedWeights(nn.Module):
    """Exponential average of the weights and buffers of `model`; it takes as much memory again and cannot be called.

    The average starts as the weights of the first step. Batch norm's statistics are averaged too: those of the raw
    weights would not fit the average. Integers and booleans are copied from the model: counts, tables of positions.

    Its state has the keys of torch's AveragedModel: `module.NAME` for each NAME of the model's, and `n_averaged`.

    Args:
        model: as this rank holds it; weights may be DTensors.
        decay: in (0, 1), the share of the average that a step keeps.
        shared: wrapper by which ranks share `model`, with `model` in it; None: `model` itself.

    Raises:
        ConfigError: a module writes its state by a method of its own.
    """

    n_averaged: torch.Tensor

    def __init__(self, model: nn.Module, decay: float, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.module = _outline(model, {})
        stage = find_whole(model)
        if stage is not None:
            set_whole(self.module.get_submodule(stage[0].rstrip(".")), stage[1])
        self.register_buffer("n_averaged", torch.tensor(0))  # in host memory: it is read in each step
        self._decay = decay
        self._pairs = _pairing(model, self.module)
        cut_up: list[Any] = [module for module in (shared or model).modules() if is_fully_sharded(module)]
        self._reshard: list[Callable[[], None]] = [module.reshard for module in cut_up]
        kinds: dict[Any, list[int]] = {}
        for index, (_, average) in enumerate(self._pairs()):
            kinds.setdefault((average.device, average.dtype), []).append(index)
        self._kinds = list(kinds.values())

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the model's weights after a step. Sends nothing, and waits for no device."""
        is_first, pairs = self.n_averaged == 0, self._pairs()
        for indices in self._kinds:
            values, averages = zip(*(pairs[index] for index in indices), strict=True)
            if is_first or not _is_averaged(averages[0]):
                torch._foreach_copy_(averages, values)
            else:
                torch._foreach_lerp_(averages, values, 1 - self._decay)
        self.n_averaged += 1

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the averages into the model and its weights into this object, and swap them back afterwards.

        Both have their own bits again afterwards, also after an error. Save nothing inside, and step no optimizer.
        Takes the memory of the largest weight for a moment. Not collective. Integers and booleans are the same in both,
        and stay.

        Raises:
            ConfigError: a buffer is None or has another shape than before.
        """
        count = 0
        try:
            for pair in self._at_rest():
                _swap(*pair)
                count += 1
            self._launch()
            yield
        finally:
            # Undo in reverse order: then weights that overlap in memory (tied by `.data`) get their own bits back too.
            for pair in reversed(self._at_rest()[:count]):
                _swap(*pair)
            self._launch()

    def _at_rest(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Reshard weights that FSDP gathered for a forward pass, and return the pairs that differ."""
        for reshard in self._reshard:
            reshard()
        return [pair for pair in self._pairs() if _is_averaged(pair[1])]

    def _launch(self) -> None:
        """Flush queued operations so that the forward graph is the same with and without averages."""
        kind_of(self._pairs()[0][1].device).launch()


def _pairing(model: nn.Module, outline: nn.Module) -> Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a function that lists (the model's tensor, that of `outline`) for each local weight and buffer.

    The result is a function, not lists in a module: `verify resume` looks into such lists, but the tensors are the
    model's.
    """
    # Weights as they are now: after an evaluation FSDP shows whole ones. A step may replace a buffer by another tensor.
    weights = list(model.parameters())
    places = {
        id(buffer): (module._buffers, name, f"{path}.{name}" if path else name, buffer.shape)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    averages = [local_tensor(tensor.detach()) for tensor in [*outline.parameters(), *outline.buffers()]]

    @torch.no_grad()
    def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        now = [*weights]
        for buffers, key, name, shape in places.values():
            buffer = buffers[key]
            if buffer is None or buffer.shape != shape:
                state_now = "is None" if buffer is None else f"has the shape {list(buffer.shape)}"
                raise ConfigError(
                    f"train.ema_decay averages buffers, which must keep their shape: {name} had {list(shape)} when the "
                    f"model was built, and {state_now} now. Register it at its full size, or use train.ema_decay=null."
                )
            now.append(buffer)
        return list(zip(map(local_tensor, now), averages, strict=True))

    return pairs


def _is_averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents, not the tensors: FSDP, captured graphs and the optimizer know the memory."""
    held = one.clone()
    one.copy_(other)
    other.copy_(held)


class _WithMore(nn.Module):
    """Outline of a module whose state is more than tensors (`get_extra_state`); evaluations use the model's own."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self._tell = source.get_extra_state

    def get_extra_state(self) -> Any:
        """Return a copy of the extra state, since loading may write into it."""
        return copy.deepcopy(self._tell())

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: the model has loaded its own state."""


def _outline(module: nn.Module, made: dict[int, Any]) -> nn.Module:
    """Return modules of the same names with copies of the tensors, and nothing to run.

    Args:
        made: outlines and copies by the id of their source, for ties.
    """
    if id(module) in made:
        return made[id(module)]  # type: ignore[no-any-return]
    has_more = type(module).get_extra_state is not nn.Module.get_extra_state
    outline = made[id(module)] = _WithMore(module) if has_more else nn.Module()
    for name, weight in module._parameters.items():
        outline.register_parameter(name, _copied(weight, made))
    for name, buffer in module._buffers.items():
        is_saved = name not in module._non_persistent_buffers_set
        outline.register_buffer(name, _copied(buffer, made), persistent=is_saved)
    for name, child in module._modules.items():
        outline.register_module(name, None if child is None else _outline(child, made))
    _name_alike(outline, module)
    return outline


def _name_alike(outline: nn.Module, module: nn.Module) -> None:
    """Give the state_dict of `outline` the names that hooks of `module` give its own.

    Raises:
        ConfigError: `module` has its own method for its state_dict, whose names are unknown.
    """
    kind = type(module)
    for method in ("state_dict", "_save_to_state_dict"):
        if getattr(kind, method) is not getattr(nn.Module, method):
            raise ConfigError(
                f"train.ema_decay saves averages under the names of the model's state_dict, and {kind.__name__} "
                f"has a {method} of its own. Rename by hooks (register_state_dict_post_hook, "
                "register_load_state_dict_pre_hook), add to it by get_extra_state, or use train.ema_decay=null."
            )
    for hooks in ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_post_hooks"):
        getattr(outline, hooks).update(getattr(module, hooks))
    before: dict[int, Any] = module._load_state_dict_pre_hooks
    for number, hook in before.items():  # each hook knows whether it is handed the module
        outline._load_state_dict_pre_hooks[number] = partial(hook.hook, outline) if hook.with_module else hook


def _copied(tensor: torch.Tensor | None, made: dict[int, Any]) -> Any:
    if tensor is None:
        return None
    if id(tensor) not in made:
        copied = tensor.detach().clone()
        is_weight = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(copied, requires_grad=False) if is_weight else copied
    return made[id(tensor)]


class AveragedWeightsAbility(Ability):
    _average: AveragedWeights

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        """Make the average once all ranks have the weights of rank 0."""
        assert self.config.train.ema_decay is not None
        self._average = AveragedWeights(state.model, self.config.train.ema_decay, module)
        state.more["ema"] = self._average

    def after_update(self) -> None:
        """Update the average, after a skipped step too: only the GPU knows yet whether the step was skipped."""
        self._average.update()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return self._average.swapped_in()

    def held(self) -> Mapping[str, Iterable[torch.Tensor]]:
        return {"average": [*self._average.parameters(), *self._average.buffers()]}

    def stand_ins(self) -> Mapping[str, torch.Tensor]:
        return dict(self._average.module.named_parameters())

    def memory(self, held: RankMemory, building: Building) -> None:
        held.average = held.weights // held.num_parts + held.buffers
        held.checkpoint += held.saved + held.buffers


ABILITY = AveragedWeightsAbility
