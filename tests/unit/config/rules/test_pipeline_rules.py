"""What parallel.pipeline_parallel goes with: key, rule, value and the nearest legal choice."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.load import from_plain, to_plain
from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.schema.model import CnnConfig, CustomModelConfig, GptConfig, MlpConfig, ResnetConfig
from hpc_trainer.config.schema.optim import MuonConfig
from hpc_trainer.config.schema.parallel import Dtype, Strategy
from hpc_trainer.config.schema.train import CompileScope, Recompute
from hpc_trainer.data.text import TextBytesConfig
from hpc_trainer.features.gradient_compression import CommHook
from hpc_trainer.features.local_sgd import Sync
from hpc_trainer.features.pipeline import PipelineSchedule
from hpc_trainer.features.spike_guard import OnDivergence, OnSpike
from tests.unit.record.builders import make_config

# Two stages of two data-parallel ranks, eight micro-batches a step.
LEGAL: dict[str, Any] = {
    "model": ResnetConfig(),
    "parallel__pipeline_parallel": 2,
    "hardware__tasks_per_node": 4,
    "train__global_batch_size": 64,
    "train__grad_accum_steps": 8,
}

# Each of them two tensor-parallel ranks.
THREE: dict[str, Any] = {
    "model": GptConfig(num_layers=4, num_heads=4, embed_dim=32),
    "data": TextBytesConfig(),
    "parallel__tensor_parallel": 2,
    "hardware__tasks_per_node": 8,
}


def _problems(**changes: Any) -> list[str]:
    return list(find_problems(make_config(**{**LEGAL, **changes})))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel__pipeline_parallel": 4},
        {"parallel__strategy": Strategy.fsdp},
        {"train__grad_accum_steps": None, "train__micro_batch_size": 16},
        THREE,
        {**THREE, "parallel__strategy": Strategy.fsdp},
        {**THREE, "train__ema_decay": 0.9},
        {**THREE, "parallel__strategy": Strategy.fsdp, "train__ema_decay": 0.9},
        {"parallel__strategy": Strategy.fsdp, "train__ema_decay": 0.9},
        {**THREE, "parallel__strategy": Strategy.fsdp, "optim": MuonConfig()},
        {"train__grad_accum_steps": 1, "parallel__pipeline_schedule": PipelineSchedule["gpipe"]},
        {"train__compile": True, "train__compile_scope": CompileScope.blocks, "train__recompute": Recompute.full},
        {"train__ema_decay": 0.9, "train__channels_last": True, "model": ResnetConfig(width=8)},
        {"hardware__tasks_per_node": 8, "parallel__pipeline_parallel": 8},
    ],
)
def test_what_goes_together(changes: dict[str, Any]) -> None:
    assert _problems(**changes) == []


RULES: list[tuple[dict[str, Any], str]] = [
    (
        {"model": MlpConfig()},
        "parallel.pipeline_parallel=2 does not go with model=mlp: it cuts a model between its blocks, and the model "
        "has none. Use another model, or one of your own with pipeline_parts (hpc_trainer/models/parts.py), or "
        "parallel.pipeline_parallel=1.",
    ),
    (
        {"model": CnnConfig()},
        "parallel.pipeline_parallel=2 does not go with model=cnn: it cuts a model between its blocks, and the model "
        "has none. Use another model, or one of your own with pipeline_parts (hpc_trainer/models/parts.py), or "
        "parallel.pipeline_parallel=1.",
    ),
    (
        {"hardware__tasks_per_node": 16, "parallel__pipeline_parallel": 16, "train__grad_accum_steps": 16},
        "parallel.pipeline_parallel=16 must be at most the 8 blocks of model=resnet18. Use 8.",
    ),
    (
        {"train__grad_accum_steps": 1},
        "train.grad_accum_steps=1 must be at least parallel.pipeline_parallel=2 with parallel.pipeline_schedule=1f1b: "
        "the micro-batches of a step fill the stages. Use train.micro_batch_size=16 train.grad_accum_steps=2, or "
        "train.global_batch_size=128 train.grad_accum_steps=2.",
    ),
    ({"train__grad_accum_steps": 0}, "train.grad_accum_steps=0 must be at least 1. Use 1."),
    (
        {"train__grad_accum_steps": None},
        "train.grad_accum_steps=1 must be at least parallel.pipeline_parallel=2 with parallel.pipeline_schedule=1f1b",
    ),
    (
        {"train__global_batch_size": 2, "train__grad_accum_steps": None},
        "the stages. Use train.global_batch_size=4 train.grad_accum_steps=2.",
    ),
    (
        {"parallel__tensor_parallel": 2},
        "parallel.tensor_parallel=2 does not go with model=resnet18: it shares layers out by the model's plan, and "
        "the model has none. Use model=gpt or vit_tiny, or a model of your own with a `tensor_parallel_plan`, or "
        "parallel.tensor_parallel=1.",
    ),
    (
        {**THREE, "train__compile": True, "train__compile_scope": CompileScope.blocks},
        "parallel.pipeline_parallel=2 does not go with train.compile=true parallel.tensor_parallel=2: "
        "compiled stages with "
        "sharded layers are untested. Use train.compile=false, or "
        "parallel.pipeline_parallel=1.",
    ),
    (
        {"train__compile": True, "train__compile_scope": CompileScope.blocks, "parallel__strategy": Strategy.fsdp},
        "parallel.pipeline_parallel=2 does not go with train.compile=true parallel=fsdp: compiled stages with "
        "sharded weights are untested. Use train.compile=false, or parallel.pipeline_parallel=1.",
    ),
    (
        {**THREE, "train__grad_accum_steps": 1},
        "train.grad_accum_steps=1 must be at least parallel.pipeline_parallel=2 with parallel.pipeline_schedule=1f1b",
    ),
    (
        {**THREE, "hardware__tasks_per_node": 4, "parallel__strategy": Strategy.fsdp},
        "parallel=fsdp shares weights out among two data-parallel ranks or more, and hardware=cpu_x1 has 4, all taken "
        "by parallel.tensor_parallel=2 × parallel.pipeline_parallel=2.",
    ),
    (
        {"parallel__strategy": Strategy.fsdp, "parallel__data_parallel_replicate": 2, "hardware__tasks_per_node": 8},
        "parallel.pipeline_parallel=2 does not go with parallel.data_parallel_replicate=2: stages and the groups of "
        "HSDP have no common mesh yet. Use parallel.data_parallel_replicate=1, or parallel.pipeline_parallel=1.",
    ),
    (
        {"train__compile": True},
        "parallel.pipeline_parallel=2 does not go with train.compile=true train.compile_scope=model: a stage gets its "
        "inputs from another rank, and only the last stage has a loss. Use train.compile_scope=blocks, or "
        "train.compile=false, or parallel.pipeline_parallel=1.",
    ),
    (
        {"train__micro_batch_size": "auto", "train__grad_accum_steps": None},
        "parallel.pipeline_parallel=2 does not go with train.micro_batch_size=auto: it needs to know its "
        "micro-batches, and auto finds them by trials of the whole model. Use train.grad_accum_steps=4 "
        "train.micro_batch_size=null, or parallel.pipeline_parallel=1.",
    ),
    (
        {"train__loss_chunk_size": 64, "model": GptConfig()},
        "train.loss_chunk_size=64 does not go with parallel.pipeline_parallel=2: the combination is untested. Use "
        "parallel.pipeline_parallel=1, or train.loss_chunk_size=null.",
    ),
    (
        {"precision__compute_dtype": Dtype.fp8},
        "precision=fp8 does not go with parallel.pipeline_parallel=2: the combination is untested.",
    ),
    (
        {"train__grad_accum_steps": 1, "train__global_batch_size": 16, "train__batch_per_rank": True},
        "Use train.micro_batch_size=8 train.grad_accum_steps=2, or train.global_batch_size=32 train.grad_accum_steps=2",
    ),
    (
        {"parallel__zero1": True},
        "parallel.zero1=true does not go with parallel.pipeline_parallel=2: it shares out "
        "the weights of a whole model. Use parallel=fsdp, or parallel.zero1=false.",
    ),
    (
        {"train__logical_ranks": 4},
        "train.logical_ranks=4 does not go with parallel.pipeline_parallel=2: it needs the "
        "whole model on each rank. Use parallel.pipeline_parallel=1, or "
        "train.logical_ranks=null.",
    ),
    (
        {"train__main": "mine.main"},
        "parallel.pipeline_parallel=2 does not go with train.main=mine.main: it is part of the "
        "shared loop, which train.main replaces. Use train.main=null, or "
        "parallel.pipeline_parallel=1.",
    ),
    ({"hardware__tasks_per_node": 3}, "parallel.pipeline_parallel=2 must divide world_size=3 (hardware=cpu_x1)."),
]


@pytest.mark.parametrize(("changes", "expected"), RULES, ids=[next(iter(changes)) for changes, _ in RULES])
def test_each_rule_names_key_value_and_a_legal_choice(changes: dict[str, Any], expected: str) -> None:
    assert any(expected in problem for problem in _problems(**changes)), _problems(**changes)


@pytest.mark.parametrize("words", ["train.micro_batch_size=16 train.grad_accum_steps=2"])
def test_the_way_that_is_named_is_legal(words: str) -> None:
    changes = {key.replace(".", "__"): int(value) for key, _, value in (word.partition("=") for word in words.split())}
    config = make_config(**{**LEGAL, **changes})
    validate(config)
    assert config.train.grad_accum_steps == 2


def test_gpt_may_have_as_many_stages_as_layers() -> None:
    many = {"hardware__tasks_per_node": 4, "parallel__pipeline_parallel": 4, "train__grad_accum_steps": 4}
    problems = _problems(**many, model=GptConfig(num_layers=3))
    assert "parallel.pipeline_parallel=4 must be at most the 3 blocks of model=gpt. Use 3." in problems
    assert not any("blocks" in each for each in _problems(**many, model=GptConfig(num_layers=4)))


def test_of_a_model_of_ones_own_its_code_decides() -> None:
    own = CustomModelConfig(_target_="mine.Tower")
    assert not any("pipeline" in each for each in _problems(model=own, trust=["mine"]))


def test_the_schedule_is_written_by_its_name_and_read_back() -> None:
    config = make_config(**LEGAL)
    plain = to_plain(config)
    assert plain["parallel"]["pipeline_schedule"] == "1f1b"
    assert from_plain(plain).parallel.pipeline_schedule is PipelineSchedule["1f1b"]
    del plain["parallel"]["pipeline_schedule"]  # a spec from before
    assert from_plain(plain).parallel.pipeline_schedule is PipelineSchedule["1f1b"]


@pytest.mark.parametrize(
    ("key", "value", "text", "usual"),
    [
        ("train.guard.on_spike", OnSpike.skip, "skip", "none"),
        ("train.guard.on_divergence", OnDivergence.rollback, "rollback", "stop"),
        ("optim.in_backward", True, "true", "false"),
        ("parallel.comm_hook", CommHook.bf16, "bf16", None),
        ("parallel.sync", Sync.diloco, "diloco", None),
    ],
)
def test_what_was_built_for_whole_models_is_refused(key: str, value: Any, text: str, usual: str | None) -> None:
    config = make_config(**LEGAL)
    *path, name = key.split(".")
    section: Any = config
    for each in path:
        section = getattr(section, each)
    setattr(section, name, value)
    about = [each for each in find_problems(config) if f"{key}={text}" in each]
    assert about
    assert usual is None or any(f"{key}={usual}" in each.partition(". Use ")[2] for each in about)
