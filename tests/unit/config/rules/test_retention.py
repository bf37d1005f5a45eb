"""Which checkpoints stay: what a metric's name says, and what must be said."""

from __future__ import annotations

import pytest

from hpc_trainer.config.rules.validate import retention_problems
from hpc_trainer.config.schema.output import BestMode, CheckpointConfig, best_is_max


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eval_loss", False), ("val_error", False), ("perplexity", False), ("WER", False),
        ("eval_accuracy", True), ("top5_acc", True), ("macro_F1", True), ("mAP", True),
    ],
)  # fmt: skip
def test_a_name_says_what_is_good(name: str, expected: bool) -> None:
    checkpoint = CheckpointConfig(keep_best=name)
    assert list(retention_problems(checkpoint)) == []
    assert best_is_max(checkpoint) is expected


@pytest.mark.parametrize("name", ["speed", "x", "accuracy_loss"])
def test_a_name_that_says_nothing_or_both_needs_a_mode(name: str) -> None:
    (problem,) = retention_problems(CheckpointConfig(keep_best=name))
    assert "best_mode=min or checkpoint.best_mode=max" in problem
    for mode in (BestMode.min, BestMode.max):
        checkpoint = CheckpointConfig(keep_best=name, best_mode=mode)
        assert list(retention_problems(checkpoint)) == []
        assert best_is_max(checkpoint) is (mode is BestMode.max)
