"""Every rule of what ranks send each other and where the optimizer works, broken once, word by word."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.resume_contract import compare
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.key import Effect
from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.config.schema.optim import AdamwConfig, CustomOptimConfig, MuonConfig
from hpc_trainer.config.schema.parallel import Dtype, Strategy
from hpc_trainer.data.text import TextBytesConfig
from hpc_trainer.features.gradient_compression import CommHook
from hpc_trainer.features.local_sgd import Sync
from hpc_trainer.features.spike_guard import OnSpike
from tests.unit.record.builders import make_config

RANKS: dict[str, Any] = {"hardware__tasks_per_node": 2}
POWERSGD = {**RANKS, "parallel__comm_hook": CommHook.powersgd}
ROUNDS = {**RANKS, "parallel__sync": Sync.diloco}
IN_BACKWARD: dict[str, Any] = {
    "optim__in_backward": True, "train__max_grad_norm": None, "train__max_skipped_steps": None,
}  # fmt: skip
RULES: list[tuple[dict[str, Any], str]] = [
    ({"parallel__bucket_cap_mb": 0.0}, "parallel.bucket_cap_mb=0 must be greater than 0 and finite. Use null."),
    (
        {**RANKS, "parallel__bucket_cap_mb": 4.0, "parallel__strategy": Strategy.fsdp},
        "parallel.bucket_cap_mb=4 needs parallel=ddp, and this is parallel=fsdp: it is the size of DDP's messages. "
        "Use parallel=ddp, or parallel.bucket_cap_mb=null.",
    ),
    ({**POWERSGD, "parallel__powersgd_rank": 0}, "parallel.powersgd_rank=0 must be at least 1. Use 1."),
    ({**POWERSGD, "parallel__powersgd_start_step": 1}, "parallel.powersgd_start_step=1 must be at least 2. Use 2."),
    ({**ROUNDS, "parallel__sync_every_steps": 0}, "parallel.sync_every_steps=0 must be at least 1. Use 1."),
    ({**ROUNDS, "parallel__sync_warmup_steps": -1}, "parallel.sync_warmup_steps=-1 must be at least 0. Use 0."),
    ({**ROUNDS, "parallel__outer_lr": 0.0}, "parallel.outer_lr=0 must be greater than 0 and finite. Use 0.7."),
    ({**ROUNDS, "parallel__outer_momentum": 1.0}, "parallel.outer_momentum=1 must be in [0, 1). Use less than 1."),
    (
        {"parallel__comm_hook": CommHook.bf16},
        "parallel.comm_hook=bf16 does not go with world_size=1 (hardware=cpu_x1): one rank sends nothing. Use "
        "hardware with more ranks, or parallel.comm_hook=none.",
    ),
    (
        {**RANKS, "parallel__comm_hook": CommHook.bf16, "parallel__strategy": Strategy.fsdp},
        "parallel.comm_hook=bf16 needs parallel=ddp, and this is parallel=fsdp: it changes what DDP sends. Use "
        "parallel=ddp, or parallel.comm_hook=none.",
    ),
    (
        {**RANKS, "parallel__comm_hook": CommHook.bf16, "train__logical_ranks": 2},
        "parallel.comm_hook=bf16 does not go with train.logical_ranks=2: logical ranks have a sum of their own. Use "
        "train.logical_ranks=null, or parallel.comm_hook=none.",
    ),
    (
        {**RANKS, "parallel__comm_hook": CommHook.fp16, "train__max_skipped_steps": None},
        "parallel.comm_hook=fp16 does not go with train.max_skipped_steps=null precision=fp32: a gradient above 65504 "
        "is sent as infinity, and nothing checks for it. Use train.max_skipped_steps=10, or parallel.comm_hook=bf16.",
    ),
    (
        {**POWERSGD, "precision__compute_dtype": Dtype.fp16},
        "parallel.comm_hook=powersgd does not go with precision=fp16: it keeps the part that it did not send in units "
        "of the loss scale, which changes. Use precision=bf16, or parallel.comm_hook=fp16.",
    ),
    (
        {**POWERSGD, "train__deterministic": False},
        "parallel.comm_hook=powersgd does not go with train.deterministic=false: it keeps the part that it did not "
        "send for each bucket, and each start would make other buckets. Use train.deterministic=true, or "
        "parallel.comm_hook=bf16.",
    ),
    (
        {**POWERSGD, "parallel__elastic": True},
        "parallel.comm_hook=powersgd does not go with parallel.elastic=true: it has a state for each rank, so their "
        "number cannot change. Use parallel.elastic=false, or parallel.comm_hook=bf16.",
    ),
    (
        {"parallel__sync": Sync.diloco},
        "parallel.sync=diloco does not go with world_size=1 (hardware=cpu_x1): one rank has no other "
        "ranks to synchronise with. Use hardware "
        "with more ranks, or parallel.sync=every_step.",
    ),
    (
        {**ROUNDS, "parallel__zero1": True},
        "parallel.sync=diloco does not go with parallel.zero1=true: each rank has an optimizer, and ZeRO-1 shares "
        "one out. Use parallel.zero1=false, or parallel.sync=every_step.",
    ),
    (
        {**ROUNDS, "parallel__comm_hook": CommHook.bf16},
        "parallel.sync=diloco does not go with parallel.comm_hook=bf16: ranks send no gradients, and the hook changes "
        "how gradients are sent. Use parallel.comm_hook=none, or parallel.sync=every_step.",
    ),
    (
        {**ROUNDS, "parallel__elastic": True},
        "parallel.sync=diloco does not go with parallel.elastic=true: each rank has weights and moments, so their "
        "number cannot change. Use parallel.elastic=false, or parallel.sync=every_step.",
    ),
    (
        {**ROUNDS, "train__ema_decay": 0.9},
        "train.ema_decay=0.9 does not go with parallel.sync=diloco: both average weights. Use "
        "parallel.sync=every_step, or train.ema_decay=null.",
    ),
    (
        {**ROUNDS, "parallel__sync_every_steps": 500, "train__num_steps": 200},
        "parallel.sync_every_steps=500 must be at most train.num_steps=200: ranks would synchronise only "
        "at the end. Use 200.",
    ),
    (
        {**ROUNDS, "train__eval_every_steps": 50},
        "train.eval_every_steps=50 must be a multiple of parallel.sync_every_steps=16 with "
        "parallel.sync=diloco: only at these steps do "
        "all ranks have the same weights. Use 48.",
    ),
    (
        {**ROUNDS, "parallel__sync_warmup_steps": 5},
        "parallel.sync_warmup_steps=5 must be a multiple of parallel.sync_every_steps=16 with parallel.sync=diloco: "
        "rounds begin at these steps. Use 16.",
    ),
    (
        {**IN_BACKWARD, **RANKS},
        "optim.in_backward=true does not go with parallel=ddp world_size=2 (hardware=cpu_x1): it saves the memory of "
        "the gradients, and DDP's buckets hold them all. Use parallel=fsdp, or optim.in_backward=false.",
    ),
    (
        {**IN_BACKWARD, "train__max_grad_norm": 1.0},
        "optim.in_backward=true does not go with train.max_grad_norm=1: a weight is updated before the norm of all "
        "gradients is known. Use train.max_grad_norm=null, or optim.in_backward=false.",
    ),
    (
        {**IN_BACKWARD, "train__max_skipped_steps": 10},
        "optim.in_backward=true does not go with train.max_skipped_steps=10: a weight is updated before the norm of "
        "all gradients is known. Use train.max_skipped_steps=null, or optim.in_backward=false.",
    ),
    (
        {**IN_BACKWARD, "precision__compute_dtype": Dtype.fp16},
        "optim.in_backward=true does not go with precision=fp16: a weight is updated before an overflow in another "
        "gradient is known. Use precision=bf16, or optim.in_backward=false.",
    ),
    (
        {**IN_BACKWARD, "train__grad_accum_steps": 2},
        "optim.in_backward=true applies each gradient at once, but train.grad_accum_steps=2 adds up several. Use "
        "train.grad_accum_steps=1 train.micro_batch_size=null, or optim.in_backward=false.",
    ),
    (
        {
            **IN_BACKWARD,
            **RANKS,
            "parallel__strategy": Strategy.fsdp,
            "train__batch_per_rank": True,
            "train__global_batch_size": 32,
            "train__micro_batch_size": 16,
        },
        "optim.in_backward=true applies each gradient at once, but train.grad_accum_steps=2 adds up several. Use "
        "train.grad_accum_steps=1 train.micro_batch_size=null, or optim.in_backward=false.",
    ),
    (
        {**IN_BACKWARD, "train__micro_batch_size": 16},
        "optim.in_backward=true applies each gradient at once, but train.grad_accum_steps=4 adds up several. Use "
        "train.grad_accum_steps=1 train.micro_batch_size=null, or optim.in_backward=false.",
    ),
    (
        {**IN_BACKWARD, "train__compile": True},
        "train.compile=true does not go with optim.in_backward=true: the compiled pass makes all gradients at once. "
        "Use optim.in_backward=false, or train.compile=false.",
    ),
    (
        {**IN_BACKWARD, "train__logical_ranks": 2},
        "optim.in_backward=true does not go with train.logical_ranks=2: gradients are added up there. Use "
        "train.logical_ranks=null, or optim.in_backward=false.",
    ),
    (
        {**IN_BACKWARD, "optim__offload": True},
        "optim.in_backward=true does not go with optim.offload=true: the combination is untested. Use "
        "optim.offload=false, "
        "or optim.in_backward=false.",
    ),
    (
        {"optim": CustomOptimConfig(_target_="torch.optim.RAdam", offload=True)},
        "optim.offload=true needs optim=sgd or adamw or lion, and this is optim=custom: weights are "
        "updated in pieces, and "
        "other optimizers may need them whole. Use optim=adamw, or optim.offload=false.",
    ),
    (
        {"optim": MuonConfig(offload=True), "model": GptConfig(), "data": TextBytesConfig()},
        "optim.offload=true needs optim=sgd or adamw or lion, and this is optim=muon: weights are "
        "updated in pieces, and "
        "other optimizers may need them whole. Use optim=adamw, or optim.offload=false.",
    ),
    (
        {"optim__offload": True, "train__guard__on_spike": OnSpike.skip},
        "train.guard.on_spike=skip does not go with optim.offload=true: the combination is untested. Use "
        "optim.offload=false, or train.guard.on_spike=none.",
    ),
    (
        {"optim__offload": True, "train__main": "mine.main", "trust": ["mine"]},
        "optim.offload=true does not go with train.main=mine.main: it is part of the "
        "shared loop, which train.main replaces. Use train.main=null, or optim.offload=false.",
    ),
    (
        {**ROUNDS, "train__main": "mine.main", "trust": ["mine"]},
        "parallel.sync=diloco does not go with train.main=mine.main: it is part of the "
        "shared loop, which train.main replaces. Use train.main=null, or parallel.sync=every_step.",
    ),
]


@pytest.mark.parametrize(("changes", "message"), RULES, ids=[message[:60] for _, message in RULES])
def test_each_rule_says_what_how_and_what_else(changes: dict[str, Any], message: str) -> None:
    assert list(find_problems(make_config(**changes))) == [message]


@pytest.mark.parametrize(
    "changes",
    [
        {**RANKS, "parallel__comm_hook": CommHook.fp16, "precision__compute_dtype": Dtype.fp16},
        {**RANKS, "parallel__comm_hook": CommHook.bf16, "parallel__zero1": True, "train__grad_accum_steps": 2},
        POWERSGD,
        ROUNDS,
        {**ROUNDS, "parallel__sync_warmup_steps": 32, "train__eval_every_steps": 48, "optim__offload": True},
        {**ROUNDS, "precision__compute_dtype": Dtype.fp16, "train__grad_accum_steps": 4},
        {**RANKS, "parallel__bucket_cap_mb": 0.5},
        IN_BACKWARD,
        {**IN_BACKWARD, **RANKS, "parallel__strategy": Strategy.fsdp},
        {**RANKS, "optim__offload": True},
        {**RANKS, "optim__offload": True, "parallel__zero1": True, "precision__compute_dtype": Dtype.fp16},
        {**RANKS, "optim__offload": True, "parallel__strategy": Strategy.fsdp},
        {
            **RANKS,
            "optim__offload": True,
            "parallel__tensor_parallel": 2,
            "model": GptConfig(),
            "data": TextBytesConfig(),
        },
        {
            **RANKS,
            "optim__offload": True,
            "parallel__pipeline_parallel": 2,
            "train__grad_accum_steps": 2,
            "model": GptConfig(),
            "data": TextBytesConfig(),
        },
        {"optim": AdamwConfig(offload=True)},
    ],
)
def test_what_goes_together(changes: dict[str, Any]) -> None:
    assert list(find_problems(make_config(**changes))) == []


@pytest.mark.parametrize(
    ("choices", "key", "was", "now", "effect"),
    [
        ({}, "parallel__comm_hook", CommHook.none, CommHook.bf16, Effect.schedule),
        ({}, "parallel__comm_hook", CommHook.bf16, CommHook.powersgd, Effect.incompatible),
        ({}, "parallel__bucket_cap_mb", None, 4.0, Effect.schedule),
        (POWERSGD, "parallel__bucket_cap_mb", None, 4.0, Effect.incompatible),
        (POWERSGD, "parallel__powersgd_rank", 1, 2, Effect.incompatible),
        ({}, "parallel__sync", Sync.every_step, Sync.diloco, Effect.incompatible),
        (ROUNDS, "parallel__sync_every_steps", 16, 8, Effect.schedule),
        (ROUNDS, "optim__offload", False, True, Effect.schedule),
    ],
)
def test_the_contract_knows_what_ranks_keep_for_themselves(
    choices: dict[str, Any], key: str, was: Any, now: Any, effect: Effect
) -> None:
    before, after = (to_plain(make_config(**{**choices, key: value})) for value in (was, now))
    assert [each.effect for each in compare(before, after)] == [effect]


@pytest.mark.parametrize(
    ("choices", "effect"), [({}, Effect.schedule), (POWERSGD, Effect.incompatible), (ROUNDS, Effect.incompatible)]
)
def test_another_number_of_ranks_is_refused_where_each_has_a_state(choices: dict[str, Any], effect: Effect) -> None:
    plain = to_plain(make_config(**choices))
    assert [each.effect for each in compare({**plain, "world_size": 2}, {**plain, "world_size": 4})] == [effect]


def test_more_steps_are_another_course_where_the_last_one_ends_a_round() -> None:
    was, now = (to_plain(make_config("schedule=constant", **ROUNDS, train__num_steps=steps)) for steps in (32, 40))
    assert [each.effect for each in compare(was, now)] == [Effect.schedule]


def test_rounds_that_are_too_long_and_what_is_a_multiple_of_them_are_answered_by_one_number() -> None:
    """With what is advised nothing is left to say."""
    changes: dict[str, Any] = {**ROUNDS, "train__num_steps": 300}
    problems = find_problems(
        make_config(**changes, parallel__sync_every_steps=500, train__eval_every_steps=7, parallel__sync_warmup_steps=7)
    )
    assert list(problems) == [
        "parallel.sync_every_steps=500 must be at most train.num_steps=300: ranks would synchronise only "
        "at the end. Use 300.",
        *(
            f"{key}=7 must be a multiple of parallel.sync_every_steps=300, the most that train.num_steps allows, with "
            f"parallel.sync=diloco: {why}. Use 300."
            for key, why in (
                ("parallel.sync_warmup_steps", "rounds begin at these steps"),
                ("train.eval_every_steps", "only at these steps do all ranks have the same weights"),
            )
        ),
    ]
    advised = {f"{key}_steps": 300 for key in ("parallel__sync_every", "train__eval_every", "parallel__sync_warmup")}
    assert list(find_problems(make_config(**changes, **advised))) == []
