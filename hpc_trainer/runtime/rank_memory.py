"""Memory of a rank, in bytes, as the estimate counts it and features change it. Only the fields are defined here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn


@dataclass(slots=True)
class Shares:
    """Weights that are divided among ranks before FSDP shards them."""

    count: int = 1
    """Number of ranks among which such a weight is divided."""
    divided: frozenset[int] = frozenset()
    """Ids of the divided weights."""
    is_inside: bool = False
    """True if the computation is now between divided layers."""

    def num_bytes(self, weights: Iterable[torch.Tensor]) -> int:
        """Return the bytes of this rank's shares of the weights, before FSDP shards them further."""
        return sum(weight.nbytes // self.share_of(weight) for weight in weights)

    def share_of(self, weight: torch.Tensor) -> int:
        """Return the number of ranks among which a weight is divided; 1 if it is whole."""
        return self.count if id(weight) in self.divided else 1

    @property
    def share_of_activations(self) -> int:
        """Number of ranks among which the current activations are divided; 1 if they are whole."""
        return self.count if self.is_inside else 1


@dataclass(slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank as known so far, in bytes if no other unit is named. `Ability.memory` changes it in place.

    Weights, `trained` and `gathered` are this rank's share of divided layers.
    """

    model: nn.Module
    """Model that the rank runs, with gradients of the trained weights."""
    optimizer: torch.optim.Optimizer
    """Optimizer as one rank would have it, after a step."""
    shares: Shares
    num_parts: int
    """Number of FSDP's shards, of which a rank keeps one; sizes of weights are those before sharding."""
    note: str | None
    """Text that says which value is a guess, and why."""
    blocks: list[int]
    """Bytes of the weights of each block, the largest first."""
    weights: int
    buffers: int
    trained: int
    moments: int
    """Moments of the optimizer, before they are sharded among ranks."""
    all_moments: int
    """Moments of all ranks together, as a checkpoint holds them."""
    moment_parts: int
    """Number of shards of `moments`, of which a rank keeps one."""
    gradients: int
    has_gradients: bool
    """True if gradients exist before a pass, in buckets or accumulated, so that a pass takes no memory for them."""
    kept: int
    """Bytes that are alive between the forward and the backward half of a pass."""
    peak: int
    """Peak of a pass, without the gradients that are complete."""
    growing: int
    """Peak of a pass, with the gradients that are complete so far."""
    batch: int
    gathered: int
    made: int
    """Bytes that the optimizer's step allocates temporarily."""
    is_skipped_by_scaler: bool
    """True if the loss scaler skips a bad step, so that the copies of `is_put_back` are not needed."""
    saved: int
    """Weights in a checkpoint; with adapters, the base weights are left out."""
    checkpoint: int
    num_evaluated_parts: int
    """Number of parts into which the samples of an evaluation are divided."""
    is_put_back: bool = False
    """True if a step keeps copies of everything that it changes, because the device may find the step bad."""
    most_moments: int | None = None
    """Largest number of bytes of moments on the device at a time, if the others are in host memory; else None."""
    host_share: Fraction | None = None
    """Bytes of host memory per byte of moments; None if no moments are in host memory."""
    average: int = 0
    communication: int = 0

    def sizes_here(self) -> list[int]:
        """Return the bytes of this rank's shard of each trained weight."""
        trained = (weight for weight in self.model.parameters() if weight.requires_grad)
        return [self.shares.num_bytes([weight]) // self.num_parts for weight in trained]

    @property
    def optimizer_here(self) -> int:
        """Bytes of this rank's moments that are always on the device."""
        return 0 if self.most_moments is not None else self.moments // self.moment_parts

    @property
    def brought(self) -> int:
        """Bytes of moments that an optimizer step brings to the device at a time, if they are in host memory."""
        return min(self.moments // self.moment_parts, self.most_moments or 0)

    @property
    def host(self) -> int:
        """Bytes of this rank's moments in host memory."""
        return 0 if self.host_share is None else int(self.moments // self.moment_parts * self.host_share)

    @property
    def activations(self) -> int:
        """Bytes that the passes of a step take besides `gradients`."""
        return (self.peak if self.has_gradients else max(0, self.growing - self.gradients)) + self.batch
