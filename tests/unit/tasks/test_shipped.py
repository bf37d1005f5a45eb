"""The shipped tasks: losses by hand, and what their evaluations tell."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchmetrics.classification import MultilabelAccuracy, MultilabelF1Score

from hpc_trainer.config.schema.task import RegressionConfig, RegressionLoss
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.errors import ConfigError, DataError
from hpc_trainer.features.chunked_loss.chunked_loss import chunked_cross_entropy
from hpc_trainer.tasks.cross_entropy import CrossEntropy, LanguageModel
from hpc_trainer.tasks.multi_label import MultiLabel
from hpc_trainer.tasks.pairs import PairTask
from hpc_trainer.tasks.regression import Regression
from hpc_trainer.training.data.target_shares import by_share
from tests.composed import composed

OUTPUTS, TARGETS = torch.tensor([[1.0], [2.0], [-4.0]]), torch.tensor([1.5, 2.0, 0.0])


class _Same(nn.Module):
    """Its output is its input."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def _figures(task: PairTask, outputs: torch.Tensor, targets: torch.Tensor, *cuts: int) -> dict[str, float]:
    """An evaluation in batches that end at `cuts`."""
    totals = torch.zeros(task.num_sums, dtype=torch.float64)
    for start, end in zip((0, *cuts), (*cuts, len(targets)), strict=True):
        batch = outputs[start:end], targets[start:end]
        found = task.sums(_Same(), batch, num_samples=end - start, dtype=torch.float64, metrics={})
        assert found is not None
        totals += found
    return task.figures(totals.tolist())


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (RegressionLoss.mse, (0.25 + 0 + 16) / 3),
        (RegressionLoss.l1, (0.5 + 0 + 4) / 3),
        (RegressionLoss.huber, (0.125 + 0 + 2 * (4 - 1)) / 3),
    ],
)
def test_the_losses_of_a_regression(loss: RegressionLoss, wanted: float) -> None:
    """[batch, 1] and [batch] are compared row by row, and not each with each."""
    task = Regression(RegressionConfig(loss=loss, huber_delta=2.0))
    assert task.loss(_Same(), (OUTPUTS, TARGETS)).item() == pytest.approx(wanted)
    for cuts in ((), (1,), (1, 2)):
        figures = _figures(task, OUTPUTS, TARGETS, *cuts)
        assert figures == pytest.approx({"eval_loss": wanted, "eval_mae": 4.5 / 3, "eval_rmse": math.sqrt(16.25 / 3)})


def test_a_regression_of_several_numbers_is_in_fp32() -> None:
    task = Regression(RegressionConfig())
    outputs, targets = torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(4, 3)
    loss = task.loss(_Same(), (outputs, targets))
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx((outputs.float() - targets).square().mean().item())


def test_another_number_of_outputs_is_refused_with_both_shapes() -> None:
    with pytest.raises(ConfigError, match=r"gives \[3, 1\] numbers for targets of \[3, 2\]"):
        Regression(RegressionConfig()).loss(_Same(), (OUTPUTS, torch.zeros(3, 2)))


def test_labels_are_counted_as_torchmetrics_does() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(17, 5), torch.randint(2, (17, 5))
    task = MultiLabel()
    loss = task.loss(_Same(), (logits, labels)).item()
    told = logits.sigmoid()
    assert loss == pytest.approx(-(labels * told.log() + (1 - labels) * (1 - told).log()).mean().item())
    wanted = {
        "eval_loss": loss,
        "eval_accuracy": MultilabelAccuracy(5, average="micro")(told, labels).item(),
        "eval_f1": MultilabelF1Score(5, average="micro")(told, labels).item(),
    }
    assert _figures(task, logits, labels, 4, 9) == pytest.approx(wanted)


def test_no_label_told_and_none_there_is_all_right() -> None:
    assert _figures(MultiLabel(), torch.full((2, 3), -9.0), torch.zeros(2, 3))["eval_f1"] == 1.0


def test_cross_entropy_of_16_bit_logits_is_computed_in_fp32() -> None:
    """Test without autocast, which computes this loss in fp32 on the CPU but not on CUDA."""
    logits = 4 * torch.randn(64, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.randint(0, 100, (64,), generator=torch.Generator().manual_seed(1))
    exact = functional.cross_entropy(logits.double(), targets).item()
    assert CrossEntropy().loss_of(logits, targets).item() == pytest.approx(exact, rel=1e-6)
    shares = functional.one_hot(targets, 100).float()
    assert CrossEntropy().loss_of(logits, shares).item() == pytest.approx(exact, rel=1e-6)
    total, *_ = CrossEntropy().sums_of(logits, targets)
    assert total.item() == pytest.approx(64 * exact, rel=1e-6)
    chunked = chunked_cross_entropy(lambda rows: rows, logits, targets, chunk_size=24)
    assert chunked.item() == pytest.approx(exact, rel=1e-6)


def test_a_language_model_tells_its_perplexity() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 4, 7), torch.randint(7, (3, 4))
    plain, task = _figures(CrossEntropy(), logits, targets), LanguageModel()
    assert _figures(task, logits, targets, 2) == pytest.approx(
        {**plain, "eval_perplexity": math.exp(plain["eval_loss"])}
    )
    assert task.figures([1e6, 0.0, 1.0])["eval_perplexity"] == math.inf


