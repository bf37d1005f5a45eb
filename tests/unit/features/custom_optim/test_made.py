"""optim=custom: what the class itself has against it is told in a sentence, before the first step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.optim import CustomOptimConfig
from hpc_trainer.errors import ConfigError
from tests.unit.training.built_parts import optimizer_of


class Undecaying(torch.optim.Optimizer):
    """Takes groups as they come."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})


@pytest.mark.parametrize(
    ("target", "values", "message"),
    [
        (
            "torch.optim.RAdam",
            {"kwargs": {"epsilon": 1}},
            "optim._target_=torch.optim.RAdam optim.kwargs={'epsilon': 1}: RAdam.__init__() got an unexpected keyword "
            "argument 'epsilon'. It is built as Class(groups, lr=optim.lr, **optim.kwargs): give it arguments that "
            "it takes.",
        ),
        (
            "torch.optim.Lion",
            {},
            "optim._target_=torch.optim.Lion was not found: module 'torch.optim' has no attribute 'Lion'. Looked in: "
            f"{torch.optim.__file__}.",
        ),
        (
            "torch.optim.lbfgs.LBFGS",
            {},
            "optim._target_=torch.optim.lbfgs.LBFGS needs a closure in each step, to compute the loss again, "
            "and the loop computes it once. Use optim=adamw.",
        ),
        (
            "torch.optim.Rprop",
            {"weight_decay": 0.1},
            "optim.weight_decay=0.1: torch.optim.Rprop has no weight_decay among its defaults: nothing would decay. "
            "Use optim.weight_decay=0.",
        ),
        (
            f"{__name__}.Undecaying",
            {"weight_decay": 0.1},
            f"optim.weight_decay=0.1: {__name__}.Undecaying has no weight_decay among its defaults: nothing would "
            "decay. Use optim.weight_decay=0.",
        ),
        (
            "builtins.dict",
            {},
            "optim._target_=builtins.dict makes a dict, which is not a torch.optim.Optimizer. Name a class that is.",
        ),
    ],
)
def test_it_is_refused_in_a_sentence(target: str, values: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2, bias=False)  # one group: with two LBFGS says something else
    trust = [target.rpartition(".")[0]]
    with pytest.raises(ConfigError, match=rf"\A{re.escape(message)}\Z"):
        optimizer_of(CustomOptimConfig(_target_=target, **values), model, trust=trust)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_bare_muon_is_for_models_of_matrices() -> None:
    config = CustomOptimConfig(_target_="torch.optim.Muon", weight_decay=0.1)
    assert isinstance(optimizer_of(config, nn.Linear(2, 2, bias=False)), torch.optim.Muon)
    with pytest.raises(
        ConfigError, match=r"only supports 2D parameters .*\. Use optim=muon, which updates all weights"
    ):
        optimizer_of(config, nn.Linear(2, 2))


def test_what_has_no_weight_decay_may_be_without() -> None:
    assert isinstance(optimizer_of(CustomOptimConfig(_target_="torch.optim.Rprop"), nn.Linear(2, 2)), torch.optim.Rprop)


def test_any_class_is_an_optimizer() -> None:
    model = nn.Linear(2, 2)
    config = CustomOptimConfig(_target_="torch.optim.RAdam", lr=0.5, weight_decay=0.3, kwargs={"eps": 1e-5})
    optimizer = optimizer_of(config, model)
    assert isinstance(optimizer, torch.optim.RAdam)
    assert [(group["lr"], group["eps"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.5, 1e-5, 0.3),
        (0.5, 1e-5, 0.0),
    ]
    with pytest.raises(ConfigError, match="unexpected keyword argument 'epsilon'"):
        optimizer_of(CustomOptimConfig(_target_="torch.optim.RAdam", kwargs={"epsilon": 1}), model)
    with pytest.raises(ConfigError, match="not on the allow-list"):
        optimizer_of(CustomOptimConfig(_target_="shutil.rmtree"), model)
