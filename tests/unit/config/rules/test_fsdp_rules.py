"""Every rule of what FSDP2 gathers, reduces and keeps, broken once, word by word."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.resume_contract import compare
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.key import Effect
from hpc_trainer.config.schema.model import ResnetConfig
from hpc_trainer.config.schema.parallel import Dtype, FsdpDtype, Strategy
from tests.unit.record.builders import make_config

RANKS: dict[str, Any] = {"hardware__tasks_per_node": 2}
FSDP = {**RANKS, "parallel__strategy": Strategy.fsdp}
BF16 = {**FSDP, "parallel__param_dtype": FsdpDtype.bf16}
RULES: list[tuple[dict[str, Any], str]] = [
    (
        {**RANKS, "parallel__param_dtype": FsdpDtype.bf16, "precision__compute_dtype": Dtype.bf16},
        "parallel.param_dtype=bf16 needs parallel=fsdp, and this is parallel=ddp: it is a key of FSDP2. Use "
        "parallel=fsdp, hsdp or fsdp_tp, or parallel.param_dtype=fp32.",
    ),
    (
        {**RANKS, "parallel__reduce_dtype": FsdpDtype.bf16},
        "parallel.reduce_dtype=bf16 needs parallel=fsdp, and this is parallel=ddp: it is a key of FSDP2. Use "
        "parallel=fsdp, hsdp or fsdp_tp, or parallel.comm_hook=bf16, or parallel.reduce_dtype=fp32.",
    ),
    (
        {"parallel__strategy": Strategy.none, "parallel__reduce_dtype": FsdpDtype.bf16},
        "parallel.reduce_dtype=bf16 needs parallel=fsdp, and this is parallel=none: it is a key of FSDP2. Use "
        "parallel=fsdp, hsdp or fsdp_tp, or parallel.reduce_dtype=fp32.",
    ),
    (
        {**RANKS, "parallel__reshard_after_forward": False},
        "parallel.reshard_after_forward=false needs parallel=fsdp, and this is parallel=ddp: it is a key of FSDP2. "
        "Use parallel=fsdp, hsdp or fsdp_tp, or parallel.reshard_after_forward=true.",
    ),
    (
        {**FSDP, "parallel__reshard_after_forward": False, "train__main": "my.loop.main"},
        "parallel.reshard_after_forward=false does not go with train.main=my.loop.main: it is part of the shared loop, "
        "and your own loop calls fully_shard itself. Use train.main=null, or parallel.reshard_after_forward=true.",
    ),
    (
        BF16,
        "parallel.param_dtype=bf16 does not go with precision=fp32: blocks compute in that format. Use "
        "precision=bf16, or parallel.param_dtype=fp32.",
    ),
    (
        {**BF16, "precision__compute_dtype": Dtype.fp16},
        "parallel.param_dtype=bf16 does not go with precision=fp16: blocks compute in that format. Use "
        "precision=bf16, or parallel.param_dtype=fp16.",
    ),
    (
        {**FSDP, "parallel__param_dtype": FsdpDtype.fp16, "precision__compute_dtype": Dtype.bf16},
        "parallel.param_dtype=fp16 does not go with precision=bf16: blocks compute in that format. Use "
        "precision=fp16, or parallel.param_dtype=bf16.",
    ),
    (
        {**FSDP, "parallel__reduce_dtype": FsdpDtype.fp16, "precision__compute_dtype": Dtype.bf16},
        "parallel.reduce_dtype=fp16 does not go with precision=bf16: gradients below 6e-8 are lost and those above "
        "65504 overflow without fp16's loss scaler. Use precision=fp16, or parallel.reduce_dtype=bf16.",
    ),
    (
        {**BF16, "precision__compute_dtype": Dtype.bf16, "model": ResnetConfig(name="resnet18")},
        "parallel.param_dtype=bf16 does not go with model=resnet18: batch norm takes weights in the format of its "
        "running statistics, fp32. Use parallel.param_dtype=fp32.",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), RULES)
def test_rules(changes: dict[str, Any], expected: str) -> None:
    assert expected in list(find_problems(make_config(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {**BF16, "precision__compute_dtype": Dtype.bf16},
        {**BF16, "precision__compute_dtype": Dtype.bf16, "parallel__reduce_dtype": FsdpDtype.bf16},
        {**FSDP, "parallel__param_dtype": FsdpDtype.fp16, "precision__compute_dtype": Dtype.fp16,
         "parallel__reduce_dtype": FsdpDtype.fp16},
        {**FSDP, "parallel__reduce_dtype": FsdpDtype.bf16},
        {**FSDP, "parallel__reshard_after_forward": False},
        {**BF16, "precision__compute_dtype": Dtype.bf16, "hardware__tasks_per_node": 4,
         "parallel__data_parallel_replicate": 2},
    ],
)  # fmt: skip
def test_what_goes_together(changes: dict[str, Any]) -> None:
    assert list(find_problems(make_config(**changes))) == []


@pytest.mark.parametrize(
    ("key", "was", "now", "effect"),
    [
        ("parallel__param_dtype", FsdpDtype.fp32, FsdpDtype.bf16, Effect.schedule),
        ("parallel__reduce_dtype", FsdpDtype.fp32, FsdpDtype.bf16, Effect.schedule),
        ("parallel__reshard_after_forward", True, False, Effect.safe),
    ],
)
def test_a_checkpoint_goes_on_with_other_formats(key: str, was: Any, now: Any, effect: Effect) -> None:
    before, after = (to_plain(make_config(**FSDP, **{key: value})) for value in (was, now))
    assert [each.effect for each in compare(before, after)] == [effect]
