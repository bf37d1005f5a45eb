"""Ranks of one attempt, and their messages outside the training step.

Collectives of the group, errors of an action as JSON that ranks exchange, short messages over the process group's
key-value store from any thread, and polls on a stop: after the step of a custom loop, and inside an evaluation.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed exports it, but not to type checkers

from hpc_trainer.errors import (
    CheckpointError,
    CorruptCheckpointError,
    HpcTrainerError,
    StorageError,
    UntrustedFileError,
)
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.runtime.tensors import LateFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Group of `world_size` ranks, as rank `rank` sees it. Every method is collective: all ranks must call it.

    With world_size 1 nothing is sent and no process group is needed. The tensors of messages are on `device`: NCCL
    moves only CUDA tensors.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that writes what only one rank may write."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        if self.world_size > 1:
            # An all-reduce, because dist.barrier guesses a device under NCCL and warns. Under NCCL the call only starts
            # the all-reduce; the host waits when it reads the result.
            self.sum(torch.zeros(1, device=self.device)).item()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` over all ranks, in place, and return it; any shape, the same on all ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` (JSON) on every rank."""
        if self.world_size == 1:
            return value
        data = _encode(value) if self.is_rank_zero else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        dist.broadcast(size, src=0)
        buffer = data.to(self.device) if self.is_rank_zero else self._empty(int(size))
        dist.broadcast(buffer, src=0)
        return _decode(buffer)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON), in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        data = _encode(value)
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = data.numel()
        self.sum(sizes)
        return [_decode(part) for part in self._all_bytes(data, sizes.tolist())]

    def gather_tensors(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return every rank's `tensors`, in any number, shapes and formats, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [list(tensors)]
        flat = [tensor.detach().to(self.device).contiguous().reshape(-1) for tensor in tensors]
        mine = torch.cat([self._empty(0), *(tensor.view(torch.uint8) for tensor in flat)])
        forms = self.gather([[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors])
        sizes = [sum(_num_bytes(*form) for form in of_rank) for of_rank in forms]
        return [_cut(part, of_rank) for part, of_rank in zip(self._all_bytes(mine, sizes), forms, strict=True)]

    def _all_bytes(self, mine: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's bytes, given their numbers `sizes`; messages are padded to the longest."""
        padded = self._empty(max(sizes))
        padded[: mine.numel()] = mine.to(self.device)
        parts = [self._empty(max(sizes)) for _ in sizes]
        dist.all_gather(parts, padded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _empty(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _cut(data: torch.Tensor, forms: Sequence[Any]) -> list[torch.Tensor]:
    """Split bytes into tensors of these formats and shapes, one after the other."""
    tensors, at = [], 0
    for dtype, shape in forms:
        size = _num_bytes(dtype, shape)
        # A copy, because the bytes may begin at an offset that is not aligned for their format.
        tensors.append(data[at : at + size].clone().view(getattr(torch, dtype)).reshape(shape))
        at += size
    return tensors


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(bytes(data.cpu().tolist()).decode())


def is_lost_peer(error: BaseException) -> bool:
    """Return True if a collective failed because another rank is gone, and not by an error of this rank.

    NCCL and the key-value store raise torch.distributed.DistError; gloo a RuntimeError that names its source file.
    """
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "/gloo/transport/" in str(error))


T = TypeVar("T")
# An error of one rank is raised on all ranks, by its name: nothing is unpickled from a peer.
_KINDS = {kind.__name__: kind for kind in (CheckpointError, CorruptCheckpointError, StorageError, UntrustedFileError)}


def attempt(action: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    """Run `action`, which returns JSON, and return (outcome, error); the error is None if there was none."""
    try:
        return {"kind": "", "value": action()}, None
    except HpcTrainerError as error:
        kind = type(error).__name__
        return {"kind": kind if kind in _KINDS else CheckpointError.__name__, "text": str(error)}, error
    except OSError as error:
        return {"kind": StorageError.__name__, "text": f"{type(error).__name__}: {error}"}, error
    except Exception as error:  # whatever it is: a rank that left here would leave its peers waiting
        text = f"{type(error).__name__}: {error}"
        return {"kind": CheckpointError.__name__, "text": text}, error


def raise_any(outcomes: list[dict[str, Any]], cause: Exception | None) -> None:
    """Raise the errors among the outcomes (by rank) as one error, of their kind if they are all of one kind."""
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome["kind"]}
    if failed:
        kinds = {outcome["kind"] for outcome in failed.values()}
        kind = _KINDS[kinds.pop()] if len(kinds) == 1 else CheckpointError
        texts = dict.fromkeys(outcome["text"] for outcome in failed.values())
        if len(failed) < len(outcomes) or len(texts) > 1:
            texts = dict.fromkeys(f"rank {rank}: {outcome['text']}" for rank, outcome in failed.items())
        raise kind("; ".join(texts)) from cause


def on_rank_zero(group: RankGroup, action: Callable[[], Any]) -> Any:
    """Return rank 0's result (JSON) on all ranks, or raise its error on all ranks. Collective."""
    outcome, cause = None, None
    if group.is_rank_zero:
        outcome, cause = attempt(action)
    outcome = group.broadcast(outcome)
    raise_any([outcome], cause)
    return outcome["value"]


def on_each_rank(group: RankGroup, action: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
    """Run `action` on each rank, and return its results, or raise the errors of all ranks. Collective.

    Args:
        action: returns (value that stays on this rank, JSON value for all ranks).

    Returns:
        (value of this rank, JSON values by rank).
    """
    kept: list[T] = []

    def share() -> Any:
        own, shared = action()
        kept.append(own)
        return shared

    outcome, cause = attempt(share)
    outcomes = group.gather(outcome)
    raise_any(outcomes, cause)
    return kept[0], [outcome["value"] for outcome in outcomes]


_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.001, 0.05


class Mail:
    """Mailbox of the ranks for one purpose. Neither method is collective."""

    def __init__(self, purpose: str) -> None:
        # No public function returns the default store; torch's own elastic and FSDP parts take it from here too.
        self._store = PrefixStore(f"hpc_trainer/{purpose}", dist.distributed_c10d._get_default_store())

    def send(self, key: str, value: Any) -> None:
        """Store `value` (JSON) under `key`, which must be new."""
        self._store.set(key, json.dumps(value))

    def take(self, keys: list[str]) -> list[Any]:
        """Wait until all keys exist, remove them, and return their values. Waits for ever for a rank that has died.

        This method polls, because waiting in the store would block every other thread of this rank.
        """
        pause_s = _SHORTEST_POLL_S
        while not self._store.check(keys):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        values = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return values


@dataclass(frozen=True, slots=True)
class StopPoll:
    """Poll for a stop signal on any rank of `group`; `flag` is this rank's."""

    group: RankGroup
    flag: StopFlag

    def ask(self) -> bool:
        """Return True on all ranks if any got a stop signal; on several GPUs this waits for the step. Collective."""
        return self._ask(0.0, lambda votes: votes.item() > 0)

    def series(self, after_s: float) -> Callable[[], bool]:
        """Return a collective call for repeated polls, which ignores signals until they are `after_s` seconds old.

        On several GPUs a call returns the answer of the previous call: reading its own would wait for the device.
        """
        late = LateFlag()
        return lambda: self._ask(after_s, late.read)

    def _ask(self, after_s: float, read: Callable[[torch.Tensor], bool]) -> bool:
        wish = self.flag.age_s > after_s
        if self.group.world_size == 1:
            return wish
        return read(self.group.sum(torch.full((), float(wish), device=self.group.device)))
