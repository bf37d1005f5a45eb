"""`task=custom`: adapter from a user's class with `loss(model, batch)` to the `Task` that the training loop needs.

loss(model, batch)      the mean over the batch, a scalar; or (that, metrics), metrics by name
metrics()               optional: {name: a metric of torchmetrics}; `loss` returns what each is updated with
num_targets(batch)      optional: number of targets that `loss` is the mean over, if samples have different numbers
collate(samples)        optional: makes a batch from a list of samples
predictions(model, batch)   optional: {name: tensor [batch, ..]}, for `hpc-trainer predict`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from hpc_trainer.config.schema.task import CustomTaskConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.tasks.pairs import checked_count


def as_task(made: Any, config: CustomTaskConfig) -> OwnTask:
    """Wrap `made`, the object that `config` names, in a `Task`. Raises ConfigError if it has no method `loss`."""
    if not callable(getattr(made, "loss", None)):
        raise ConfigError(
            f"task._target_={config._target_} makes a {type(made).__name__}, which has no method loss(model, batch). "
            "Give it one that returns the mean loss of the batch (docs/tasks.md)."
        )
    return OwnTask(made, f"task._target_={config._target_}")


class OwnTask:
    """`Task` around a user's object, whose results are checked each time."""

    takes_pairs: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = False
    num_sums: ClassVar[int | None] = None

    def __init__(self, own: Any, what: str) -> None:
        self._own, self._what = own, what
        self._count: Callable[[Any], int] | None = getattr(own, "num_targets", None)
        self.counts_targets = self._count is not None
        self.collate: Callable[[list[Any]], Any] | None = getattr(own, "collate", None)
        self._names: tuple[str, ...] = ()
        self._is_checked = False

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the user's loss. Raises ConfigError if it is not a scalar that backward can start from."""
        loss, metrics = self._loss_and_metrics(model, batch)
        if not self._is_checked:
            self._check(metrics)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(
                f"{self._what}: the loss does not depend on the model's weights, so nothing can be learned. Compute it "
                "from what model(...) returns, without detach(), item() or torch.no_grad()."
            )
        return loss

    def num_targets(self, batch: Any) -> int:
        """Return the number of targets by the user's method. Raises ConfigError if it is not a count."""
        assert self._count is not None
        count: Any = self._count(batch)
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            count = count.item()
        if not isinstance(count, int) or count < 0:
            raise ConfigError(f"{self._what}: num_targets(batch) returned {count!r}; it is a whole number, 0 or more.")
        return count

    def sums(
        self, model: nn.Module, batch: Any, *, num_samples: int, dtype: torch.dtype, metrics: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return loss and metrics, each times the number of targets in the batch, and that number.

        Raises:
            ConfigError: the user's `loss` returns other metrics than for the last batch, or too few.
        """
        loss, reported = self._loss_and_metrics(model, batch)
        meters = metrics or self.metrics()
        numbers = {name: value for name, value in reported.items() if name not in meters}
        names = tuple(sorted(numbers))
        if self._names and names != self._names:
            raise ConfigError(
                f"{self._what}: loss(model, batch) returned the metrics {list(names)}, and {list(self._names)} for "
                "another batch. Return the same ones each time."
            )
        self._names = names
        missing = sorted(meters.keys() - reported.keys())
        if missing:
            raise ConfigError(
                f"{self._what}: loss(model, batch) does not return {missing[0]!r}, which metrics() has. Return (loss, "
                f"{{{missing[0]!r}: (predictions, targets), ..}}): what that metric's update takes."
            )
        for name, metric in metrics.items():
            given = reported[name]
            metric.update(*given) if isinstance(given, (tuple, list)) else metric.update(given)
        count = self.num_targets(batch) if self._count is not None else num_samples
        parts = [self._scalar(loss, "loss"), *(self._scalar(numbers[name], name) for name in names)]
        values = torch.stack([part.to(loss.device, dtype) for part in parts])
        values = values * count if count else torch.zeros_like(values)  # a mean over nothing is NaN
        return torch.cat([values, values.new_full((1,), count)])

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """Return means over all targets: `eval_loss`, and each metric by its name."""
        loss, *others, count = totals
        count = checked_count(count, "none (num_targets is 0 for each batch)")
        return {
            "eval_loss": loss / count,
            **{eval_name(n): v / count for n, v in zip(self._names, others, strict=True)},
        }

    def predictions(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return the predictions of the user's method. Raises ConfigError if it is missing, or returns no tensors."""
        tell = getattr(self._own, "predictions", None)
        if not callable(tell):
            raise ConfigError(
                f"{self._what} has no method predictions(model, batch), and only the task knows which part of a batch "
                f"goes into the model. Give it one that returns {{name: tensor [batch, ..]}}."
            )
        named: Any = tell(model, batch)
        if not isinstance(named, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in named.values()):
            raise ConfigError(
                f"{self._what}: predictions(model, batch) returned a {type(named).__name__}; it returns a dict of "
                "tensors [batch, ..] by name."
            )
        return named

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the user's `metrics()`. Raises ConfigError if they are not metrics of torchmetrics."""
        make = getattr(self._own, "metrics", None)
        metrics: Any = make() if callable(make) else {}
        if not isinstance(metrics, Mapping) or isinstance(metrics, nn.Module):
            raise ConfigError(
                f"{self._what}: metrics() returned a {type(metrics).__name__}; it returns a dict of single metrics of "
                "torchmetrics by name."
            )
        for name, metric in metrics.items():
            if not all(callable(getattr(metric, method, None)) for method in ("update", "compute", "sync", "unsync")):
                raise ConfigError(
                    f"{self._what}: metrics()[{name!r}] is a {type(metric).__name__}, not a metric of torchmetrics; "
                    "only those can be combined over several ranks. For a mean, return a number of loss(model, batch) "
                    "instead."
                )
        return metrics

    def _check(self, metrics: Mapping[str, Any]) -> None:
        """Check the metrics at the first step: the first evaluation may come only at the end of a long training."""
        meters = self.metrics()
        for name, value in metrics.items():
            if name not in meters:
                self._scalar(value, name)
        self._is_checked = True

    def _loss_and_metrics(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        result = self._own.loss(model, batch)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"{self._what}: loss(model, batch) returned (loss, {type(metrics).__name__}); the second item must be "
                "a dict of metrics by name."
            )
        return self._loss(loss), metrics

    def _loss(self, loss: Any) -> torch.Tensor:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
            return loss.reshape(()) if loss.ndim else loss
        result, use = f"a {type(loss).__name__}", "Return a tensor without dimensions, made of what the model returns."
        if isinstance(loss, torch.Tensor):
            result, use = f"a tensor {list(loss.shape)} of {loss.dtype}", "Return its mean: loss.mean()."
        elif loss is None:
            result, use = "nothing", "Does it end with `return loss`?"
        elif isinstance(loss, (int, float)):
            use = "It is cut off from the weights. Return the tensor itself, without .item() or float()."
        raise ConfigError(f"{self._what}: loss(model, batch) returned {result}; the loop takes one scalar. {use}")

    def _scalar(self, value: Any, name: str) -> torch.Tensor:
        made = torch.as_tensor(value) if isinstance(value, (int, float, torch.Tensor)) else None
        if made is None or made.numel() != 1:
            kind = type(value).__name__ if made is None else f"tensor {list(made.shape)}"
            raise ConfigError(
                f"{self._what}: the metric {name!r} is a {kind}, but must be one number, the mean over the batch. "
                f"For a "
                "value that is not a mean, give metrics() a metric of torchmetrics by that name."
            )
        return made.detach().reshape(())


def eval_name(name: str) -> str:
    """Return the name under which an evaluation logs a metric: with the prefix `eval_`, unless it has that already."""
    return name if name.startswith("eval_") else f"eval_{name}"
