"""Division of a model into pipeline stages: the cost of each part, the cuts, and what one stage keeps.

A part costs the floating-point operations of its forward pass, counted on tensors that have shapes and no content. The
cuts make the most expensive stage as cheap as possible, since it sets the pace of all; they follow from the
configuration.

    python -m hpc_trainer.features.pipeline.measure < questions.jsonl    what a rank asks (runtime/own_process.py)
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.parts import Part, parts_of
from hpc_trainer.runtime.fake_tensors import fake_tensors
from hpc_trainer.training.step import autocast


@dataclass(frozen=True, slots=True)
class Between:
    """Tensor that goes from one part to the next: `shape` for one micro-batch, and the number format."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_plain(self) -> list[Any]:
        """Return JSON values for `from_plain`."""
        return [list(self.shape), str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Between:
        """Undo `to_plain`."""
        shape, dtype = plain
        return cls(tuple(shape), getattr(torch, dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage `index` of `num_stages`: the parts that it runs, and the tensors at both of its ends."""

    index: int
    num_stages: int
    parts: tuple[Part, ...]
    inputs: Between
    outputs: Between

    @property
    def is_first(self) -> bool:
        """True if the stage is given the model's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if the stage makes the logits."""
        return self.index == self.num_stages - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Cost of each part of a model, and the tensors that it hands to the next one."""

    costs: list[float]
    ends: list[Between]

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values for `from_plain`."""
        return {"costs": self.costs, "ends": [end.to_plain() for end in self.ends]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Measured:
        """Undo `to_plain`."""
        return cls(costs=plain["costs"], ends=[Between.from_plain(end) for end in plain["ends"]])


def stages_of(
    model: nn.Module, num_stages: int, *, inputs: Between, precision: PrecisionConfig, device_type: str,
    param_dtype: torch.dtype | None = None, measured: Measured | None = None,
) -> list[Stage]:  # fmt: skip
    """Return the stages of `model`, which stays unchanged. Not collective; the result is the same on all ranks.

    Args:
        inputs: one micro-batch, as the data set returns it.
        param_dtype: dtype of the weights in computations and of a stage's inputs; None for that of the weights.
        measured: measurements of such a model; None to measure it here, on fake tensors.

    Raises:
        ConfigError: the model cannot be cut, or not into that many stages.
    """
    parts = parts_of(model)
    if num_stages > len(parts):
        raise ConfigError(
            f"parallel.pipeline_parallel={num_stages} needs as many parts, and {type(model).__name__} has "
            f"{len(parts)}. Use {len(parts)} or less."
        )
    if measured is None:
        measured = measure(
            model, inputs=inputs, precision=precision, device_type=device_type, param_dtype=param_dtype
        )  # fmt: skip
    tensors = [inputs, *measured.ends]
    return [
        Stage(
            index=index,
            num_stages=num_stages,
            parts=tuple(parts[place.start : place.stop]),
            inputs=tensors[place.start],
            outputs=tensors[place.stop],
        )
        for index, place in enumerate(cut(measured.costs, num_stages))
    ]


def cut(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut a row of parts into stages so that the most expensive stage costs as little as possible.

    Of equal cuts, those with the most even stages are taken, and of these the earliest. Each stage has one part or
    more; `num_stages` is at most the number of parts.
    """
    count = len(costs)
    sums = [0.0, *itertools.accumulate(costs)]

    def between(first: int, end: int) -> float:
        return sums[end] - sums[first]

    # best[n]: cost of the most expensive stage, for the first n parts. Then least[n]: sum of squares without more cost.
    best = [between(0, end) for end in range(count + 1)]
    for number in range(2, num_stages + 1):
        best = [
            min((max(best[at], between(at, end)) for at in range(number - 1, end)), default=math.inf)
            for end in range(count + 1)
        ]
    limit = best[count]
    least: list[tuple[float, tuple[int, ...]]] = [
        (between(0, end) ** 2 if end and between(0, end) <= limit else math.inf, (0,)) for end in range(count + 1)
    ]
    for _ in range(2, num_stages + 1):
        least = [
            min(
                (
                    (least[at][0] + between(at, end) ** 2, (*least[at][1], at))
                    for at in range(1, end)
                    if between(at, end) <= limit
                ),
                default=(math.inf, ()),
            )
            for end in range(count + 1)
        ]
    starts = (*least[count][1], count)
    return [range(first, end) for first, end in itertools.pairwise(starts)]


def keep(model: nn.Module, stage: Stage) -> None:
    """Remove the modules that `stage` does not need from `model`, in place; names stay unchanged."""
    needed = {name for part in stage.parts for name in part.needs}
    _drop(model, "", needed)


def _drop(module: nn.Module, prefix: str, needed: set[str]) -> None:
    for table in (module._parameters, module._buffers):
        for name in [key for key in table if prefix + key not in needed]:
            del table[name]
            module._non_persistent_buffers_set.discard(name)
    for name, child in list(module._modules.items()):
        path = prefix + name
        if path in needed or child is None:
            continue
        if any(kept.startswith(path + ".") for kept in needed):
            _drop(child, path + ".", needed)
        else:
            del module._modules[name]


def measure(
    model: nn.Module, *, inputs: Between, precision: PrecisionConfig, device_type: str,
    param_dtype: torch.dtype | None, example: torch.Tensor | None = None,
) -> Measured:  # fmt: skip
    """Measure the parts of `model` in a forward pass, which leaves the model as it is.

    Args:
        model, inputs, precision, device_type, param_dtype: as in `stages_of`.
        example: real inputs on the device, which then holds all weights during the pass; None for a pass on fake
            tensors.

    Raises:
        ConfigError: the model has no parts.
    """
    parts = parts_of(model)
    costs: list[float] = []
    ends: list[Between] = []

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if param_dtype is None or not tensor.is_floating_point() else tensor.to(param_dtype)

    def run(value: torch.Tensor) -> torch.Tensor:
        value = cast(value)
        for part in parts:
            with _Operations() as counter:
                value = part.of(model)(value)
            costs.append(counter.total)
            ends.append(Between(tuple(value.shape), value.dtype))
        return value

    is_fake = any(isinstance(tensor, FakeTensor) for _, tensor in _tensors(model))  # `plan --memory` is in such a mode
    fake = contextlib.nullcontext() if is_fake or example is not None else fake_tensors()
    with fake, torch.no_grad(), autocast(precision, device_type):
        # On the type of device that will run them: autocast differs between types.
        if example is None:
            tensors = {name: torch.empty_like(tensor, device=device_type) for name, tensor in _tensors(model)}
            example = torch.empty(inputs.shape, dtype=inputs.dtype, device=device_type)
        else:
            tensors = {name: tensor.to(example.device) for name, tensor in model.named_parameters()}
            tensors |= {name: tensor.to(example.device, copy=True) for name, tensor in model.named_buffers()}
        tensors |= {name: cast(tensors[name]) for name, _ in model.named_parameters()}
        model.forward = run
        try:
            torch.func.functional_call(model, tensors, (example,))
        finally:
            del model.forward
    if not any(costs):  # nothing that is counted
        costs = [float(sum(_num_weights(model, name) for name in part.needs)) for part in parts]
    return Measured(costs=costs if any(costs) else [1.0] * len(parts), ends=ends)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of floating-point operations by torch's table: products, convolutions, attention.

    torch's FlopCounterMode takes some operations apart, and their results may have another number format.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=result)
        return result


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _num_weights(model: nn.Module, name: str) -> int:
    node: Any = model
    for word in name.split("."):
        node = getattr(node, word)
    return node.numel() if isinstance(node, torch.Tensor) else sum(weight.numel() for weight in node.parameters())
