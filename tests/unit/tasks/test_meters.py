"""Metrics of torchmetrics, each updated with a part of the samples, are that of one that saw them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric, PearsonCorrCoef, R2Score, SpearmanCorrCoef

from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.evaluate import computed

pytestmark = pytest.mark.filterwarnings("ignore:Metric `Spearman")
KINDS: dict[str, Any] = {
    "sum": MeanSquaredError,
    "several sums": R2Score,
    "lists": SpearmanCorrCoef,
    "own reduction": PearsonCorrCoef,
    "of two": lambda: MeanSquaredError() + 2 * MeanAbsoluteError(),
}


def _computed(metrics: list[Any]) -> dict[str, float]:
    return computed({share: {"it": each} for share, each in enumerate(metrics)}, RankGroup(), counts=True)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_three_shares_are_one(make: Any) -> None:
    torch.manual_seed(0)
    found, wanted = torch.randn(2, 30).unbind()
    whole, parts = make(), [make() for _ in range(3)]
    whole.update(found, wanted)
    for part, start, end in zip(parts, (0, 3, 17), (3, 17, 30), strict=True):
        part.update(found[start:end], wanted[start:end])
    assert _computed(parts) == pytest.approx({"eval_it": whole.compute().item()}, rel=1e-5)


def test_a_share_without_samples_counts_nothing() -> None:
    parts = [MeanAbsoluteError(), SpearmanCorrCoef()]
    for part in parts:
        part.update(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 3.0, 2.0]))
        alone = part.compute().item()
        assert _computed([part, type(part)()]) == pytest.approx({"eval_it": alone})


class _Loose(Metric):
    """Keeps a tensor of each update, and does not say how they are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx=None)

    def update(self, value: torch.Tensor) -> None:
        self.seen.append(value)

    def compute(self) -> torch.Tensor:
        return torch.stack(self.seen)


def test_lists_of_other_lengths_are_refused_and_not_waited_for() -> None:
    one, two = _Loose(), _Loose()
    one.update(torch.zeros(()))
    with pytest.raises(ConfigError, match="'it' keeps a list of another length on each rank"):
        _computed([one, two])


def test_what_is_not_one_number_is_refused() -> None:
    one = _Loose()
    for value in (torch.zeros(()), torch.ones(())):
        one.update(value)
    with pytest.raises(ConfigError, match=r"the metric 'it' computes a tensor \[2\]; the loop logs one number"):
        _computed([one])
