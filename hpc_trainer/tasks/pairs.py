"""Tasks whose loss is a function of the model's outputs and of the targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from hpc_trainer.errors import ConfigError, DataError


class PairTask(ABC):
    """`Task` whose batches are (inputs, targets). A pipeline's last stage, which has only outputs, calls `loss_of`."""

    takes_pairs: ClassVar[bool] = True
    counts_targets: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = False
    num_sums: ClassVar[int]
    collate: Callable[[list[Any]], Any] | None = None

    @abstractmethod
    def loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the targets that count, a scalar."""

    @abstractmethod
    def sums_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return `num_sums` scalars; the first is the sum of the losses, the last the number to divide it by."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss over the batch's targets, a scalar."""
        inputs, targets = batch
        return self.loss_of(outputs_of(model, inputs), targets)

    def num_targets(self, batch: Any) -> int:
        """Return the number of all targets."""
        count: int = batch[1].numel()
        return count

    def sums(
        self, model: nn.Module, batch: Any, *, num_samples: int, dtype: torch.dtype, metrics: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return the sums of `sums_of` as [num_sums] of `dtype`; None before the last stage of a pipeline."""
        inputs, targets = batch
        outputs = model(inputs)
        if outputs is None:  # before the last stage of a pipeline
            return None
        return torch.stack([value.to(dtype) for value in self.sums_of(outputs, targets)])

    def predictions(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return the predictions of `predictions_of` for the model's outputs."""
        return self.predictions_of(outputs_of(model, batch[0]))

    def predictions_of(self, outputs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the outputs [batch, ..] themselves, as `outputs`."""
        return {"outputs": outputs}

    @abstractmethod
    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """Return the metrics of an evaluation from the sums of all its batches."""

    def metrics(self) -> Mapping[str, Any]:
        """Return no metrics: sums are enough."""
        return {}


def outputs_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the model's output for `inputs`. Raises ConfigError if it is not one tensor."""
    outputs: torch.Tensor = model(inputs)
    if not isinstance(outputs, torch.Tensor):
        raise ConfigError(
            f"{type(model).__name__} returns a {type(outputs).__name__}; the loop takes one tensor, the logits "
            "[batch, ..., num_classes]. Return that alone (by a wrapper whose forward picks it), or write a task of "
            "your own (task=custom, docs/tasks.md)."
        )
    return outputs


def like_targets(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and targets in fp32, both in the shape of the targets.

    Outputs [batch, 1] match targets [batch], which torch would broadcast to [batch, batch].

    Raises:
        ConfigError: their numbers of elements differ.
    """
    if outputs.numel() != targets.numel():
        raise ConfigError(
            f"the model gives {list(outputs.shape)} numbers for targets of {list(targets.shape)}; this task compares "
            "them one by one. Give the model as many outputs as a target has numbers."
        )
    return outputs.float().reshape(targets.shape), targets.float()


def checked_count(count: float, what: str) -> float:
    """Return `count`. Raises DataError if it is 0, because there is no mean then.

    Args:
        count: number of targets that count.
        what: description, for the message, of targets that do not count.
    """
    if not count:
        raise DataError(f"every target of the evaluation set is {what}, which does not count: there is no mean.")
    return count
