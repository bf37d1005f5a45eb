"""What optim=custom is refused for before anything is submitted, and that nothing is imported for it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.rules import step_rules as custom_optim
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.model import CustomModelConfig, MlpConfig, ModelConfig
from hpc_trainer.config.schema.optim import CustomOptimConfig
from tests.unit.record.builders import make_config


def _problems(target: str, model: ModelConfig | None = None, **values: Any) -> list[str]:
    optim = CustomOptimConfig(_target_=target, **values)
    return list(find_problems(make_config(optim=optim, model=model or MlpConfig(), trust=["my_lab"])))


@pytest.mark.parametrize(
    ("target", "values"),
    [
        ("torch.optim.RAdam", {"weight_decay": 0.1, "kwargs": {"eps": 1e-7, "betas": [0.8, 0.9]}}),
        ("torch.optim.adamw.AdamW", {"kwargs": {"amsgrad": True}}),
        ("torch.optim.Adafactor", {"weight_decay": 0.1, "kwargs": {"d": 2.0}}),
        ("torch.optim.Rprop", {}),
        ("my_lab.LBFGS", {"weight_decay": 0.1, "kwargs": {"any": 1}}),
    ],
)
def test_what_torch_takes_is_fine(target: str, values: dict[str, Any]) -> None:
    assert _problems(target, **values) == []


@pytest.mark.parametrize(
    ("target", "values", "message"),
    [
        (
            "my_lab.Optimizer",
            {"kwargs": {"weight_decay": 0.1}},
            "optim.kwargs.weight_decay=0.1 would have no effect: each group has its own. Use optim.weight_decay=0.1.",
        ),
        (
            "torch.optim.RAdam",
            {"kwargs": {"lr": 0.5}},
            "optim.kwargs.lr=0.5 would have no effect: each group has its own. Use optim.lr=0.5.",
        ),
        (
            "torch.optim.Rprop",
            {"weight_decay": 0.1},
            "optim.weight_decay=0.1: torch.optim.Rprop has no weight decay. Use optim.weight_decay=0.",
        ),
        (
            "torch.optim.Lion",
            {},
            "optim._target_=torch.optim.Lion: torch.optim has no optimizer Lion. Valid: ASGD, Ada",
        ),
        ("torch.optim.Adamw", {}, "torch.optim has no optimizer Adamw. Did you mean AdamW? Valid: ASGD, "),
        ("torch.optim.Optimizer", {}, "torch.optim has no optimizer Optimizer. "),
        (
            "torch.optim.RAdam",
            {"kwargs": {"epsilon": 1e-7}},
            "optim.kwargs.epsilon: torch.optim.RAdam has no such argument. Did you mean eps? Valid: betas, ",
        ),
        (
            "torch.optim.LBFGS",
            {},
            "optim._target_=torch.optim.LBFGS evaluates the loss several times a step, but the loop computes it once. "
            "Use optim=adamw.",
        ),
        (
            "torch.optim.sparse_adam.SparseAdam",
            {},
            "accepts only sparse gradients, but those of the loop are dense. Use torch.optim.Adam.",
        ),
        (
            "torch.optim.Muon",
            {},
            "optim._target_=torch.optim.Muon accepts only matrices, but model=mlp also has biases or norms. Use optim=",
        ),
    ],
)
def test_what_would_fail_in_the_first_step(target: str, values: dict[str, Any], message: str) -> None:
    (problem,) = _problems(target, **values)
    assert message in problem


def test_a_model_of_ones_own_may_have_matrices_alone() -> None:
    if importlib.util.find_spec("torch.optim._muon") is None:
        pytest.skip("torch has Muon from 2.9 on")
    assert _problems("torch.optim.Muon", CustomModelConfig(_target_="my_lab.Net")) == []


@pytest.fixture
def _unread() -> Any:
    custom_optim._classes.cache_clear()
    yield
    custom_optim._classes.cache_clear()


@pytest.mark.usefixtures("_unread")
def test_a_login_node_without_torch_leaves_it_to_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for spec in (None, ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))):
        custom_optim._classes.cache_clear()
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, found=spec: found)
        assert _problems("torch.optim.Lion", weight_decay=0.1, kwargs={"any": 1}) == []


def test_torch_is_not_imported() -> None:
    program = (
        "import sys; from hpc_trainer.config.rules.step_rules import _arguments, _classes; "
        "print('eps' in _arguments(_classes()['RAdam'], 'RAdam'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"]
