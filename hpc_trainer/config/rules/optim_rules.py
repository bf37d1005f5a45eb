"""Rules of `optim/` and `schedule/`; those of `optim=custom` as far as they are known without the class."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.model.shipped import CustomModelConfig
from hpc_trainer.config.schema.optim import (
    CustomOptimConfig,
    MuonConfig,
    OptimConfig,
    SgdConfig,
)
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.schedule import ScheduleConfig, ScheduleName
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import valid

_TORCHS = "torch.optim."
# Problems that these classes of torch would report in the first step only.
_UNFIT = {
    "LBFGS": "asks for the loss several times a step, and the loop tells it once. Use optim=adamw.",
    "SparseAdam": "takes sparse gradients alone, and the loop's are dense. Use torch.optim.Adam.",
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
            f"{where} takes matrices alone, and model={config.model.name} has biases or norms too. Use optim=muon, "
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
            f"{where} updates whole weights alone (torch 2.13), and {cut} each rank a part. Use optim=adamw, or "
            "parallel=ddp parallel.tensor_parallel=1."
        )
    elif name in _FUSED_WHOLE_ONLY and optim.kwargs.get("fused"):
        yield (
            f"optim.kwargs.fused=true: {where} has that for whole weights alone (torch 2.13), and {cut} each rank a "
            "part. Use optim.kwargs.fused=false."
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


def _legal(wrong: str, known: Iterable[str]) -> str:
    return valid(wrong, sorted(set(known) - {"lr", "weight_decay", *_UNFIT}))


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
    """Yield each momentum that one_cycle overrules; 0 means none, and stays 0."""
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
                f"optim.{name}={value} has no effect with schedule=one_cycle, which takes it from 0.95 to 0.85 and "
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
