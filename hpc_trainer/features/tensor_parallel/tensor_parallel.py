"""Tensor parallel: ranks share each layer, by the model's own plan (Shoeybi et al. 2019), through torch's own styles.

A model that can be sharded has a method

    def tensor_parallel_plan(self) -> dict[str, torch.distributed.tensor.parallel.ParallelStyle]

which says for each layer, by its name or a pattern as `blocks.*.mlp_in`, how it is cut, in the form that torch's
`parallelize_module` takes. Between layers that it names, activations are plain tensors, whole and alike on all
tensor-parallel ranks. Layers that it does not name are copied.

On a mesh no rank has the whole gradient norm: here ranks also agree on clipping and overflow.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.rank_memory import Shares
from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.optim.build import counts_here, place_gradients, scale_down
from hpc_trainer.training.parallel.fully_sharded import broadcast, share_buffers
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


def clip_grad_norm(weights: Sequence[nn.Parameter], counted: Sequence[bool], max_norm: float | None) -> torch.Tensor:
    """Scale the gradients down to `max_norm`; return their earlier L2 norm. Collective: one all-reduce of one number.

    With `max_norm` None the gradients are not changed. The norm is a plain scalar, with the same bits on all ranks.
    torch's clip_grad_norm_ takes one mesh; it fetches norms one by one if their placement differs from that of the
    first.

    Args:
        counted: `counts_here` of each weight.
    """
    gradients = [local_tensor(weight.grad) for weight in weights if weight.grad is not None]
    mine = [
        local_tensor(weight.grad)
        for weight, is_mine in zip(weights, counted, strict=True)
        if is_mine and weight.grad is not None
    ]
    norm = nn.utils.get_total_norm(mine) if mine else torch.zeros((), device=weights[0].device)
    square = norm.double().square()  # in fp32 a norm of 1e20, which clipping can mend, would be infinite
    dist.all_reduce(square)
    total = square.sqrt().to(norm.dtype)
    if max_norm is not None:
        scale_down(gradients, total, max_norm)
    return total


def agree_on_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Make an overflow on one rank an overflow on all, after `unscale_`. Collective.

    torch 2.13 agrees by the placement of the first weight: if it is replicated (a norm, say), not with tensor-parallel
    neighbours.
    """
    for value in scaler._found_inf_per_device(optimizer).values():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)


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
            f"parallel.tensor_parallel={mesh.shape.tp} shares layers out by a plan of the model, and {kind} has none. "
            "Give it a method `tensor_parallel_plan` (see docs/parallelism.md), or use model=gpt, model=vit_tiny or "
            "parallel.tensor_parallel=1."
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(model.parameters())):
        raise ConfigError(
            f"parallel.tensor_parallel={mesh.shape.tp} would split weights that {kind} ties: one parameter of two "
            "modules. Use one module in both places, as models/gpt.py does, or use parallel.tensor_parallel=1."
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


def divide(model: nn.Module, plan: Mapping[str, ParallelStyle], shares: Shares, count: int) -> None:
    """Record in `shares` the weights that are in `count` shards, and by hooks when divided layers run."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    divided = set[int]()
    for pattern, style in plan.items():
        for module in matching(model, pattern):
            if isinstance(style, ColwiseParallel):
                divided |= {id(weight) for weight in module.parameters(recurse=False)}
                module.register_forward_hook(partial(_entered, shares))
            elif isinstance(style, RowwiseParallel):
                divided |= {id(weight) for weight in module.parameters(recurse=False) if weight.ndim > 1}
                module.register_forward_hook(partial(_left, shares))
    shares.count, shares.divided = count, frozenset(divided)


def _entered(shares: Shares, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Count the activations from here on as divided, until the backward pass reaches this input."""
    shares.is_inside = True
    if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].requires_grad:
        inputs[0].register_hook(lambda _: setattr(shares, "is_inside", False))  # type: ignore[no-untyped-call]


def _left(shares: Shares, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Count the activations from here on as whole, until the backward pass reaches this output."""
    shares.is_inside = False
    if output.requires_grad:
        output.register_hook(lambda _: setattr(shares, "is_inside", True))  # type: ignore[no-untyped-call]


@dataclass(slots=True, kw_only=True)
class MeshStepper(Stepper):
    """Stepper whose weights are sharded among the ranks of `mesh`."""

    mesh: Mesh
    _counted: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        Stepper.__post_init__(self)
        self._counted = [counts_here(weight, self.mesh) for weight in self._weights]

    def _clip(self, state: TrainState) -> torch.Tensor | None:
        place_gradients(self._weights)
        if state.scaler.is_enabled():
            state.scaler.unscale_(state.optimizer)
            agree_on_overflow(state.scaler, state.optimizer)
        if self.max_grad_norm is None and not state.guard.is_on:
            return None
        return clip_grad_norm(self._weights, self._counted, self.max_grad_norm)

    def _share_buffers(self) -> None:
        share_buffers(self.module, self.mesh.data_groups())


class TensorParallelAbility(Ability):
    _plan: Mapping[str, ParallelStyle]

    def see_whole(self, model: nn.Module, building: Building) -> None:
        self._plan = find_plan(model, building.mesh)

    def on_device(self, model: nn.Module, building: Building) -> None:
        if building.run is None:
            divide(model, self._plan, building.shares, building.mesh.shape.tp)
        else:
            share_layers(model, building.mesh, self._plan)

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        """Return the stepper of a mesh; a pipeline's own stepper handles shards itself."""
        return partial(MeshStepper, mesh=building.mesh) if make is Stepper else make


ABILITY = TensorParallelAbility
