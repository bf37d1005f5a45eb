"""Weights in bf16 alone: updates are computed in fp32 and rounded stochastically (Gupta et al. 2015, arXiv 1502.02551).

A bf16 number has 8 bits of mantissa. Rounding to the nearest loses an update that is smaller than half of the last bit,
and the model stops learning. If the probability of rounding up is the remainder, the update counts in the mean.

A step takes the weights in pieces: it copies them and their gradients to fp32, has the optimizer's own kernels update
the copies with moments in fp32, and rounds the copies back. The random bits are a function of the seed, the step, the
weight's name and the element's place in the whole weight. So they need no place in a checkpoint, and all ranks round
alike, whichever shards they hold.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.tensors import in_pieces, is_sharded, local_tensor
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.checkpoint.trees import Box, local_box
from hpc_trainer.training.optim.build import Recipe, step_some
from hpc_trainer.training.state import TrainState

PIECE = 16 << 20
"""Bytes of weights on this rank whose copies exist at a time; one weight at least."""
_ROUNDED = 1 << 22  # elements whose random bits exist at a time, or one row
_BITS = 16  # bits of the mantissa that fp32 has and bf16 has not


class StochasticRoundingAbility(Ability):
    _state: TrainState | None = None
    """None until the state is built: no step is taken before."""

    def see_whole(self, model: nn.Module, building: Building) -> None:
        for name, module in model.named_modules():
            if isinstance(module, _NormBase) and module.track_running_stats and module.affine:
                raise ConfigError(
                    f"precision=bf16_sr keeps all weights in bf16, and {name} ({type(module).__name__}) takes its own "
                    "in the format of its running statistics, fp32. Use precision=bf16, or a model with another norm."
                )

    def on_device(self, model: nn.Module, building: Building) -> None:
        """Round the first weights to the nearest bf16. Buffers stay as they are."""
        for weight in model.parameters():
            if weight.is_floating_point():
                weight.data = weight.data.to(torch.bfloat16)

    def around_optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        names = {id(weight): name for name, weight in model.named_parameters()}

        def key_of(weight: torch.Tensor) -> str:
            return f"{self.config.seed} {self._step} {names[id(weight)]}"

        return recipe.then(partial(round_updates, key_of=key_of))

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        self._state = state

    @property
    def _step(self) -> int:
        return 0 if self._state is None else self._state.step


def round_updates(optimizer: torch.optim.Optimizer, key_of: Callable[[torch.Tensor], str]) -> None:
    """Make steps of `optimizer` update fp32 copies of its weights, which are rounded back stochastically.

    Args:
        optimizer: updates each weight by itself (`step_some`).
        key_of: returns the key of a weight in this step: other keys have other random bits.
    """
    for state in optimizer.state.values():  # made before the first step, as momenta of SGD
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
                state[key] = value.float()
    optimizer.step = partial(_step_rounded, optimizer, optimizer.step, key_of)  # type: ignore[assignment, method-assign]


def _step_rounded(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], key_of: Callable[[torch.Tensor], str]
) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for piece in in_pieces([weight for weight in group["params"] if weight.grad is not None], PIECE):
            copies = [_wide_copy(weight) for weight in piece]
            _hand_over(optimizer.state, piece, copies)
            try:
                step_some(optimizer, step, number, copies)
            finally:
                _hand_over(optimizer.state, copies, piece)
            for weight, copy in zip(piece, copies, strict=True):
                write_rounded(weight, copy, key_of(weight))


def _wide_copy(weight: torch.Tensor) -> torch.Tensor:
    """Return an fp32 copy of a weight, with its gradient."""
    assert weight.grad is not None
    copy = weight.detach().float()
    copy.grad = weight.grad.float()
    return copy


def _hand_over(state: dict[Any, Any], owners: list[torch.Tensor], heirs: list[torch.Tensor]) -> None:
    """Move the moments of each weight in `owners`, if there are any, to the weight at its index in `heirs`."""
    for owner, heir in zip(owners, heirs, strict=True):
        if owner in state:
            state[heir] = state.pop(owner)


@torch.no_grad()
def write_rounded(weight: torch.Tensor, values: torch.Tensor, key: str) -> None:
    """Overwrite `weight` (bf16) with the rounded `values` (fp32), both [...] or DTensors that are sharded alike."""
    part, new = local_tensor(weight), local_tensor(values)
    box = local_box(weight) if is_sharded(weight) else Box.whole(weight.shape)
    shape = tuple(weight.shape) or (1,)
    if not weight.ndim:
        part, new, box = part[None], new[None], Box.whole(shape)
    for rows, bits in _bits_of_rows(key, shape, box, part.device):
        part[rows] = round_stochastically(new[rows], bits)


def _bits_of_rows(
    key: str, shape: tuple[int, ...], box: Box, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (rows of the shard at `box` in a weight of `shape`, their random bits [rows, ...]), a few rows at once."""
    width = math.prod(shape[1:])
    columns = tuple(slice(start, start + size) for start, size in zip(box.offsets[1:], box.lengths[1:], strict=True))
    most = max(1, _ROUNDED // max(1, width))
    for first in range(0, box.lengths[0], most):
        count = min(most, box.lengths[0] - first)
        bits = random_bits(key, (box.offsets[0] + first) * width, count * width, device)
        yield slice(first, first + count), bits.view(count, *shape[1:])[(slice(None), *columns)]


def round_stochastically(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 `values` [...] to bf16: up in magnitude with the probability of the remainder, else down.

    A value that bf16 can hold stays, as do infinities and NaN.

    Args:
        bits: int32 [...], uniform in 0 .. 65535.
    """
    lifted = (values.view(torch.int32) + bits) >> _BITS << _BITS
    return torch.where(values.isfinite(), lifted.view(torch.float32), values).to(torch.bfloat16)


def random_bits(key: str, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return int32 [count], uniform in 0 .. 65535: numbers from `start` on in the stream of `key`.

    The stream is SplitMix64 (Steele et al. 2014) of a counter, so any part of it is computed by itself; each of its
    64-bit words is four numbers. It is the same on each device of a byte order.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    first, end = start // 4, (start + count + 3) // 4
    words = torch.arange(first, end, dtype=torch.int64, device=device)
    words.mul_(_signed(0x9E3779B97F4A7C15)).add_(int.from_bytes(digest, "little", signed=True))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words.bitwise_xor_((words >> shift) & ((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    words.bitwise_xor_((words >> 31) & ((1 << 33) - 1))
    return words.view(torch.int16)[start - 4 * first :][:count].to(torch.int32) & 0xFFFF


def _signed(word: int) -> int:
    """Return the same 64 bits as a signed integer, as torch has them; torch's products wrap around."""
    return word - (1 << 64) if word >> 63 else word


ABILITY = StochasticRoundingAbility
