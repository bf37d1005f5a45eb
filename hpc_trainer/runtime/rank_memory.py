"""What a rank holds, in bytes, as the estimate counts it and features change it. No figure here; only the words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn


@dataclass(slots=True)
class Shares:
    """Which weights ranks hold in parts before FSDP cuts them up, and whether what runs now is between such layers."""

    count: int = 1
    """Parts of each."""
    divided: frozenset[int] = frozenset()
    """By id."""
    is_inside: bool = False

    def num_bytes(self, weights: Iterable[torch.Tensor]) -> int:
        """Of this rank's parts, before FSDP cuts them further."""
        return sum(each.nbytes // self.share_of(each) for each in weights)

    def share_of(self, weight: torch.Tensor) -> int:
        """1, or how many ranks hold a part each."""
        return self.count if id(weight) in self.divided else 1

    @property
    def share_of_activations(self) -> int:
        """The same of what is computed now."""
        return self.count if self.is_inside else 1


@dataclass(slots=True, kw_only=True)
class RankMemory:
    """What one rank holds, as it is known so far: bytes, but for the first four. `Ability.memory` changes it in place.

    Weights, `trained` and `gathered` are this rank's share of divided layers.
    """

    model: nn.Module
    """What the rank runs, with gradients of what is trained."""
    optimizer: torch.optim.Optimizer
    """As one rank would have it, after a step."""
    shares: Shares
    num_parts: int
    """FSDP's, of which a rank keeps one; sizes of weights are those before."""
    note: str | None
    """What is a guess, and why."""
    blocks: list[int]
    """Weights of each block, the largest first."""
    weights: int
    buffers: int
    trained: int
    moments: int
    """The optimizer's, before ranks part them."""
    all_moments: int
    """Of all ranks together, as a checkpoint has them."""
    moment_parts: int
    """Of `moments` a rank keeps one of so many parts."""
    gradients: int
    has_gradients: bool
    """They are there before a pass, and what it adds to them does not count: in buckets, or added up."""
    kept: int
    """Of a pass: alive between its forward and its backward half."""
    peak: int
    """The most at a time, without gradients that are complete."""
    growing: int
    """The most at a time, with them, as they come."""
    batch: int
    gathered: int
    made: int
    """By the optimizer's step, for the while of it."""
    is_skipped_by_scaler: bool
    """It may not: the loss scaler skips such a step."""
    saved: int
    """Weights in a checkpoint; with adapters, the base weights are left out."""
    checkpoint: int
    num_evaluated_parts: int
    """Of an evaluation's samples."""
    is_put_back: bool = False
    """A step keeps copies of all it changes, as the device may find it bad."""
    most_moments: int | None = None
    """So many are on the device at a time, where the others are in host memory."""
    host_share: Fraction | None = None
    """Bytes of host memory for one of moments."""
    average: int = 0
    communication: int = 0

    def sizes_here(self) -> list[int]:
        """Of this rank's parts of the weights that are trained."""
        trained = (weight for weight in self.model.parameters() if weight.requires_grad)
        return [self.shares.num_bytes([weight]) // self.num_parts for weight in trained]

    @property
    def optimizer_here(self) -> int:
        """Of this rank's moments, on the device."""
        here = self.moments // self.moment_parts
        return here if self.most_moments is None else min(here, self.most_moments)

    @property
    def host(self) -> int:
        """Of this rank's moments, in host memory."""
        return 0 if self.host_share is None else int(self.moments // self.moment_parts * self.host_share)

    @property
    def activations(self) -> int:
        """What the passes of a step take beside `gradients`."""
        return (self.peak if self.has_gradients else max(0, self.growing - self.gradients)) + self.batch
