"""Bytes alive at once while a forward and a backward pass run on tensors without content.

Storages are counted, each from the operation that makes it until nothing holds it any more. So the peak includes
everything that a pass needs, whoever holds it: autograd, a function that has not returned, the backward pass of the
loss.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.datasets.batch_trees import map_tensors, tensors_of
from hpc_trainer.models.blocks import blocks
from hpc_trainer.runtime.rank_memory import Shares
from hpc_trainer.training.parallel.fully_sharded import gathered_dtype
from hpc_trainer.training.precision.formats import autocast


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBytes:
    """Bytes of one micro-batch on one rank, besides weights, buffers and the batch.

    `kept`: alive when the forward pass has ended. `peak`: the most at a time, without complete gradients. `growing`:
    the most at a time, with the gradients that are complete by then.
    """

    kept: int
    peak: int
    growing: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes of tensors made and freed within it.

    Args:
        known: tensors that existed before; they do not count.
        shares: how much of each new tensor belongs to this rank.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), shares: Shares | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shares = shares or Shares()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self.now = self.besides = 0
        """Bytes alive, and the bytes that `growing` counts in addition."""
        self.peak = self.growing = 0
        for tensor in known:
            self._add(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the tensors that it makes."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, 1)
        self.peak = max(self.peak, self.now)
        self.growing = max(self.growing, self.now + self.besides)
        return result

    def _add(self, tensor: torch.Tensor, counts: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = counts * storage.nbytes() // self.shares.share_of_activations
        self._storages[key] = weakref.ref(storage, lambda _: self._drop(key))
        self._sizes[key] = size
        self.now += size

    def _drop(self, key: int) -> None:
        del self._storages[key]
        self.now -= self._sizes.pop(key)


def measure(
    config: TrainConfig, loss: nn.Module, batch: Any, shares: Shares | None = None, num_parts: int = 1
) -> PassBytes:
    """Measure a forward and a backward pass of one rank, with weights as FSDP would compute with them.

    Afterwards each weight that got a gradient has one without content.

    Args:
        shares: how tensor parallelism divides activations.
        num_parts: number of FSDP shards, of which a rank keeps one.
    """
    with as_gathered(config, loss, batch) as cast:
        live = LiveBytes([*loss.parameters(), *loss.buffers(), *tensors_of(cast)], shares)
        with _gradients_taken(config, loss, live, num_parts) as complete, live:
            with autocast(config.precision, "cpu"):
                value = loss(cast)
            kept = live.now
            value.backward()
            del value
        for weight in complete:
            weight.grad = torch.empty_like(weight)
    return PassBytes(kept=kept, peak=live.peak, growing=live.growing)


@contextlib.contextmanager
def as_gathered(config: TrainConfig, loss: nn.Module, batch: Any) -> Iterator[Any]:
    """Hold weights in the format in which FSDP computes, and yield the batch in that format.

    Afterwards weights and gradients have the weights' own format again.
    """
    dtype = gathered_dtype(config.parallel)
    if dtype is None:
        yield batch
        return
    weights = [weight for weight in loss.parameters() if weight.is_floating_point()]
    held = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.data.to(dtype)
    try:
        yield map_tensors(batch, lambda each: each.to(dtype) if each.is_floating_point() else each)
    finally:
        for weight, data in zip(weights, held, strict=True):
            gradient, weight.grad = weight.grad, None
            weight.data = data
            weight.grad = None if gradient is None else gradient.to(data.dtype)


@contextlib.contextmanager
def _gradients_taken(
    config: TrainConfig, loss: nn.Module, live: LiveBytes, num_parts: int
) -> Iterator[list[nn.Parameter]]:
    """Take each gradient away when it is complete, and count it in `live.besides` instead.

    Yields the weights whose gradients are complete. FSDP's gradients stay whole until the last one of their block is
    complete.
    """
    trained = [weight for weight in loss.parameters() if weight.requires_grad]
    group_of = _messages_of(loss) if config.parallel.strategy is Strategy.fsdp else {}
    missing: dict[tuple[int, ...], set[int]] = {group: set(group) for group in group_of.values()}
    whole: dict[tuple[int, ...], int] = {}
    complete: list[nn.Parameter] = []

    def take(weight: torch.Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        weight.grad = None
        complete.append(weight)
        size = live.shares.num_bytes([weight])
        group = group_of.get(id(weight), (id(weight),))
        whole[group] = whole.get(group, 0) + size
        live.besides += size
        left = missing.get(group, set())
        left.discard(id(weight))
        if not left and num_parts > 1:  # in the shards' format, whatever that of the whole was
            part = whole[group] // weight.itemsize * config.precision.format.weight_bytes // num_parts
            live.besides += part - whole[group]

    handles = [weight.register_post_accumulate_grad_hook(take) for weight in trained]  # type: ignore[no-untyped-call]
    try:
        yield complete
    finally:
        for handle in handles:
            handle.remove()


def _messages_of(loss: nn.Module) -> dict[int, tuple[int, ...]]:
    """Map each weight's id to the ids in its FSDP message: the weights of its block, or all outside blocks."""
    found = {id(weight): tuple(map(id, block.parameters())) for block in blocks(loss) for weight in block.parameters()}
    rest = tuple(id(weight) for weight in loss.parameters() if id(weight) not in found)
    return found | dict.fromkeys(rest, rest)
