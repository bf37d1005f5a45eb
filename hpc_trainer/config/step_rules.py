"""Rules of what one step computes: `precision/`, and the keys of `train` that change it."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.checks import at_least, between
from hpc_trainer.config.gpu_types import GpuType, find_gpu_type, peak_tflops
from hpc_trainer.config.rank_rules import accum_steps
from hpc_trainer.config.schema.model import CnnConfig, GptConfig, MlpConfig, ResnetConfig
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import CompileMode, CompileScope, Recompute, TrainConfig

# NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities": TF32 and BF16 units came with 8.0.
_AMPERE = 8
# Half precision came with 5.3, in no GPU of a server before Pascal, 6.0 (the same source).
_PASCAL = 6
_LARGEST_SCALE = 2.0**127
# A strided 1x1 convolution from 4 channels in NHWC overwrites the heap on a CPU (torch 2.13.0, 6 of 6 tries); the
# compiler chooses NHWC by itself.
_NARROWEST = 8


def step_problems(config: TrainConfig) -> Iterator[str]:
    """What they break, a line each."""
    train, model = config.train, config.model
    yield from _precision(config)
    yield from between("train.label_smoothing", train.label_smoothing, 0, 1, high_open=True)
    yield from at_least("train.loss_chunk_size", train.loss_chunk_size, 1, nullable=True)
    if train.loss_chunk_size is not None and isinstance(model, (MlpConfig, CnnConfig, ResnetConfig)):
        yield (
            f"train.loss_chunk_size={train.loss_chunk_size} is for the logits of many tokens, and model={model.name} "
            "has few classes. Use train.loss_chunk_size=null."
        )
    if train.loss_chunk_size is not None and config.parallel.tensor_parallel > 1:
        yield (
            f"train.loss_chunk_size={train.loss_chunk_size} runs the output layer apart, and parallel.tensor_parallel="
            f"{config.parallel.tensor_parallel} shares it out. Use train.loss_chunk_size=null, or parallel=fsdp."
        )
    yield from at_least("train.max_skipped_steps", train.max_skipped_steps, 0, nullable=True)
    yield from _compile(config)
    yield from _budget(config)
    if train.channels_last and config.parallel.strategy is Strategy.fsdp:
        yield (
            "train.channels_last=true orders weights otherwise than parallel=fsdp can cut them. Use "
            "train.channels_last=false, or parallel=ddp."
        )
    if isinstance(model, ResnetConfig) and model.width < _NARROWEST and config.hardware.device_type == "cpu":
        for key in [key for key in ("channels_last", "compile") if getattr(train, key)]:
            yield (
                f"train.{key}=true crashes on the CPU for model.width={model.width} (oneDNN in torch 2.13). Use "
                f"model.width={_NARROWEST}, or train.{key}=false."
            )
    if train.channels_last and isinstance(model, (GptConfig, MlpConfig)):
        yield (
            f"train.channels_last=true orders images for convolutions, and model={model.name} has none. "
            "Use train.channels_last=false."
        )


def _budget(config: TrainConfig) -> Iterator[str]:
    train = config.train
    yield from between("train.recompute_budget", train.recompute_budget, 0, 1)
    if train.recompute is not Recompute.budget:
        return
    if not train.compile:
        yield (
            "train.recompute=budget is a choice of the compiler, and train.compile=false. Use train.compile=true, or "
            "train.recompute=full."
        )
    dropout = getattr(config.model, "dropout", 0.0)
    if dropout:
        yield (
            f"train.recompute=budget draws dropout anew when it computes again (a fault of torch up to 2.13), and "
            f"model.dropout={dropout:g}. Use model.dropout=0, or train.recompute=full train.compile_scope=blocks."
        )


def _compile(config: TrainConfig) -> Iterator[str]:
    train, model = config.train, config.model
    scope, mode = train.compile_scope, train.compile_mode
    if not train.compile:
        return
    if train.recompute is Recompute.selective and scope is CompileScope.blocks:
        yield (
            "train.recompute=selective chooses among operations, and of a compiled block there is one alone. "
            "Use train.recompute=full, or train.compile=false."
        )
    if scope is CompileScope.blocks and isinstance(model, (MlpConfig, CnnConfig)):
        yield (
            f"train.compile_scope=blocks compiles blocks, and model={model.name} has none. "
            "Use train.compile_scope=model, or model=gpt, resnet18 or resnet50."
        )
    if mode is not CompileMode.default and config.hardware.device_type == "cpu":
        yield (
            f"train.compile_mode={mode.value} is for GPUs, and hardware={config.hardware.name} has none. "
            "Use train.compile_mode=default."
        )
    if mode is not CompileMode.default:
        yield from _graphs(config)


def _graphs(config: TrainConfig) -> Iterator[str]:
    """Both modes capture CUDA graphs, whose backward pass writes each time into the same memory.

    Gradients that are added up there are wrong without an error (pytorch issue 96693), or with one (169545).
    """
    train = config.train
    graphs = (
        f"train.compile_mode={train.compile_mode.value} keeps results in memory that the next forward pass overwrites"
    )
    if train.is_batch_auto:
        yield (
            f"{graphs}, and train.micro_batch_size=auto may find several for each step. Use "
            "train.compile_mode=default, or a number."
        )
        return
    accum = accum_steps(train, config.hardware, config.parallel)
    if accum > 1:
        yield f"{graphs}: train.grad_accum_steps={accum} must be 1. Use train.compile_mode=default, or 1."


def _precision(config: TrainConfig) -> Iterator[str]:
    dtype, hardware = config.precision.compute_dtype, config.hardware
    if dtype is Dtype.fp16 and config.precision.init_scale < 1:
        yield f"precision.init_scale={config.precision.init_scale:g} must be at least 1 for fp16. Use 65536."
    if dtype is Dtype.fp16 and _LARGEST_SCALE < config.precision.init_scale < float("inf"):
        yield (
            f"precision.init_scale={config.precision.init_scale:g} must be at most {_LARGEST_SCALE:g}: the scale is a "
            "number in fp32. Use 65536, as is usual."
        )
    if dtype is Dtype.tf32 and hardware.device_type == "cpu":
        yield f"precision=tf32 needs a GPU, and hardware={hardware.name} has none. Use precision=fp32."
    gpu = find_gpu_type(hardware.gpu_type)
    if dtype is Dtype.fp8:
        yield from _fp8(config)
    if config.precision.format.products in ("tf32", "bf16") and gpu is not None and gpu.capability < _AMPERE:
        other = "fp32" if dtype is Dtype.tf32 else _half_of(gpu, hardware.gpu_type)
        yield (
            f"precision={dtype.value} needs a GPU from Ampere on (compute capability 8.0), and "
            f"hardware.gpu_type={hardware.gpu_type} is older. Use precision={other}."
        )
    if dtype is Dtype.fp16 and gpu is not None and _half_of(gpu, hardware.gpu_type) == "fp32":
        yield (
            f"precision=fp16 needs a GPU that computes in it faster than in fp32 (Pascal's P100, or Volta and later), "
            f"and hardware.gpu_type={hardware.gpu_type} does not. Use precision=fp32."
        )


def _half_of(gpu: GpuType, name: str | None) -> str:
    """The format of two bytes that suits a GPU; fp32 if none does."""
    if gpu.capability >= _AMPERE:
        return "bf16"
    return "fp32" if gpu.capability < _PASCAL or peak_tflops(name, "fp16") is None else "fp16"


def _fp8(config: TrainConfig) -> Iterator[str]:
    hardware, gpu = config.hardware, find_gpu_type(config.hardware.gpu_type)
    needs = "precision=fp8 needs a GPU from Ada or Hopper on (compute capability 8.9)"
    if hardware.device_type == "cpu":
        yield f"{needs}, and hardware={hardware.name} has none. Use precision=bf16."
    elif gpu is not None and not gpu.has_fp8:
        other = _half_of(gpu, hardware.gpu_type)
        yield f"{needs}, and hardware.gpu_type={hardware.gpu_type} is older. Use precision={other}."