@pytest.mark.parametrize("task", [CrossEntropy(), Regression(RegressionConfig()), MultiLabel()])
def test_a_mean_of_nothing_is_an_error(task: PairTask) -> None:
    with pytest.raises(DataError, match="there is no mean"):
        task.figures([0.0] * task.num_sums)


def test_a_model_that_returns_more_than_one_tensor_is_named() -> None:
    class Two(nn.Module):
        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
            return inputs, None

    with pytest.raises(ConfigError, match="Two returns a tuple; the loop takes one tensor"):
        CrossEntropy().loss(Two(), (OUTPUTS, TARGETS))


def test_predictions_of_each_task() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]])
    told = CrossEntropy().predictions(_Same(), (logits, torch.zeros(2)))
    assert told["class"].tolist() == [1, 0]
    assert torch.allclose(told["probabilities"], logits.softmax(-1))
    tokens = LanguageModel().predictions(_Same(), (logits[None], torch.zeros(1, 2)))
    assert tokens["class"].tolist() == [[1, 0]]
    assert torch.allclose(tokens["probability"][0], logits.softmax(-1).amax(-1))
    assert Regression(RegressionConfig()).predictions(_Same(), (OUTPUTS, TARGETS)) == {"outputs": OUTPUTS}
    labels = MultiLabel().predictions(_Same(), (torch.tensor([[-1.0, 2.0]]), torch.zeros(1, 2)))
    assert labels["labels"].tolist() == [[0, 1]]
    assert labels["probabilities"][0, 1].item() == pytest.approx(1 / (1 + math.exp(-2)))


def _shares(one: torch.Tensor, other: torch.Tensor, weights: torch.Tensor, num_classes: int) -> torch.Tensor:
    rows = [functional.one_hot(each, num_classes).float() for each in (one, other)]
    return weights[:, None] * rows[0] + (1 - weights[:, None]) * rows[1]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_of_a_mixed_target_is_that_of_both_by_their_weights(label_smoothing: float) -> None:
    torch.manual_seed(0)
    logits, weights = torch.randn(9, 5), torch.rand(9)
    one, other = torch.randint(5, (9,)), torch.randint(5, (9,))
    task = CrossEntropy(label_smoothing)
    found = task.loss(_Same(), (logits, _shares(one, other, weights, 5)))
    each = [
        functional.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
        for labels in (one, other)
    ]
    assert found.item() == pytest.approx((weights * each[0] + (1 - weights) * each[1]).mean().item(), rel=1e-5)
    unmixed = task.loss(_Same(), (logits, functional.one_hot(one, 5).float()))
    assert unmixed.item() == pytest.approx(task.loss(_Same(), (logits, one)).item(), rel=1e-6)
    in_bf16 = task.loss(_Same(), (logits.bfloat16(), _shares(one, other, weights, 5)))
    assert in_bf16.item() == pytest.approx(found.item(), rel=0.02)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_a_row_without_shares_counts_nothing_however_the_batch_is_cut(label_smoothing: float) -> None:
    """By the weights of `target_shares`: a micro-batch counts by the targets that count in it."""
    torch.manual_seed(1)
    logits, one, other = torch.randn(8, 5), torch.randint(5, (8,)), torch.randint(5, (8,))
    targets = _shares(one, other, torch.rand(8), 5)
    targets[[1, 2, 3]] = 0.0
    task, counted = CrossEntropy(label_smoothing), [0, 4, 5, 6, 7]
    whole = task.loss(_Same(), (logits, targets))
    assert whole.item() == pytest.approx(task.loss(_Same(), (logits[counted], targets[counted])).item(), rel=1e-6)
    assert task.num_targets((logits, targets)) == 5
    parts = []
    for start in (0, 2, 4, 6):
        part = logits[start : start + 2], targets[start : start + 2]
        share = torch.tensor([task.num_targets(part) * 4, 5])
        parts.append(by_share(task.loss(_Same(), part), share) / 4)
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(VARIANTS["task"].keys() - {"custom"}))
def test_a_task_declares_what_its_evaluations_tell(name: str) -> None:
    """Else `plan` would refuse a metric that comes, or take one that never does, for early_stop and keep_best."""
    config = composed([f"task={name}"])
    module, _, builder = config.task._target_.rpartition(".")
    task: PairTask = getattr(importlib.import_module(module), builder)(config)
    assert set(task.figures([1.0] * task.num_sums)) == set(config.task.evaluated)
