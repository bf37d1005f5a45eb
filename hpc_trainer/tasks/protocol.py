"""What the training loop asks of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn


class Task(Protocol):
    """Loss and evaluation. The loop knows no more of what is trained.

    A batch is what the data set's samples are collated to, its tensors on the device.
    """

    @property
    def takes_pairs(self) -> bool:
        """Batches are (inputs, targets), two tensors; else they are of any form."""
        ...

    @property
    def counts_targets(self) -> bool:
        """The loss is a mean over something of which samples have unlike numbers: `num_targets` is asked for each."""
        ...

    @property
    def needs_classes(self) -> bool:
        """Targets are class ids, and data must say how many there are; else data may leave it open."""
        ...

    @property
    def num_sums(self) -> int | None:
        """How many `sums` returns; None: its first call says."""
        ...

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """Makes a batch of a list of samples; None: as torch does."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean over the batch's targets, a scalar."""
        ...

    def num_targets(self, batch: Any) -> int:
        """What `loss` is the mean over. Asked on the host, only if `counts_targets`."""
        ...

    def sums(
        self, model: nn.Module, batch: Any, *, num_samples: int, dtype: torch.dtype, metrics: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """What is added up over an evaluation's batches and ranks, [num_sums] of `dtype`.

        None where `model` has no result: of a pipeline only the last stage has.

        Args:
            metrics: of `self.metrics()`, to be updated; empty if the batch does not count.
        """
        ...

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """The metrics of an evaluation by the sums of all its batches.

        Raises DataError: no target counts.
        """
        ...

    def predictions(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """What `model` says of each sample, by names, each [batch, ..]. Targets do not count.

        Raises ConfigError: nobody knows what is a prediction.
        """
        ...

    def metrics(self) -> Mapping[str, Any]:
        """Fresh metrics of torchmetrics, by the name that they are logged as; {} for most tasks."""
        ...
