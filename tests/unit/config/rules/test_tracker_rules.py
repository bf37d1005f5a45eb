"""What a tracker's keys must not be."""

from __future__ import annotations

import pytest

from hpc_trainer.config.rules.validate import find_problems
from tests.unit.record.builders import make_config


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tracker=mlflow", "tracker.uri=https://me:secret@mlflow.example/x"), "MLFLOW_TRACKING_USERNAME"),
        (("tracker=tensorboard", "tracker.project=mine"), "tracker.project=mine is for tracker.name=wandb or mlflow"),
        (("tracker=mlflow", "tracker.entity=team"), "tracker.entity=team is for tracker.name=wandb"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], says: str) -> None:
    (problem,) = find_problems(make_config(*words))
    assert says in problem
    assert "secret" not in problem


@pytest.mark.parametrize(
    "words",
    [
        ("tracker=wandb", "tracker.project=mine", "tracker.entity=team"),
        ("tracker=mlflow", "tracker.uri=https://mlflow.example:5000/me@x"),
        ("tracker=mlflow", "tracker.uri=stores/mine"),
    ],
)
def test_what_is_taken(words: tuple[str, ...]) -> None:
    assert list(find_problems(make_config(*words))) == []
