"""A person's own task: what it may return, and the sentence that says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError, MetricCollection

from hpc_trainer.config.schema.task import CustomTaskConfig
from hpc_trainer.errors import ConfigError, DataError
from hpc_trainer.tasks.own import OwnTask, as_task

CONFIG = CustomTaskConfig(_target_="lab.Fit")
BATCH = {"x": torch.ones(4, 2), "y": torch.zeros(4)}


def _task(loss: Any, **more: Any) -> OwnTask:
    """One whose `loss` is a function of what the model returns."""
    methods = {"loss": lambda self, model, batch: loss(model(batch["x"]).squeeze(1)), **more}
    return as_task(type("Fit", (), methods)(), CONFIG)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def _sums(task: OwnTask, **metrics: Any) -> list[float]:
    with torch.no_grad():
        found: list[float] = task.sums(_model(), BATCH, num_samples=4, dtype=torch.float64, metrics=metrics).tolist()
    return found


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda found: None, "returned nothing; the loop takes one scalar. Does it end with `return loss`?"),
        (
            lambda found: found,
            r"a tensor \[4\] of torch.float32; the loop takes one scalar. Return its mean: loss.mean",
        ),
        (lambda found: found.mean().item(), "a float; .* cut off from the weights. Return the tensor itself"),
        (lambda found: (found > 0).sum(), r"a tensor \[\] of torch.int64"),
        (lambda found: {"loss": found.mean()}, "a dict; the loop takes one scalar"),
        (lambda found: (found.mean(), found), r"returned \(loss, Tensor\); the second item must be a dict"),
        (lambda found: found.detach().mean(), "does not depend on the model's weights"),
    ],
)
def test_what_is_no_loss_is_said_in_one_sentence(loss: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)task._target_=lab.Fit: .*{words}"):
        _task(loss).loss(_model(), BATCH)


def test_a_class_without_a_loss_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"makes a object, which has no method loss\(model, batch\)"):
        as_task(object(), CONFIG)


@pytest.mark.parametrize("returned", [lambda found: found.mean(), lambda found: found.mean().reshape(1)])
def test_a_scalar_is_taken_as_it_is(returned: Any) -> None:
    loss = _task(returned).loss(_model(), BATCH)
    assert loss.shape == ()
    assert loss.requires_grad


def test_sums_are_means_times_targets() -> None:
    model = _model()
    mean = model(BATCH["x"]).mean().item()
    task = _task(lambda found: (found.mean(), {"twice": 2 * found.mean(), "one": 1.0}))
    assert not task.counts_targets
    assert _sums(task) == pytest.approx([4 * mean, 4.0, 8 * mean, 4.0])
    assert task.figures([8.0, 2.0, 6.0, 4.0]) == {"eval_loss": 2.0, "eval_one": 0.5, "eval_twice": 1.5}
    counting = _task(lambda found: found.mean(), num_targets=lambda self, batch: torch.tensor(10))
    assert counting.counts_targets
    assert _sums(counting) == pytest.approx([10 * mean, 10.0])
    nothing = _task(lambda found: found.mean() / 0, num_targets=lambda self, batch: 0)
    assert _sums(nothing) == [0.0, 0.0]
    with pytest.raises(DataError, match="num_targets is 0 for each batch"):
        nothing.figures([0.0, 0.0])


@pytest.mark.parametrize("count", [1.5, -1, None, torch.ones(2)])
def test_what_is_no_count_is_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_targets.* it is a whole number, 0 or more"):
        _task(lambda found: found.mean(), num_targets=lambda self, batch: count).num_targets(BATCH)


def test_metrics_must_be_numbers_and_the_same_ones_each_time() -> None:
    with pytest.raises(ConfigError, match=r"the metric 'all' is a tensor \[4\], but must be one number"):
        _sums(_task(lambda found: (found.mean(), {"all": found})))
    names = iter("ab")
    task = _task(lambda found: (found.mean(), {next(names): 1.0}))
    _sums(task)
    with pytest.raises(ConfigError, match=r"the metrics \['b'\], and \['a'\] for another batch"):
        _sums(task)


def _no_package(self: Any) -> dict[str, Any]:
    raise ModuleNotFoundError("No module named 'torchmetrics'", name="torchmetrics")


@pytest.mark.parametrize(
    ("metrics", "told", "error", "words"),
    [
        (_no_package, {}, ModuleNotFoundError, "torchmetrics"),
        (lambda self: {"acc": 3}, {}, ConfigError, "not a metric of torchmetrics"),
        (lambda self: {}, {"acc": [1, 2]}, ConfigError, "the metric 'acc' is a list"),
    ],
)
def test_what_only_an_evaluation_needs_is_looked_at_by_the_first_step(
    metrics: Any, told: dict[str, Any], error: type[Exception], words: str
) -> None:
    """The first evaluation may come at the end of a long training."""
    task = _task(lambda found: (found.mean(), told), metrics=metrics)
    with pytest.raises(error, match=words):
        task.loss(_model(), BATCH)


def test_metrics_may_be_returned_by_evaluations_alone() -> None:
    task = _task(lambda found: found.mean(), metrics=lambda self: {"mae": MeanAbsoluteError()})
    assert task.loss(_model(), BATCH).ndim == 0


def test_a_metric_of_torchmetrics_takes_what_the_loss_returned() -> None:
    metrics = {"mae": MeanAbsoluteError()}
    task = _task(lambda found: (found.mean(), {"mae": (found, BATCH["y"])}), metrics=lambda self: metrics)
    assert len(_sums(task, **task.metrics())) == 2
    assert metrics["mae"].compute().item() == pytest.approx(_model()(BATCH["x"]).abs().mean().item())
    with pytest.raises(ConfigError, match=r"does not return 'mae', which metrics\(\) has"):
        _sums(_task(lambda found: found.mean(), metrics=lambda self: metrics))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: [MeanAbsoluteError()], "returned a list; it returns a dict of single metrics"),
        (lambda: MetricCollection([MeanAbsoluteError()]), "returned a MetricCollection; it returns a dict"),
        (lambda: {"mae": MetricCollection([MeanAbsoluteError()])}, "is a MetricCollection, not a metric"),
        (lambda: {"mae": print}, "is a builtin_function_or_method, not a metric of torchmetrics"),
    ],
)
def test_what_is_no_metric_of_torchmetrics_is_refused(made: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _task(lambda found: found.mean(), metrics=lambda self: made()).metrics()


def test_predictions_are_what_the_class_says() -> None:
    task = _task(None)
    with pytest.raises(ConfigError, match=r"has no method predictions\(model, batch\)"):
        task.predictions(_model(), BATCH)
    task = _task(None, predictions=lambda self, model, batch: {"twice": 2 * torch.ones(3)})
    assert task.predictions(_model(), BATCH)["twice"].tolist() == [2, 2, 2]
    task = _task(None, predictions=lambda self, model, batch: torch.ones(3))
    with pytest.raises(ConfigError, match="returned a Tensor; it returns a dict of tensors"):
        task.predictions(_model(), BATCH)
