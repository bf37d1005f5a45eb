"""Rules of one step: sizes of the batch, the mesh of ranks, number formats, the optimizer and the schedule."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.gpu_types import GpuType, find_gpu_type, peak_tflops
from hpc_trainer.config.mesh import nearest_divisor, num_parts, whole_batch
from hpc_trainer.config.rules.declared_rules import LARGEST
from hpc_trainer.config.schema.model import CustomModelConfig
from hpc_trainer.config.schema.optim import (
    CustomOptimConfig,
    MuonConfig,
    OptimConfig,
    ScheduleConfig,
    ScheduleName,
    SgdConfig,
)
from hpc_trainer.config.schema.parallel import Dtype, Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import valid


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Samples of a batch and of a micro-batch, and micro-batches of a rank in a step; None if left open."""

    total: int
    micro: int | None
    accum: int | None

    @property
    def is_fixed(self) -> bool:
        return self.micro is not None and self.accum is not None

    def of_a_rank(self) -> int:
        """Return the number that a rank's share is a multiple of; the share itself if `is_fixed`."""
        return (self.micro or 1) * (self.accum or 1)

    def legal(self, count: int, most: int | None) -> _Sizes:
        """Return the nearest sizes for `count` ranks and `most` (≥ count) samples that break no rule."""
        total = self.total if most is None else min(self.total, most)
        share, micro, accum = max(1, total // count), self.micro, self.accum
        if micro is not None and micro > share:
            return _Sizes(share * count, share, accum if accum == 1 else None)
        if most is not None and self.of_a_rank() > most // count:
            accum = None
        kept = _Sizes(self.total, micro, accum)
        unit = count * kept.of_a_rank()
        nearest = unit if kept.is_fixed else max(unit, round(total / unit) * unit)
        if most is not None and nearest > most:
            nearest = most // unit * unit
        return _Sizes(nearest, micro, accum)

    def way_to(self, legal: _Sizes) -> str:
        """Return the overrides that lead to the sizes `legal`; if only the batch changes, its value without a key."""
        keys = {"global_batch_size": "total", "micro_batch_size": "micro", "grad_accum_steps": "accum"}
        values = {
            key: getattr(legal, name) for key, name in keys.items() if getattr(legal, name) != getattr(self, name)
        }
        if list(values) == ["global_batch_size"]:
            return str(legal.total)
        return " ".join(f"train.{key}={'null' if value is None else value}" for key, value in values.items())


def batch_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with `train.global_batch_size`, `micro_batch_size` and `grad_accum_steps`."""
    train, parts = config.train, num_parts(config.train, config.hardware, config.parallel)
    count = 1 if train.batch_per_rank else parts
    sizes = _Sizes(train.global_batch_size, train.given_micro_batch_size, train.grad_accum_steps)
    given = [size for size in (sizes.total, sizes.micro, sizes.accum) if size is not None]
    if min(given) < 1 or max(given) > LARGEST or parts < 1:
        return
    num_samples = max(0, config.data.num_train_samples() or 0)  # another rule reports 0
    if num_samples and num_samples < parts:
        yield (
            f"data={config.data.name} has {num_samples} training samples, but each of {parts} ranks needs at least one "
            f"in a step. Use hardware with at most {num_samples} ranks, or more samples."
        )
        return
    most = num_samples // (parts if train.batch_per_rank else 1) if num_samples else None
    way = sizes.way_to(sizes.legal(count, most))
    share = max(1, sizes.total // count)
    if sizes.micro is not None and sizes.micro > share:
        yield (
            f"train.micro_batch_size={sizes.micro} must be at most {share}, the samples that one rank takes of "
            f"train.global_batch_size={sizes.total}. Use {way}."
        )
    else:
        yield from _multiple(config, sizes, count, way)
    if num_samples and num_samples < whole_batch(train, config.hardware, config.parallel):
        factor = f" × {parts} ranks" if train.batch_per_rank else ""
        yield (
            f"train.global_batch_size={sizes.total}{factor} must be at most the {num_samples} training "
            f"samples of data={config.data.name}. Use {way}."
        )


def _multiple(config: TrainConfig, sizes: _Sizes, count: int, way: str) -> Iterator[str]:
    train, unit = config.train, count * sizes.of_a_rank()
    is_all = count == config.hardware.world_size
    called = "logical_ranks" if train.logical_ranks else "world_size" if is_all else "data-parallel ranks"
    if sizes.total % unit:
        parts = [f"{called}={count}" + ("" if train.logical_ranks else f" (hardware={config.hardware.name})")]
        parts = [] if train.batch_per_rank else parts
        parts += [] if sizes.micro is None else [f"train.micro_batch_size={sizes.micro}"]
        parts += [] if sizes.accum is None else [f"train.grad_accum_steps={sizes.accum}"]
        yield f"train.global_batch_size={sizes.total} must be a multiple of {' × '.join(parts)}. Use {way}."
    elif sizes.is_fixed and sizes.total != unit:
        yield (
            f"train.global_batch_size={sizes.total} must equal micro_batch_size={sizes.micro} × "
            f"grad_accum_steps={sizes.accum} × {called}={count} = {unit}. "
            f"Use {way}, or leave one of the three null."
        )


_LARGEST = 2**20
"""Largest value that the schema allows for `tensor_parallel` and `pipeline_parallel`."""


def mesh_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with `tensor_parallel`, `pipeline_parallel` and `data_parallel_replicate`."""
    parallel, hardware = config.parallel, config.hardware
    tp, pp = parallel.tensor_parallel, parallel.pipeline_parallel
    if min(tp, pp) < 1 or max(tp, pp) > _LARGEST or hardware.world_size < 1:
        return
    if hardware.world_size % (tp * pp):
        product = f"parallel.tensor_parallel={tp}" + (f" × parallel.pipeline_parallel={pp}" if pp > 1 else "")
        if tp == 1:
            product = f"parallel.pipeline_parallel={pp}"
        key, other = ("tensor_parallel", pp) if tp > 1 else ("pipeline_parallel", 1)
        room = hardware.world_size // other if hardware.world_size % other == 0 else 1
        yield (
            f"{product} must divide world_size={hardware.world_size} (hardware={hardware.name}). "
            f"Use parallel.{key}={nearest_divisor(room, getattr(parallel, key))}, or hardware with "
            f"{-(-hardware.world_size // (tp * pp)) * tp * pp} ranks."
        )


# NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities": TF32 and BF16 units came with 8.0.
_AMPERE = 8
# Half precision came with 5.3, but with no server GPU before Pascal, 6.0 (the same source).
_PASCAL = 6
_LARGEST_SCALE = 2.0**127


def step_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with the precision."""
    dtype, hardware = config.precision.compute_dtype, config.hardware
    if dtype is Dtype.fp16 and config.precision.init_scale < 1:
        yield f"precision.init_scale={config.precision.init_scale:g} must be at least 1 for fp16. Use 65536."
    if dtype is Dtype.fp16 and _LARGEST_SCALE < config.precision.init_scale < float("inf"):
        yield (
            f"precision.init_scale={config.precision.init_scale:g} must be at most {_LARGEST_SCALE:g}: the scale is a "
            "number in fp32. Use 65536, the usual value."
        )
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
    """Return the two-byte format that suits a GPU; fp32 if none does."""
    if gpu.capability >= _AMPERE:
        return "bf16"
    return "fp32" if gpu.capability < _PASCAL or peak_tflops(name, "fp16") is None else "fp16"


def _fp8(config: TrainConfig) -> Iterator[str]:
    hardware, gpu = config.hardware, find_gpu_type(config.hardware.gpu_type)
    if gpu is not None and not gpu.has_fp8 and hardware.device_type != "cpu":
        yield (
            "precision=fp8 needs a GPU from Ada or Hopper on (compute capability 8.9), and hardware.gpu_type="
            f"{hardware.gpu_type} is older. Use precision={_half_of(gpu, hardware.gpu_type)}."
        )


_TORCHS = "torch.optim."
# Problems that these classes of torch would report in the first step only.
_UNFIT = {
    "LBFGS": "evaluates the loss several times a step, but the loop computes it once. Use optim=adamw.",
    "SparseAdam": "accepts only sparse gradients, but those of the loop are dense. Use torch.optim.Adam.",
}
# Operations that torch (2.13) lacks for sharded weights: the first step would end in an error.
_WHOLE_ONLY = ("Adafactor", "Rprop")
_FUSED_WHOLE_ONLY = ("Adagrad", "SGD")


def custom_optim_problems(config: TrainConfig, optim: CustomOptimConfig) -> Iterator[str]:
    """Yield each problem with `optim=custom`."""
    for key in ("lr", "weight_decay"):
        if key in optim.kwargs:
            value = optim.kwargs[key]
            yield f"optim.kwargs.{key}={value} would have no effect: each group has its own. Use optim.{key}={value}."
    if not optim._target_.startswith(_TORCHS):
        return
    name, where = optim._target_.rpartition(".")[2], f"optim._target_={optim._target_}"
    yield from _part_problems(config, optim, name)
    if name in _UNFIT:
        yield f"{where} {_UNFIT[name]}"
    elif name == "Muon" and not isinstance(config.model, CustomModelConfig):
        yield (
            f"{where} accepts only matrices, but model={config.model.name} also has biases or norms. Use optim=muon, "
            "which gives those to AdamW."
        )
    elif optim._target_ == _TORCHS + name:
        yield from _read_problems(optim, name)


def _part_problems(config: TrainConfig, optim: CustomOptimConfig, name: str) -> Iterator[str]:
    """Yield the problem with an optimizer that cannot update sharded weights."""
    is_fsdp = config.parallel.strategy is Strategy.fsdp
    if not is_fsdp and config.parallel.tensor_parallel == 1:
        return
    cut = "parallel=fsdp gives" if is_fsdp else f"parallel.tensor_parallel={config.parallel.tensor_parallel} gives"
    where = f"optim._target_={optim._target_}"
    if name in _WHOLE_ONLY:
        yield (
            f"{where} updates only whole weights (torch 2.13), but {cut} each rank a part. Use optim=adamw, or "
            "parallel=ddp parallel.tensor_parallel=1."
        )
    elif name in _FUSED_WHOLE_ONLY and optim.kwargs.get("fused"):
        yield (
            f"optim.kwargs.fused=true: {where} supports this only for whole weights (torch 2.13), but {cut} each rank "
            "a part. Use optim.kwargs.fused=false."
        )


def _read_problems(optim: CustomOptimConfig, name: str) -> Iterator[str]:
    """Yield each problem that the installed torch's source shows for its class `name`; none if it cannot be read."""
    classes = _classes()
    if not classes:
        return
    if name not in classes:
        yield f"optim._target_={optim._target_}: torch.optim has no optimizer {name}. {_legal(name, classes)}"
        return
    arguments = _arguments(classes[name], name)
    if not arguments:
        return
    for key in optim.kwargs:
        if key not in (*arguments, "lr", "weight_decay"):
            yield f"optim.kwargs.{key}: {optim._target_} has no such argument. {_legal(key, arguments)}"
    if optim.weight_decay and "weight_decay" not in arguments:
        value = f"optim.weight_decay={optim.weight_decay:g}"
        yield f"{value}: {optim._target_} has no weight decay. Use optim.weight_decay=0."


def _legal(wrong: str, choices: Iterable[str]) -> str:
    return valid(wrong, sorted(set(choices) - {"lr", "weight_decay", *_UNFIT}))


@functools.cache
def _classes() -> dict[str, Path]:
    """Return the file of each optimizer of torch.optim, by name; empty if no torch can be read."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return {}
        folder = Path(spec.origin).parent / "optim"
        tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    except (ImportError, OSError, SyntaxError, ValueError):
        return {}
    return {
        alias.name: folder / f"{node.module.removeprefix(_TORCHS)}.py"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_TORCHS)
        for alias in node.names
        if alias.name[0].isupper() and alias.name != "Optimizer"
    }


@functools.cache
def _arguments(path: Path, name: str) -> tuple[str, ...]:
    """Return the constructor's arguments of the class `name` in a file, without the groups; empty if unknown."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__" and member.args.kwarg is None:
                    return tuple(arg.arg for arg in (*member.args.args[2:], *member.args.kwonlyargs))
    return ()


def optim_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with the optimizer and the schedule."""
    optim = config.optim
    if isinstance(optim, (SgdConfig, MuonConfig)) and optim.nesterov and optim.momentum == 0:
        yield "optim.nesterov=true needs optim.momentum > 0. Use optim.nesterov=false."
    if isinstance(optim, CustomOptimConfig):
        yield from custom_optim_problems(config, optim)
    betas = getattr(optim, "betas", None)
    if betas is not None and len(betas) != 2:
        usual: Any = type(optim)()
        yield f"optim.betas={betas} must be two numbers. Use [{','.join(map(str, usual.betas))}]."
    yield from _schedule(config.schedule, config.train.num_steps)
    is_cycled = config.schedule.name is ScheduleName.one_cycle and config.schedule.cycle_momentum is not False
    if is_cycled and config.train.main is None:
        yield from _cycled(optim)


def with_schedule(schedule: ScheduleConfig) -> ScheduleConfig:
    """Return the schedule with `null` replaced by the number that it means: the run is the same run either way."""
    if schedule.name is not ScheduleName.one_cycle:
        return schedule if schedule.warmup_steps is not None else dataclasses.replace(schedule, warmup_steps=0)
    # A run that was frozen before this key existed has the value null, and resumes without momentum cycling.
    return dataclasses.replace(schedule, cycle_momentum=schedule.cycle_momentum is not False)


def _cycled(optim: OptimConfig) -> Iterator[str]:
    """Yield each momentum that one_cycle replaces; a momentum of 0 stays 0."""
    fresh = type(optim)()
    for key in ("momentum", "betas"):
        value = getattr(optim, key, None)
        first, usual = (
            item[0] if isinstance(item, list) and item else item for item in (value, getattr(fresh, key, None))
        )
        given = first not in (0, usual)
        name = key
        if isinstance(optim, CustomOptimConfig) and key in optim.kwargs:
            name, value, given = f"kwargs.{key}", optim.kwargs[key], True
        if given:
            yield (
                f"optim.{name}={value} has no effect with schedule=one_cycle, which moves it from 0.95 to 0.85 and "
                "back. Leave it out, or use schedule.cycle_momentum=false."
            )


def _schedule(schedule: ScheduleConfig, num_steps: int) -> Iterator[str]:
    warmup = schedule.warmup_steps or 0
    if not 0 <= warmup < max(1, num_steps):
        nearest = max(0, min(warmup, num_steps - 1))
        yield (f"schedule.warmup_steps={warmup} must be ≥ 0 and less than train.num_steps={num_steps}. Use {nearest}.")
        return
    left = num_steps - warmup
    if schedule.decay_steps is not None and schedule.decay_steps > left:
        most = f"{left}, the steps after the warm-up. Use {left}."
        yield f"schedule.decay_steps={schedule.decay_steps} must be 1 to {most}"
