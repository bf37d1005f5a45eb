"""The learning rate follows the batch by the rule that was chosen, and by none if none was."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.schema.optim import LrScaling, lr_factor, peak_lr, scaling_line
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.known import Known
from hpc_trainer.launch.plan import build_plan
from tests.unit.record.builders import make_config


@pytest.mark.parametrize(
    ("rule", "base", "batch", "factor"),
    [("none", None, 512, 1.0), ("linear", 256, 8192, 32.0), ("linear", 256, 64, 0.25), ("sqrt", 256, 4096, 4.0),
     ("sqrt", 256, 256, 1.0)],
)  # fmt: skip
def test_the_factor(rule: str, base: int | None, batch: int, factor: float) -> None:
    assert lr_factor(LrScaling(rule), base, batch) == factor


def test_goyals_imagenet() -> None:
    """0.1 for 256 images is 3.2 for 8,192 (arXiv:1706.02677, section 5.1)."""
    config = make_config(
        "optim=sgd", "data=synthetic_images", optim__lr=0.1, optim__lr_scaling=LrScaling.linear,
        optim__lr_base_batch=256, train__global_batch_size=8192,
    )  # fmt: skip
    assert peak_lr(config.optim, config.train.global_batch_size) == pytest.approx(3.2)
    line = scaling_line(to_plain(config))
    assert line is not None
    assert line.startswith("learning rate 3.2: optim.lr=0.1 is for 256 samples, and train.global_batch_size=8192")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim__lr_scaling": LrScaling.sqrt},
            "optim.lr_scaling=sqrt needs optim.lr_base_batch, and this is optim.lr_base_batch=null: it is the batch "
            "size for which optim.lr was chosen. Use optim.lr_base_batch=64, or "),
        ({"optim__lr_base_batch": 32}, "optim.lr_base_batch=32 is for optim.lr_scaling=linear or sqrt, and has"),
        ({"optim__lr_scaling": LrScaling.sqrt, "optim__lr_base_batch": 0}, "optim.lr_base_batch=0 must be at least 1"),
    ],
)  # fmt: skip
def test_a_rule_and_its_batch_belong_together(changes: dict[str, Any], message: str) -> None:
    assert message in "\n".join(find_problems(make_config("cluster=local", **changes)))


def test_a_rule_is_another_run_and_specs_of_before_have_none() -> None:
    plain = []
    for changes in ({}, {"optim__lr_scaling": LrScaling.linear, "optim__lr_base_batch": 32}):
        config = make_config("cluster=local", **changes)
        validate(config)
        plain.append(to_plain(config))
    assert config_digest(plain[0]) != config_digest(plain[1])
    older = {**plain[0], "optim": {key: value for key, value in plain[0]["optim"].items() if "lr_" not in key}}
    assert config_digest(older) == config_digest(plain[0])
    assert scaling_line(older) is None


@pytest.mark.usefixtures("no_slurm")
def test_the_plan_shows_what_comes_of_it() -> None:
    words = ["optim.lr=0.01", "optim.lr_base_batch=32", "train.global_batch_size=32,128", "optim.lr_scaling=linear"]
    plan = build_plan(freeze_grid([*words, "cluster=local"]), Known())
    assert [note.split(":")[0] for note in plan.notes] == ["learning rate 0.01", "learning rate 0.04"]
