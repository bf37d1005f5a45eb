"""An evaluation's means."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.errors import DataError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import IGNORED, CrossEntropy
from hpc_trainer.training.evaluate import evaluate

CLASSES = 5


class _Padded:
    """Sequences of unlike lengths; what is left of each target is padding."""

    input_shape, num_classes = (4,), CLASSES

    def __init__(self, lengths: Sequence[int]) -> None:
        self.inputs = torch.randn(len(lengths), 4, generator=torch.Generator().manual_seed(1))
        self.targets = torch.randint(CLASSES, (len(lengths), 4), generator=torch.Generator().manual_seed(2))
        for row, length in zip(self.targets, lengths, strict=True):
            row[length:] = IGNORED

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[list(indices)], self.targets[list(indices)]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Linear(1, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(inputs[..., None])
        return logits


@pytest.mark.parametrize("batch_size", [2, 6])
def test_padding_counts_nothing(batch_size: int) -> None:
    data, model = _Padded([4, 1, 0, 2, 3, 0]), _Model()
    values = evaluate(
        model, data, task=CrossEntropy(), group=RankGroup(), batch_size=batch_size, precision=PrecisionConfig()
    )
    assert values is not None
    with torch.no_grad():
        logits, targets = model(data.inputs).flatten(0, 1), data.targets.flatten()
    counted = targets != IGNORED
    wanted = functional.cross_entropy(logits[counted], targets[counted]).item()
    assert values["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    assert values["eval_accuracy"] == (logits.argmax(-1) == targets)[counted].double().mean().item()


def test_no_target_at_all_is_an_error_and_no_number() -> None:
    with pytest.raises(DataError, match="every target of the evaluation set is -100"):
        evaluate(
            _Model(), _Padded([0, 0]), task=CrossEntropy(), group=RankGroup(), batch_size=2, precision=PrecisionConfig()
        )
