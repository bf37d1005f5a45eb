"""Interface between the training loop and a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn


class Task(Protocol):
    """Loss and evaluation of a task. The loop knows nothing else about the task.

    A batch holds collated samples of the data set, with its tensors on the device.
    """

    @property
    def takes_pairs(self) -> bool:
        """True if batches are (inputs, targets), two tensors; else they may have any form."""
        ...

    @property
    def counts_targets(self) -> bool:
        """True if samples have different numbers of the targets that the loss averages: `num_targets` counts them."""
        ...

    @property
    def needs_classes(self) -> bool:
        """True if targets are class ids: the data set must then know the number of classes."""
        ...

    @property
    def num_sums(self) -> int | None:
        """Number of values that `sums` returns; None if its first call determines the number."""
        ...

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """Function that makes a batch from a list of samples; None for torch's default."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss over the batch's targets, a scalar."""
        ...

    def num_targets(self, batch: Any) -> int:
        """Return the number of targets that `loss` is the mean over. Called on the host, only if `counts_targets`."""
        ...

    def sums(
        self, model: nn.Module, batch: Any, *, num_samples: int, dtype: torch.dtype, metrics: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return values that an evaluation adds up over its batches and ranks, [num_sums] of `dtype`.

        None if `model` has no result: in a pipeline only the last stage has one.

        Args:
            metrics: metrics of `self.metrics()` to update; empty if the batch does not count.
        """
        ...

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """Return the metrics of an evaluation from the sums of all its batches.

        Raises:
            DataError: no target counts.
        """
        ...

    def predictions(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return the predictions of `model` for each sample, by name, each [batch, ..]. Targets are ignored.

        Raises:
            ConfigError: the task does not define predictions.
        """
        ...

    def metrics(self) -> Mapping[str, Any]:
        """Return new metrics of torchmetrics, by the names under which they are logged; {} for most tasks."""
        ...
