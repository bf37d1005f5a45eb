"""Two steps of `optim=custom` on small sharded weights, before any data are read: not every optimizer can do those."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hpc_trainer.config.mesh import mesh_shape
from hpc_trainer.config.schema.optim import CustomOptimConfig
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.custom_optim.made import recipe_of
from hpc_trainer.training.optim.build import build_optimizer
from hpc_trainer.training.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OPERATION = re.compile(r"aten[.:]+[\w.]+")
_LONGEST = 200


def try_on_parts(config: TrainConfig, mesh: Mesh) -> None:
    """Take two steps on sharded weights, if the run's ranks hold shards. Collective.

    Raises:
        ConfigError: a step fails on shards and not on whole weights, or the optimizer cannot be built.
    """
    assert isinstance(config.optim, CustomOptimConfig)
    is_fsdp = config.parallel.strategy is Strategy.fsdp
    devices = mesh.dim(*(("dp_replicate", "dp_shard") if is_fsdp else ()), "tp")
    if devices is None:
        return
    last = _LastCall()
    error = _error_of(config, devices, last)
    if (
        error is None or _error_of(config, None, _LastCall()) is not None
    ):  # an optimizer that can do no step at all says so itself
        return
    said = " ".join((str(error).strip() or type(error).__name__).split())[:_LONGEST].rstrip(".!")
    match = _OPERATION.search(str(error))
    operation = last.name if match is None else match.group()
    where = f"parallel={config.parallel.strategy.value} parallel.tensor_parallel={mesh.shape.tp}"
    raise ConfigError(
        f"optim._target_={config.optim._target_} must be able to update parts of weights (DTensor), as {where} gives "
        f"each rank a part ({_layout(devices)}), and its step fails on them in {operation}: {said}. "
        "Use optim=adamw, or parallel=ddp parallel.tensor_parallel=1."
    ) from error


def try_without_ranks(config: TrainConfig) -> None:
    """Run `try_on_parts` in a process that is no rank: nothing is sent. Raises ConfigError."""
    shape = mesh_shape(config.parallel, config.hardware.world_size)
    if shape.dp_shard * shape.tp == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=shape.world_size, store=FakeStore())
    try:
        wide = {name: size for name in ("dp_replicate", "dp_shard", "tp") if (size := getattr(shape, name)) > 1}
        wide = {"pp": shape.world_size // torch.Size(wide.values()).numel(), **wide}
        devices = init_device_mesh("cpu", tuple(wide.values()), mesh_dim_names=tuple(wide))
        try_on_parts(config, Mesh(shape=shape, rank=0, devices=devices))
    finally:
        torch.distributed.destroy_process_group()


class _LastCall(TorchFunctionMode):
    """Name of the torch function that was called last, for an error that names no operation."""

    name = "Python"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.name = getattr(func, "__name__", self.name)
        return func(*args, **(kwargs or {}))


def _error_of(config: TrainConfig, devices: DeviceMesh | None, last: _LastCall) -> Exception | None:
    """Return the error of two steps on weights sharded on `devices`, or on whole ones; None if they succeed."""
    model = nn.ParameterDict(dict(_weights(devices)))
    assert isinstance(config.optim, CustomOptimConfig)
    change = partial(recipe_of, config.optim, trust=config.trust)
    optimizer = build_optimizer(config.optim, model, change=change)
    try:
        with warnings.catch_warnings(), last:
            warnings.simplefilter("ignore")  # the run's own steps will show them
            for _ in range(2):  # the first makes the state, the second goes on with it
                for weight in model.values():
                    weight.grad = torch.ones_like(weight)
                optimizer.step()
    except Exception as error:  # the user's own code may raise anything
        return error
    return None


def _weights(devices: DeviceMesh | None) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a vector and a matrix; with tensor parallelism, or unsharded, a matrix split by columns too."""
    by_columns = devices is None or "tp" in _names(devices)
    for name, shape, dim in (("gain", (4,), 0), ("rows", (4, 4), 0), ("columns", (4, 4), 1)):
        if name == "columns" and not by_columns:
            continue
        local = torch.ones(shape, device="cpu" if devices is None else devices.device_type)
        if devices is not None:
            from torch.distributed.tensor import DTensor, Replicate, Shard

            placements = [Replicate() if dim_name == "dp_replicate" else Shard(dim) for dim_name in _names(devices)]
            local = DTensor.from_local(local, devices, placements, run_check=False)
        yield name, nn.Parameter(local)


def _names(devices: DeviceMesh) -> tuple[str, ...]:
    return devices.mesh_dim_names or ()


def _layout(devices: DeviceMesh) -> str:
    return " × ".join(f"{name} {size}" for name, size in zip(_names(devices), devices.shape, strict=True))
