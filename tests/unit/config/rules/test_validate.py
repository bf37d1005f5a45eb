"""Every rule of config/rules/validate.py, broken once: the message names key, value, rule and a legal choice."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.schema.cluster import Executor, HardwareConfig
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.config.schema.model import CnnConfig, GptConfig, Positions, ResnetConfig
from hpc_trainer.config.schema.optim import CustomOptimConfig, MuonConfig, ScheduleName, SgdConfig
from hpc_trainer.config.schema.output import SaveEvery
from hpc_trainer.config.schema.parallel import Dtype, Strategy
from hpc_trainer.config.schema.train import CompileMode, CompileScope, Recompute, TrainConfig
from hpc_trainer.data.generated import SyntheticImagesConfig, SyntheticTokensConfig
from hpc_trainer.data.text import TextBytesConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.spike_guard import GuardConfig, OnDivergence, OnSpike
from tests.unit.record.builders import make_config

INF, NAN = float("inf"), float("nan")


def _problems(**changes: Any) -> list[str]:
    return list(find_problems(make_config(**changes)))


def test_the_shipped_default_has_no_problem() -> None:
    assert _problems() == []


RULES: list[tuple[dict[str, Any], str]] = [
    ({"seed": -1}, "seed=-1 must be at least 0. Use 0."),
    ({"seed": 2**32}, "seed=4.29497e+09 must be at most 4294967295. Use 4294967295."),
    ({"train__num_steps": 0, "schedule__warmup_steps": 0}, "train.num_steps=0 must be at least 1. Use 1."),
    ({"train__eval_every_steps": -1}, "train.eval_every_steps=-1 must be at least 0. Use 0."),
    ({"train__max_grad_norm": 0.0}, "train.max_grad_norm=0 must be greater than 0 and finite. Use 1."),
    ({"train__max_grad_norm": NAN}, "train.max_grad_norm=nan must be greater than 0 and finite. Use 1."),
    ({"checkpoint__every_steps": 0}, "checkpoint.every_steps=0 must be at least 1. Use 1."),
    ({"checkpoint__keep_last": 0}, "checkpoint.keep_last=0 must be at least 1. Use 1."),
    ({"monitor__log_every_steps": 0}, "monitor.log_every_steps=0 must be at least 1. Use 1."),
    ({"monitor__heartbeat_every_s": -0.5}, "monitor.heartbeat_every_s=-0.5 must be at least 0. Use 0."),
    ({"monitor__heartbeat_every_s": NAN}, "monitor.heartbeat_every_s=nan must be at least 0. Use 0."),
    ({"local__max_parallel": 0}, "local.max_parallel=0 must be at least 1. Use 1."),
    ({"parallel__timeout_s": 0}, "parallel.timeout_s=0 must be at least 1. Use 1."),
    ({"precision__init_scale": 0.0}, "precision.init_scale=0 must be greater than 0 and finite. Use 65536."),
    ({"precision__growth_interval": 0}, "precision.growth_interval=0 must be at least 1. Use 1."),
    ({"sweep_name": "a/b"}, "sweep_name='a/b' names a folder: letters, digits and ._- only, at most 100. Use a-b."),
    ({"sweep_name": ".."}, "sweep_name='..' names a folder"),
    ({"sweep_name": "x\n"}, "sweep_name='x\\n' names a folder"),
    ({"sweep_name": "$(touch x)"}, "Use touch-x."),
    ({"experiment_name": ""}, "experiment_name='' names a folder: letters, digits and ._- only, at most 100. Use my-"),
    ({"hardware__num_nodes": 0}, "hardware.num_nodes=0 must be at least 1. Use 1."),
    ({"hardware__gpus_per_node": -1}, "hardware.gpus_per_node=-1 must be at least 0. Use 0."),
    ({"hardware__time_limit_min": 2**31}, "hardware.time_limit_min=2.14748e+09 must be at most 35791394. Use"),
    ({"hardware__time_limit_min": 0}, "hardware.time_limit_min=0 must be at least 1. Use 1."),
    ({"hardware__tasks_per_node": 0}, "hardware.tasks_per_node=0 must be at least 1. Use 1."),
    ({"hardware__cpus_per_task": 0}, "hardware.cpus_per_task=0 must be at least 1. Use 1."),
    (
        {"hardware__gpus_per_node": 1, "hardware__cpus_per_task": None, "hardware__cpus_per_gpu": 0},
        "hardware.cpus_per_gpu=0 must be at least 1. Use 1.",
    ),
    ({"hardware__mem_gb_per_node": 0.0}, "hardware.mem_gb_per_node=0 must be greater than 0 and finite. Use null."),
    ({"hardware__mem_gb_per_cpu": INF}, "hardware.mem_gb_per_cpu=inf must be greater than 0 and finite. Use null."),
    (
        {"hardware__mem_gb_per_node": 8.0, "hardware__mem_gb_per_cpu": 2.0},
        "hardware.mem_gb_per_node=8, hardware.mem_gb_per_cpu=2: Slurm takes one memory flag. Keep one of them, for "
        "example hardware.mem_gb_per_node: add hardware.mem_gb_per_cpu=null.",
    ),
    ({"hardware__mem_gb_per_gpu": 8.0}, "hardware.mem_gb_per_gpu=8 needs gpus_per_node ≥ 1. Use hardware.mem_gb_per_n"),
    (
        {"hardware__cpus_per_task": None, "hardware__cpus_per_gpu": 8},
        "hardware.cpus_per_gpu=8 needs gpus_per_node ≥ 1. Use hardware.cpus_per_task.",
    ),
    (
        {"hardware__gpus_per_node": 4, "hardware__tasks_per_node": 2},
        "hardware.tasks_per_node=2 must equal gpus_per_node=4: each GPU has one rank. Use 4 or null.",
    ),
    (
        {"hardware__gpus_per_node": 1, "hardware__cpus_per_gpu": 8},
        "hardware.cpus_per_gpu and hardware.cpus_per_task both set the cores of a rank. Keep one of them.",
    ),
    ({"cluster__array_parallelism": 0}, "cluster.array_parallelism=0 must be at least 1. Use 1."),
    ({"cluster__max_no_progress": 0}, "cluster.max_no_progress=0 must be at least 1. Use 1."),
    (
        {"hardware__num_nodes": 2, "hardware__name": "big"},
        "cluster=local does not go with hardware.num_nodes=2: it uses only this machine. Use hardware.num_nodes=1, or "
        "cluster=slurm.",
    ),
    ({"cluster__signal_lead_s": 3600}, "cluster.signal_lead_s=3600 must be in [1, 3599]. Use 3599."),
    ({"cluster__signal_lead_s": 0}, "cluster.signal_lead_s=0 must be in [1, 3599]. Use 1."),
    ({"cluster__env": {"A B": "1"}}, "cluster.env.A B='1': a variable is a name"),
    ({"cluster__env": {"A": "1\n2"}}, "cluster.env.A='1\\n2': a variable is a name"),
    ({"cluster__setup": ["a\nb"]}, "cluster.setup holds 'a\\nb': each entry is one line without control characters."),
    ({"cluster__srun_args": ["--x\r"]}, "cluster.srun_args holds '--x\\r': an argument is one line without control"),
    ({"cluster__python": "python\nrm -rf x"}, "cluster.python holds 'python\\nrm -rf x': an argument is one line"),
    ({"paths__runs_dir": "/x\ntouch y"}, "paths.runs_dir='/x\\ntouch y' must hold no control characters."),
    (
        {"parallel__strategy": Strategy.none, "hardware__tasks_per_node": 2},
        "parallel=none does not go with world_size=2 (hardware=cpu_x1): it is for one rank. Use hardware with one "
        "rank, or parallel=ddp.",
    ),
    (
        {"parallel__strategy": Strategy.fsdp},
        "parallel=fsdp does not go with world_size=1 (hardware=cpu_x1): it shares weights out among ranks. Use "
        "hardware with more ranks, or parallel=ddp.",
    ),
    (
        {"parallel__strategy": Strategy.fsdp, "parallel__zero1": True, "hardware__tasks_per_node": 2},
        "parallel.zero1=true needs parallel=ddp, and this is parallel=fsdp: all other strategies have one rank, or "
        "share the state out already. Use parallel=ddp, or parallel.zero1=false.",
    ),
    (
        {"parallel__strategy": Strategy.none, "parallel__zero1": True},
        "parallel.zero1=true needs parallel=ddp, and this is parallel=none: all other strategies have one rank, or "
        "share the state out already. Use parallel=ddp, or parallel.zero1=false.",
    ),
    (
        {"parallel__zero1": True},
        "parallel.zero1=true does not go with world_size=1 (hardware=cpu_x1): one rank has nothing to share. Use "
        "hardware with more ranks, or parallel.zero1=false.",
    ),
    ({"train__global_batch_size": 0}, "train.global_batch_size=0 must be at least 1. Use 1."),
    ({"train__micro_batch_size": 0}, "train.micro_batch_size=0 must be at least 1. Use 1."),
    ({"train__grad_accum_steps": 0}, "train.grad_accum_steps=0 must be at least 1. Use 1."),
    (
        {"train__global_batch_size": 65, "hardware__tasks_per_node": 2},
        "train.global_batch_size=65 must be a multiple of world_size=2 (hardware=cpu_x1). Use 64.",
    ),
    (
        {"train__global_batch_size": 50, "train__micro_batch_size": 16},
        "train.global_batch_size=50 must be a multiple of world_size=1 (hardware=cpu_x1) × "
        "train.micro_batch_size=16. Use 48.",
    ),
    (
        {"train__micro_batch_size": 100_000, "data": DigitsConfig()},
        "train.micro_batch_size=100000 must be at most 64, the samples that one rank takes of "
        "train.global_batch_size=64. Use train.micro_batch_size=64.",
    ),
    (
        {"train__micro_batch_size": 16, "data": SyntheticImagesConfig(num_samples=10), "hardware__tasks_per_node": 2},
        "train.global_batch_size=64 must be at most the 10 training samples of data=synthetic_images. Use "
        "train.global_batch_size=10 train.micro_batch_size=5.",
    ),
    (
        {"train__micro_batch_size": 40, "train__grad_accum_steps": 2, "hardware__tasks_per_node": 2},
        "Use train.micro_batch_size=32 train.grad_accum_steps=null.",
    ),
    (
        {"data": SyntheticImagesConfig(num_samples=3), "hardware__tasks_per_node": 4},
        "data=synthetic_images has 3 training samples, but each of 4 ranks needs at least one in a step. Use hardware "
        "with at most 3 ranks, or more samples.",
    ),
    (
        {"train__global_batch_size": 64, "train__micro_batch_size": 16, "train__grad_accum_steps": 2},
        "train.global_batch_size=64 must equal micro_batch_size=16 × grad_accum_steps=2 × world_size=1 = 32. "
        "Use 32, or leave one of the three null.",
    ),
    ({"optim__lr": 0.0}, "optim.lr=0 must be greater than 0 and finite. Use 0.001."),
    ({"optim__lr": NAN}, "optim.lr=nan must be greater than 0 and finite. Use 0.001."),
    ({"optim__weight_decay": -1.0}, "optim.weight_decay=-1 must be at least 0. Use 0."),
    ({"optim": SgdConfig(momentum=1.0)}, "optim.momentum=1 must be in [0, 1). Use less than 1."),
    ({"optim": SgdConfig(momentum=-0.1)}, "optim.momentum=-0.1 must be in [0, 1). Use 0."),
    ({"optim": SgdConfig(momentum=0.0)}, "optim.nesterov=true needs optim.momentum > 0. Use optim.nesterov=false."),
    ({"optim": MuonConfig(ns_steps=0)}, "optim.ns_steps=0 must be at least 1. Use 1."),
    ({"optim": MuonConfig(adamw_lr=0.0)}, "optim.adamw_lr=0 must be greater than 0 and finite. Use null."),
    ({"optim": MuonConfig(betas=[0.9])}, "optim.betas=[0.9] must be two numbers. Use [0.9,0.95]."),
    (
        {"optim": MuonConfig(), "model": ResnetConfig()},
        "optim=muon does not go with model=resnet18: it is for hidden matrices, and the model has only convolutions. "
        "Use model=gpt, or optim=adamw or sgd.",
    ),
    ({"optim__eps": 0.0}, "optim.eps=0 must be greater than 0 and finite. Use 1e-08."),
    ({"optim__betas": [0.9]}, "optim.betas=[0.9] must be two numbers. Use [0.9,0.999]."),
    ({"optim__betas": [0.9, 1.0]}, "optim.betas[1]=1 must be in [0, 1). Use less than 1."),
    ({"schedule__min_lr_ratio": 1.5}, "schedule.min_lr_ratio=1.5 must be in [0, 1]. Use 1."),
    (
        {"schedule__warmup_steps": 200},
        "schedule.warmup_steps=200 must be ≥ 0 and less than train.num_steps=200. Use 199.",
    ),
    (
        {"schedule__decay_steps": 5},
        "schedule.decay_steps=5 is for schedule=wsd, and has no effect with schedule=cosine.",
    ),
    (
        {"schedule__name": ScheduleName.wsd, "schedule__decay_steps": 201},
        "schedule.decay_steps=201 must be 1 to 200, the steps after the warm-up. Use 200.",
    ),
    (
        {"schedule__name": ScheduleName.step, "schedule__every_steps": 0},
        "schedule.every_steps=0 must be at least 1. Use 1.",
    ),
    ({"schedule__gamma": 1.5}, "schedule.gamma=1.5 must be in (0, 1]. Use 1."),
    ({"schedule__warmup_steps": -1}, "schedule.warmup_steps=-1 must be ≥ 0 and less than train.num_steps=200. Use 0."),
    (
        {"precision__compute_dtype": Dtype.fp16, "precision__init_scale": 0.5},
        "precision.init_scale=0.5 must be at least 1 for fp16. Use 65536.",
    ),
    (
        {"precision__compute_dtype": Dtype.tf32},
        "precision=tf32 does not go with device_type=cpu (hardware=cpu_x1): it is a format of GPUs. Use hardware "
        "with a GPU, or precision=fp32.",
    ),
    (
        {"precision__compute_dtype": Dtype.bf16, "hardware__gpus_per_node": 1, "hardware__gpu_type": "V100_32GB"},
        "precision=bf16 needs a GPU from Ampere on (compute capability 8.0), and hardware.gpu_type=V100_32GB is older. "
        "Use precision=fp16.",
    ),
    *(
        (
            {"precision__compute_dtype": dtype, "hardware__gpus_per_node": 1, "hardware__gpu_type": gpu},
            f"hardware.gpu_type={gpu} {'does not' if dtype is Dtype.fp16 else 'is older'}. Use precision=fp32.",
        )
        for gpu in ("k80", "tesla_p40") for dtype in (Dtype.bf16, Dtype.fp16, Dtype.fp8)
    ),
    (
        {
            "precision__compute_dtype": Dtype.fp8, "model": GptConfig(), "hardware__gpus_per_node": 1,
            "hardware__gpu_type": "t4",
        },
        "hardware.gpu_type=t4 is older. Use precision=fp16.",
    ),
    (
        {"precision__compute_dtype": Dtype.fp8, "model": GptConfig()},
        "precision=fp8 does not go with device_type=cpu (hardware=cpu_x1): it needs a GPU from Ada or Hopper on "
        "(compute capability 8.9). Use hardware with such a GPU, or precision=bf16.",
    ),
    (
        {
            "precision__compute_dtype": Dtype.fp8, "model": GptConfig(), "hardware__gpus_per_node": 1,
            "hardware__gpu_type": "a100",
        },
        "compute capability 8.9), and hardware.gpu_type=a100 is older. Use precision=bf16.",
    ),
    (
        {"precision__compute_dtype": Dtype.fp8, "hardware__gpus_per_node": 1, "hardware__gpu_type": "h100"},
        "precision=fp8 does not go with model=mlp: it is for the linear layers of blocks, and the model has none.",
    ),
    ({"train__loss_chunk_size": 0, "model": GptConfig()}, "train.loss_chunk_size=0 must be at least 1. Use 1."),
    (
        {"train__loss_chunk_size": 64},
        "train.loss_chunk_size=64 does not go with model=mlp: it is for the logits of many tokens, and the data have "
        "few classes. Use train.loss_chunk_size=null.",
    ),
    (
        {"train__guard": GuardConfig(spike_factor=1.0)},
        "train.guard.spike_factor=1 must be greater than 1 and finite. Use 10.",
    ),
    ({"train__guard": GuardConfig(spike_window=3)}, "train.guard.spike_window=3 must be at least 4. Use 4."),
    ({"train__guard": GuardConfig(max_rollbacks=0)}, "train.guard.max_rollbacks=0 must be at least 1. Use 1."),
    (
        {"train__guard": GuardConfig(on_spike=OnSpike.skip), "train__max_skipped_steps": None},
        "train.guard.on_spike=skip does not go with train.max_skipped_steps=null: it needs the norm of each "
        "gradient, and none is computed. Use train.max_skipped_steps=10, or train.guard.on_spike=none.",
    ),
    (
        {"train__guard": GuardConfig(on_spike=OnSpike.rollback), "checkpoint__every": SaveEvery.auto},
        "train.guard.on_spike=rollback does not go with checkpoint.every=auto: it goes back to a step that "
        "checkpoint.every_steps divides, and auto saves at other steps. Use checkpoint.every=steps, or "
        "train.guard.on_spike=none.",
    ),
    (
        {
            "train__guard": GuardConfig(on_divergence=OnDivergence.rollback),
            "precision__compute_dtype": Dtype.fp16,
        },
        "train.guard.on_divergence=rollback does not go with precision=fp16: it counts skipped steps, and fp16 skips "
        "some while it looks for its loss scale. Use precision=bf16, or train.guard.on_divergence=stop.",
    ),
    ({"train__label_smoothing": 1.0}, "train.label_smoothing=1 must be in [0, 1). Use less than 1."),
    ({"train__max_skipped_steps": -1}, "train.max_skipped_steps=-1 must be at least 0. Use 0."),
    (
        {"train__recompute": Recompute.full},
        "train.recompute=full does not go with model=mlp: it computes blocks again, and the model has none. Use "
        "another model, or train.recompute=none.",
    ),
    (
        {"train__channels_last": True},
        "train.channels_last=true does not go with model=mlp: it orders images for convolutions, and the model has "
        "none. Use train.channels_last=false.",
    ),
    (
        {"train__channels_last": True, "model": ResnetConfig(width=4)},
        "train.channels_last=true does not go with model=resnet18 model.width=4 device_type=cpu (hardware=cpu_x1): "
        "so few channels in that order crash there (oneDNN in torch 2.13). Use model.width=8, or "
        "train.channels_last=false.",
    ),
    (
        {"train__recompute": Recompute.budget},
        "train.recompute=budget needs train.compile=true, and this is train.compile=false: it is a choice of the "
        "compiler. Use train.compile=true, or train.recompute=full, or train.recompute=none.",
    ),
    (
        {"train__recompute": Recompute.budget, "train__compile": True, "model": GptConfig(dropout=0.1)},
        "train.recompute=budget does not go with model=gpt model.dropout=0.1: dropout would be drawn anew when it is "
        "computed again (a bug of torch up to 2.13). Use model.dropout=0, or train.recompute=full "
        "train.compile_scope=blocks, or train.recompute=none.",
    ),
    (
        {"train__recompute": Recompute.full, "train__recompute_budget": 0.3, "model": GptConfig()},
        "train.recompute_budget=0.3 is for train.recompute=budget, and has no effect with train.recompute=full.",
    ),
    (
        {"train__recompute": Recompute.budget, "train__compile": True, "train__recompute_budget": 1.5},
        "train.recompute_budget=1.5 must be in [0, 1]",
    ),
    (
        {"train__compile": True, "model": ResnetConfig(width=4)},
        "train.compile=true does not go with model=resnet18 model.width=4 device_type=cpu (hardware=cpu_x1): the "
        "compiler chooses NHWC, and so few channels in it crash there (oneDNN in torch 2.13). Use model.width=8, or "
        "train.compile=false.",
    ),
    (
        {"train__recompute": Recompute.full, "train__compile": True, "model": ResnetConfig()},
        "train.recompute=full does not go with train.compile=true train.compile_scope=model: the compiler decides",
    ),
    (
        {"train__compile": True, "train__compile_scope": CompileScope.blocks, "model": ResnetConfig(),
         "train__recompute": Recompute.selective},
        "train.recompute=selective does not go with train.compile=true train.compile_scope=blocks: it chooses among "
        "operations, and a compiled block is a single operation. Use train.recompute=full, or train.compile=false.",
    ),
    (
        {"train__compile_scope": CompileScope.blocks, "model": ResnetConfig()},
        "train.compile_scope=blocks is for train.compile=true, and has no effect with train.compile=false.",
    ),
    (
        {"train__compile_mode": CompileMode.max_autotune},
        "train.compile_mode=max_autotune is for train.compile=true, and has no effect with train.compile=false.",
    ),
    (
        {"train__compile": True, "train__compile_scope": CompileScope.blocks},
        "train.compile_scope=blocks does not go with model=mlp: it compiles blocks, and the model has none. Use "
        "train.compile_scope=model, or another model.",
    ),
    (
        {"train__compile": True, "train__compile_mode": CompileMode.max_autotune},
        "train.compile_mode=max_autotune does not go with device_type=cpu (hardware=cpu_x1): it is for GPUs. Use "
        "train.compile_mode=default.",
    ),
    (
        {"train__compile": True, "train__compile_mode": CompileMode.reduce_overhead, "hardware__gpus_per_node": 1,
         "train__grad_accum_steps": 2},
        "train.compile_mode=reduce_overhead captures CUDA graphs, whose results the next forward pass overwrites: "
        "train.grad_accum_steps=2 must be 1. Use train.grad_accum_steps=1 train.micro_batch_size=null, or "
        "train.compile_mode=default.",
    ),
    (
        {"train__compile": True, "train__compile_mode": CompileMode.max_autotune, "hardware__gpus_per_node": 1,
         "train__micro_batch_size": 16},
        "train.compile_mode=max_autotune captures CUDA graphs, whose results the next forward pass overwrites: "
        "train.grad_accum_steps=4 must be 1. Use train.grad_accum_steps=1 train.micro_batch_size=null, or "
        "train.compile_mode=default.",
    ),
    (
        {"train__compile": True, "train__compile_mode": CompileMode.max_autotune, "hardware__gpus_per_node": 1,
         "train__micro_batch_size": "auto"},
        "train.compile_mode=max_autotune does not go with train.micro_batch_size=auto: it captures CUDA graphs, "
        "whose results the next forward pass overwrites, and there may be several in a step. Use "
        "train.compile_mode=default, or a number.",
    ),
    (
        {"train__channels_last": True, "model": ResnetConfig(), "parallel__strategy": Strategy.fsdp},
        "train.channels_last=true does not go with parallel=fsdp: FSDP cannot shard weights in that order. Use "
        "parallel=ddp, or train.channels_last=false.",
    ),
    ({"optim": CustomOptimConfig(_target_="os.system")}, "optim._target_=os.system: this package is not on"),
    ({"model__dropout": 1.0}, "model.dropout=1 must be in [0, 1). Use less than 1."),
    ({"model__hidden_dim": 0}, "model.hidden_dim=0 must be at least 1. Use 1."),
    ({"model__num_layers": -1}, "model.num_layers=-1 must be at least 0. Use 0."),
    ({"model": CnnConfig(num_channels=0)}, "model.num_channels=0 must be at least 1. Use 1."),
    ({"model": ResnetConfig(width=0)}, "model.width=0 must be at least 1. Use 1."),
    ({"model": ResnetConfig(small_input_below=-1)}, "model.small_input_below=-1 must be at least 0. Use 0."),
    ({"model": ResnetConfig(depth=33)}, "model.depth=33 must be 18, 34 or 50. Use 34."),
    ({"model": ResnetConfig(depth=101)}, "model.depth=101 must be 18, 34 or 50. Use 50."),
    ({"model": GptConfig(num_heads=0)}, "model.num_heads=0 must be at least 1. Use 1."),
    ({"model": GptConfig(embed_dim=0)}, "model.embed_dim=0 must be at least 1. Use 1."),
    (
        {"model": GptConfig(num_heads=6, embed_dim=128), "data": TextBytesConfig()},
        "model.embed_dim=128 must be a multiple of model.num_heads=6. Use 126.",
    ),
    (
        {"model": GptConfig(num_kv_heads=3), "data": TextBytesConfig()},
        "model.num_kv_heads=3 must divide model.num_heads=4. Use model.num_kv_heads=2.",
    ),
    (
        {"model": GptConfig(embed_dim=12, positions=Positions.rope), "data": TextBytesConfig()},
        "model.positions=rope turns the dimensions of a head in pairs, and embed_dim=12 / num_heads=4 is an odd number "
        "of them. Use model.embed_dim=16.",
    ),
    ({"model": GptConfig()}, "model=gpt does not go with data=digits: it reads text. Use data=text_bytes, or "
                             "model=cnn."),
    ({"data": TextBytesConfig()},
        "data=text_bytes does not go with model=mlp: it is text, and the model reads images. Use model=gpt, or "
        "data=digits."),
    (
        {"train__global_batch_size": 1500},
        "train.global_batch_size=1500 must be at most the 1437 training samples of data=digits. Use 1437.",
    ),
    (
        {"data": SyntheticImagesConfig(num_samples=33), "hardware__tasks_per_node": 2},
        "train.global_batch_size=64 must be at most the 33 training samples of data=synthetic_images. Use 32.",
    ),
    ({"data__num_workers": -1}, "data.num_workers=-1 must be at least 0. Use 0."),
    ({"data__num_eval": 0}, "data.num_eval=0 must be at least 1. Use 1."),
    ({"data__num_eval": 1797}, "data.num_eval=1797 must be at most 1796. Use 1796."),
    ({"data": SyntheticImagesConfig(num_samples=0)}, "data.num_samples=0 must be at least 1. Use 1."),
    ({"data": SyntheticImagesConfig(num_eval=0)}, "data.num_eval=0 must be at least 1. Use 1."),
    ({"data": SyntheticImagesConfig(image_size=4)}, "data.image_size=4 must be at least 8. Use 8."),
    ({"data": SyntheticImagesConfig(num_classes=1)}, "data.num_classes=1 must be at least 2. Use 2."),
    ({"data": SyntheticImagesConfig(data_seed=-1)}, "data.data_seed=-1 must be at least 0. Use 0."),
    ({"data": SyntheticImagesConfig(num_channels=2)}, "data.num_channels=2 must be 1 or 3. Use 1."),
    ({"model": GptConfig(vocab_multiple=0)}, "model.vocab_multiple=0 must be at least 1. Use 1."),
    ({"data": SyntheticTokensConfig()},
        "data=synthetic_tokens does not go with model=mlp: it is text, and the model reads images. Use model=gpt, or "
        "data=digits."),
    ({"data": SyntheticTokensConfig(num_samples=0)}, "data.num_samples=0 must be at least 1. Use 1."),
    ({"data": SyntheticTokensConfig(num_eval=0)}, "data.num_eval=0 must be at least 1. Use 1."),
    ({"data": SyntheticTokensConfig(seq_len=1)}, "data.seq_len=1 must be at least 2. Use 2."),
    ({"data": SyntheticTokensConfig(data_seed=-1)}, "data.data_seed=-1 must be at least 0. Use 0."),
    ({"data": SyntheticTokensConfig(vocab_size=1)}, "data.vocab_size=1 must be at least 2. Use 2."),
    (
        {"data": SyntheticTokensConfig(num_samples=33), "model": GptConfig()},
        "train.global_batch_size=64 must be at most the 33 training samples of data=synthetic_tokens. Use 33.",
    ),
    ({"data": TextBytesConfig(seq_len=1)}, "data.seq_len=1 must be at least 2. Use 2."),
    ({"data": TextBytesConfig(eval_fraction=1.0)}, "data.eval_fraction=1 must be in (0, 1). Use less than 1."),
    ({"data": TextBytesConfig(path="/no/such")}, "data.path=/no/such must be a readable file; there is none."),
    ({"model__target": None} | {"model___target_": "os.system"}, "model._target_=os.system: this package is not on"),
    ({"data___target_": "builtins.eval"}, "data._target_=builtins.eval: this package is not on"),
    ({"train__main": "mine.loop.main"}, "If you trust that package, add --trust mine, or"),
    ({"train__main": "main"}, "train.main='main' must be a dotted name"),
    ({"params": {"a": {1: 2}}}, "params.a has the key 1, and keys must be texts. Use '1' in quotes."),
    ({"params": {"a": [b"x"]}}, "params.a[0]=b'x' must be a number, a text, true, false, null"),
]  # fmt: skip
RULES = [({k: v for k, v in changes.items() if k != "model__target"}, message) for changes, message in RULES]


def _set(config: TrainConfig, key: str, value: Any) -> None:
    section, _, name = key.partition("__")
    if name:
        setattr(getattr(config, section), name, value)
    else:
        setattr(config, section, value)


@pytest.mark.parametrize(("changes", "message"), RULES, ids=[message[:50] for _, message in RULES])
def test_each_rule(changes: dict[str, Any], message: str) -> None:
    config = make_config()
    for key, value in changes.items():
        _set(config, key, value)
    problems = list(find_problems(config))
    assert [problem for problem in problems if message in problem], problems
    assert all("\n" not in problem for problem in problems), "a line each"
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert str(caught.value).splitlines() == problems


HOSTILE = ["a\nb", "a'b", 'a"b', "a b", "$(touch x)", "`id`", "a;b", "a\\b", "", "a\tb", "a\x00b", "x\n#SBATCH --uid=0"]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    "key",
    [*(f"hardware__{key}" for key in ("partition", "qos", "constraint", "exclude", "gpu_type")),
     *(f"cluster__{key}" for key in ("account", "master_addr"))],
)  # fmt: skip
def test_hostile_words_never_reach_sbatch(key: str, value: str) -> None:
    (problem,) = _problems(**{key: value})
    assert problem.startswith(f"{key.replace('__', '.')}={value!r} must be one plain word")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hardware__partition", "gpu"), ("hardware__partition", "gpu,long"), ("hardware__partition", "x_y-z.1"),
        ("hardware__constraint", "a100&nvlink"), ("hardware__constraint", "[rack1|rack2]"),
        ("hardware__constraint", "a100*2"), ("hardware__constraint", "(a|b)&c"),
        ("hardware__exclude", "n[001-004,007]"),
        ("hardware__exclude", "node1,node2"), ("hardware__qos", "qos_gpu-t3"), ("cluster__account", "abc@v100"),
        ("hardware__gpu_type", "1g.5gb"), ("cluster__master_addr", "fe80::1%ib0"),
        ("cluster__master_addr", "n1.site.org"),
        ("cluster__srun_args", ["--cpu-bind=cores", "-l", "--container-mounts=/a b:/c"]),
        ("cluster__python", "apptainer exec --nv 'my image.sif' python3"),
        ("cluster__setup", ["# a comment", 'source "$HOME/x y/bin/activate"; echo `id`']),
    ],
)  # fmt: skip
def test_what_sites_use_is_allowed(key: str, value: Any) -> None:
    assert _problems(**{key: value}) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hardware__exclude", "/etc/passwd", "Use hardware.exclude=etcpasswd."),  # sbatch would read the file
        ("hardware__gpu_type", "a100:3", "Use hardware.gpu_type=a1003."),
        ("hardware__partition", "--wrap", "Use hardware.partition=wrap."),
        ("hardware__partition", "gpu\u2028x", "Use hardware.partition=gpux."),
        ("hardware__mem_gb_per_node", 0.0001, "is less than 1 MB, and Slurm counts in MB"),  # --mem=0 is all memory
        ("cluster__signal_lead_s", 2**16, "must be in [1, "),  # sbatch: Invalid --signal specification
        ("cluster__setup", ["#SBATCH --uid=0"], "not allowed among commands"),
        ("cluster__setup", ["#BSUB -q other"], "not allowed among commands"),
        ("cluster__setup", ["  #PBS -q other"], "not allowed among commands"),
        ("cluster__srun_args", ["bash"], "srun would run any other argument"),
        ("cluster__srun_args", ["--cpu-bind", "cores"], "as --cpu-bind=cores"),
        ("cluster__srun_args", ["--"], "each entry is one option"),
        ("cluster__srun_args", ["--x=a\nb"], "one line without control characters"),
        ("cluster__python", "$HOME/bin/python", "is a program and its arguments, not shell: $ would not"),
        ("cluster__python", "~/bin/python", "not shell: ~ would not be expanded"),
        ("cluster__python", "python; id", "not shell: ; would not"),
        ("cluster__python", "'python", "No closing quotation"),
        ("cluster__python", "--help", "must begin with a program"),
        ("cluster__python", " ", "must begin with a program"),
    ],
)
def test_what_sbatch_srun_or_a_shell_would_read_otherwise_is_refused(key: str, value: Any, message: str) -> None:
    config = make_config(hardware__time_limit_min=43_200, **{key: value})
    (problem,) = find_problems(config)
    assert message in problem


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(make_config(seed=-1, optim__lr=0.0, train__micro_batch_size=0, data__num_workers=-1))
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("gpu_type", ["p100", "t4", "v100", "a100", "h100", None, "mi250x"])
def test_fp16_is_for_gpus_that_gain_by_it(gpu_type: str | None) -> None:
    changes = {"precision__compute_dtype": Dtype.fp16, "hardware__gpus_per_node": 1, "hardware__gpu_type": gpu_type}
    assert _problems(**changes) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__strategy": Strategy.fsdp},
        {"parallel__strategy": Strategy.fsdp, "parallel__data_parallel_replicate": 2},
        {"parallel__strategy": Strategy.fsdp, "parallel__tensor_parallel": 2},
        {"parallel__tensor_parallel": 2},
        {"parallel__zero1": True},
    ],
)
def test_muon_goes_with_each_way_to_share_weights_out(changes: dict[str, Any]) -> None:
    data = {"model": GptConfig(), "data": SyntheticTokensConfig(vocab_size=64)}
    assert _problems(optim=MuonConfig(), hardware__tasks_per_node=4, **data, **changes) == []


def test_several_nodes_are_fine_on_slurm() -> None:
    assert _problems(hardware__num_nodes=2, cluster__executor=Executor.slurm) == []


def test_a_relative_data_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("x" * 10_000)
    config = make_config(model=GptConfig(), data=TextBytesConfig(path="text.txt"))
    validate(config)
    assert config.data.path == str(tmp_path / "text.txt")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"snapshot__max_mb": 0.0}, "snapshot.max_mb=0 must be greater than 0 and finite. Use 50."),
        ({"snapshot__max_files": 0}, "snapshot.max_files=0 must be at least 1"),
        ({"snapshot__packages": ["my_lab.net"]}, "'my_lab.net': each entry is a top-level package, such as my_lab."),
        ({"snapshot__packages": ["../x"]}, "'../x': each entry is a top-level package, such as my_lab."),
        ({"snapshot__include": ["/etc/passwd"]}, "snapshot.include holds '/etc/passwd'"),
        ({"snapshot__exclude": ["a/../../b"]}, "snapshot.exclude holds 'a/../../b'"),
        ({"snapshot__exclude": [""]}, "snapshot.exclude holds ''"),
    ],
)
def test_what_is_frozen_is_named_by_names_and_paths_inside(changes: dict[str, Any], words: str) -> None:
    (problem,) = _problems(**changes)
    assert words in problem
    assert _problems(snapshot__exclude=["data/raw/", "*.png"], snapshot__packages=["my_lab"]) == []


_COUNT = st.integers(1, 12)


@settings(max_examples=150)
@given(_COUNT, _COUNT, st.integers(1, 4), st.integers(1, 8), st.sampled_from(["none", "micro", "accum", "both"]))
def test_the_batch_is_resolved_or_refused(micro: int, accum: int, nodes: int, ranks: int, given: str) -> None:
    config = make_config()
    config.cluster.executor = Executor.slurm
    config.hardware = HardwareConfig(num_nodes=nodes, tasks_per_node=ranks)
    train, world_size = config.train, nodes * ranks
    config.data = SyntheticImagesConfig(num_samples=10**6)
    train.global_batch_size = micro * accum * world_size
    train.micro_batch_size = micro if given in ("micro", "both") else None
    train.grad_accum_steps = accum if given in ("accum", "both") else None
    before = dataclasses.replace(train)
    validate(config)
    assert train == before, "the section may belong to other points too: it is replaced, not changed"
    train = config.train
    assert train.micro_batch_size is not None
    assert train.grad_accum_steps is not None
    assert train.global_batch_size == before.global_batch_size
    assert train.micro_batch_size * train.grad_accum_steps * world_size == train.global_batch_size
    assert before.micro_batch_size in (None, train.micro_batch_size)
    assert before.grad_accum_steps in (None, train.grad_accum_steps)
    if given == "none":
        assert train.grad_accum_steps == 1
    resolved = dataclasses.replace(train)
    validate(config)
    assert config.train == resolved, "once resolved, it stays"


def _follow(config: TrainConfig, problems: list[str]) -> None:
    """Does what the first way of each problem says."""
    for problem in problems:
        words = re.split(r", or |\.$", problem.split(" Use ")[1])[0].split()
        for word in [each if "=" in each else f"{problem.split('=')[0]}={each}" for each in words]:
            key, value = word.removeprefix("train.").split("=")
            setattr(config.train, key, None if value == "null" else int(value))


@settings(max_examples=300)
@given(
    st.integers(1, 400), st.none() | st.integers(1, 500), st.none() | _COUNT, st.integers(1, 16),
    st.integers(16, 400) | st.just(10**6), st.booleans(),
)  # fmt: skip
def test_what_is_no_multiple_or_too_large_is_refused_with_sizes_that_work(
    total: int, micro: int | None, accum: int | None, ranks: int, num_samples: int, is_per_rank: bool
) -> None:
    config = make_config()
    config.hardware = HardwareConfig(tasks_per_node=ranks)
    config.data = SyntheticImagesConfig(num_samples=num_samples)
    config.train.batch_per_rank = is_per_rank
    train = config.train
    train.global_batch_size, train.micro_batch_size, train.grad_accum_steps = total, micro, accum
    problems = list(find_problems(config))
    parts = 1 if is_per_rank else ranks
    unit = parts * (micro or 1) * (accum or 1)
    fits = total == unit if micro and accum else total % unit == 0
    assert bool(problems) is not (fits and total * ranks // parts <= num_samples)
    _follow(config, problems)
    assert list(find_problems(config)) == [], problems
