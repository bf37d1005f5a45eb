"""What is said of a task before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.config.rules.data_rules import task_problems
from hpc_trainer.config.schema.data import CustomDataConfig
from hpc_trainer.config.schema.task import CustomTaskConfig, MultiLabelConfig, RegressionConfig, TaskConfig
from tests.unit.record.builders import make_config


def _problems(task: TaskConfig, *overrides: str) -> list[str]:
    config = make_config(*overrides)
    config.task, config.data = task, CustomDataConfig(_target_="lab.build")
    return list(task_problems(config))


@pytest.mark.parametrize("task", [RegressionConfig(), MultiLabelConfig()])
def test_numbers_need_data_of_their_own(task: TaskConfig) -> None:
    assert _problems(task) == []
    config = make_config()
    config.task = task
    (problem,) = task_problems(config)
    assert problem == (
        f"task={task.name} needs data with other targets: those of data=digits are classes. Use data=custom or "
        "arrays, or task=classification."
    )
    config.train.main = "lab.main"
    assert list(task_problems(config)) == []


@pytest.mark.parametrize("task", [RegressionConfig(), MultiLabelConfig(), CustomTaskConfig(_target_="lab.Fit")])
def test_labels_of_classes_alone_are_smoothed(task: TaskConfig) -> None:
    (problem,) = _problems(task, "train.label_smoothing=0.1")
    assert problem.startswith("train.label_smoothing=0.1 applies to cross entropy over classes")
    assert _problems(TaskConfig(), "train.label_smoothing=0.1") == []


LOSS = "def loss(self, model, batch):"
WRONG = {
    "nothing": (f"{LOSS}\n        model(batch).mean()", "returns nothing. Give it loss(self, model, batch)"),
    "none": (f"{LOSS}\n        return None", "returns nothing."),
    "bare": (f"{LOSS}\n        if batch:\n            return", "returns nothing."),
    "inner": (f"{LOSS}\n        def inner():\n            return model(batch)\n        inner()", "returns nothing."),
    "yield": (f"{LOSS}\n        yield model(batch)", "is a generator"),
    "item": (f"{LOSS}\n        return model(batch).mean().item()", "returns 'model(batch).mean().item()', cut off"),
    "few": ("def loss(self, batch):\n        return batch.mean()", "cannot be called as loss(model, batch)"),
    "many": ("def loss(self, model, batch, w):\n        return w", "cannot be called as loss(model, batch)"),
    "keyword": ("def loss(self, model, batch, *, w):\n        return w", "cannot be called as loss(model, batch)"),
    "none at all": ("def lose(self, model, batch):\n        return 1", "has no method loss. Give it loss("),
}
RIGHT = {
    "plain": f"{LOSS}\n        return model(batch).mean()",
    "metrics": f"{LOSS}\n        return model(batch).mean(), {{}}",
    "defaults": "def loss(self, model, batch, w=1, *more):\n        return w",
    "any": "def loss(self, *words):\n        return words",
    "raises": f"{LOSS}\n        raise NotImplementedError",
    "assigned": "loss = print",
    "made": "def __init__(self):\n        self.loss = print",
}


def _write(folder: Path, body: str, head: str = "class Fit:") -> None:
    (folder / "lab").mkdir()
    (folder / "lab" / "tasks.py").write_text(f"import no_such_package\n\n{head}\n    {body}\n")


@pytest.mark.parametrize(("body", "words"), WRONG.values(), ids=WRONG)
def test_a_file_tells_what_is_wrong_with_a_loss(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is imported."""
    _write(tmp_path, body)
    monkeypatch.chdir(tmp_path)
    (problem,) = _problems(CustomTaskConfig(_target_="lab.tasks.Fit"))
    assert problem.startswith("task._target_=lab.tasks.Fit: ")
    assert words in problem


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_what_may_be_right_is_left_to_the_worker(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, body)
    monkeypatch.chdir(tmp_path)
    assert _problems(CustomTaskConfig(_target_="lab.tasks.Fit")) == []


@pytest.mark.parametrize("head", ["class Fit(Base):", "@made\nclass Fit:", "class Other:"])
def test_a_class_that_may_have_its_loss_from_elsewhere_too(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "pass", head)
    monkeypatch.chdir(tmp_path)
    assert _problems(CustomTaskConfig(_target_="lab.tasks.Fit")) == []
    assert _problems(CustomTaskConfig(_target_="elsewhere.Fit")) == []


def test_a_file_that_is_no_python_is_left_to_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, ":::")
    monkeypatch.chdir(tmp_path)
    assert _problems(CustomTaskConfig(_target_="lab.tasks.Fit")) == []
