"""Tensor parallel: ranks share each layer, by the model's own plan (Shoeybi et al. 2019), through torch's own styles.

A model that can be sharded has a method

    def tensor_parallel_plan(self) -> dict[str, torch.distributed.tensor.parallel.ParallelStyle]

which says for each layer, by its name or a pattern as `blocks.*.mlp_in`, how it is cut: what torch's
`parallelize_module` takes. Between layers that it names, activations are plain tensors, whole and alike on all
tensor-parallel ranks. Layers that it does not name are copied.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from hpc_trainer.errors import ConfigError
from hpc_trainer.training.parallel.fully_sharded import broadcast
from hpc_trainer.training.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


def find_plan(model: nn.Module, mesh: Mesh) -> dict[str, ParallelStyle]:
    """Return how the layers of `model`, which is whole, are sharded; {} without tensor-parallel ranks. Not collective.

    Raises:
        ConfigError: the model has no plan, or the plan does not fit the model.
    """
    if mesh.shape.tp == 1:
        return {}
    kind, method = type(model).__name__, getattr(model, "tensor_parallel_plan", None)
    if not callable(method):
        raise ConfigError(
            f"parallel.tensor_parallel={mesh.shape.tp} shares layers out by the model's plan, and {kind} has none. "
            "Give it a method `tensor_parallel_plan` (see docs/parallelism.md), or use model=gpt, "
            "model=vit_tiny or parallel.tensor_parallel=1."
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(model.parameters())):
        raise ConfigError(
            f"parallel.tensor_parallel={mesh.shape.tp} would part weights that {kind} ties: one parameter of two "
            "modules. Tie by use, as models/gpt.py does, or use parallel.tensor_parallel=1."
        )
    plan: dict[str, ParallelStyle] = method()
    for pattern in plan:
        if not any(True for _ in matching(model, pattern)):
            raise ConfigError(f"{kind}.tensor_parallel_plan does not fit the model: it has no layer {pattern!r}.")
    return plan


def matching(model: nn.Module, pattern: str) -> Iterator[nn.Module]:
    """Yield the modules that a name of a plan means, as in torch's parallelize_module: a pattern for each level."""
    wanted = pattern.split(".")
    for name, module in model.named_modules():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatch.fnmatch, parts, wanted)):
            yield module


def share_layers(model: nn.Module, mesh: Mesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Shard the layers of `model`, or of a stage of it, among tensor-parallel ranks, in place, if there are any.

    Weights become those of the first rank of the stage. Then all of them become DTensors, so build the optimizer
    afterwards. Call this before recomputation, FSDP and compilation. Collective.

    Args:
        plan: `find_plan` of the whole model.

    Raises:
        ConfigError: the plan does not fit the model.
    """
    tp = mesh.dim("tp")
    if tp is None:
        return
    from torch.distributed.tensor.parallel import parallelize_module

    # Here, while they are whole: afterwards no rank has another's shard.
    whole = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    for group in mesh.groups_of_stage():
        broadcast(whole, group)
    here = {pattern: style for pattern, style in plan.items() if any(True for _ in matching(model, pattern))}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Pp]arallelize plan.*|.*could not be resolved.*")
        try:
            parallelize_module(model, tp, here, src_data_rank=None)
        except (UserWarning, NotImplementedError, ValueError) as error:
            raise ConfigError(f"{type(model).__name__}.tensor_parallel_plan does not fit the model: {error}") from error
    _copy_rest(model, tp)


def _copy_rest(model: nn.Module, tp: DeviceMesh) -> None:
    """Replicate layers that the plan does not name, as DTensors: optimizers expect one kind of weight."""
    from torch.distributed.tensor import DTensor, distribute_module

    for name, module in model.named_modules():
        if all(isinstance(weight, DTensor) for weight in module.parameters(recurse=False)):
            continue
        if any(True for _ in module.children()):
            own = ", ".join(key for key, _ in module.named_parameters(recurse=False))
            raise ConfigError(
                f"{type(model).__name__}: {name or 'the model itself'} holds parameters of its own ({own}) beside "
                "layers, and a tensor-parallel plan cannot name them. Put them into a module of their own."
            )
        distribute_module(module, tp, None, _as_copies, _as_plain)


def _as_copies(module: nn.Module, inputs: Any, tp: DeviceMesh) -> Any:
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    return tuple(
        DTensor.from_local(value, tp, (Replicate(),), run_check=False)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        else value
        for value in inputs
    )


def _as_plain(module: nn.Module, outputs: Any, tp: DeviceMesh) -> Any:
    from torch.distributed.tensor import DTensor

    return outputs.to_local() if isinstance(outputs, DTensor) else outputs
