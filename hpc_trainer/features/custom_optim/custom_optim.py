"""`optim=custom`: a user's optimizer; it is first tried on small sharded weights, and its bad steps are undone."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hpc_trainer.config.mesh import mesh_shape
from hpc_trainer.config.schema.optim import CustomOptimConfig
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import locate
from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.runtime.tensors import is_sharded, local_tensor, read_late
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.optim.build import LR_FACTOR, Group, Recipe, begin_momenta, build_optimizer
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def recipe_of(config: CustomOptimConfig, recipe: Recipe, trust: Sequence[str] = ()) -> Recipe:
    """Return the groups of `recipe` with the class of `optim._target_`.

    Raises:
        ConfigError: now or when the optimizer is made: the target does not exist, is not trusted, or refuses its
            arguments.
    """
    kind: Any = locate("optim._target_", config._target_, trust)

    def make(groups: list[Group]) -> torch.optim.Optimizer:
        try:
            built: torch.optim.Optimizer = kind(groups, lr=config.lr, **config.kwargs)
        except ConfigError:  # a ConfigError is a ValueError too
            raise
        except (ValueError, TypeError) as error:
            raise _refusal(config, error) from error
        _check(config, built)
        begin_momenta(built)
        return built

    return Recipe(recipe.groups, make)


def _refusal(config: CustomOptimConfig, error: Exception) -> ConfigError:
    """Return the error of the optimizer's class, with the arguments that it was given."""
    said = str(error).rstrip(".")
    fix = "It is built as Class(groups, lr=optim.lr, **optim.kwargs): give it arguments that it takes."
    if config._target_.rpartition(".")[2] == "Muon":
        fix = "Use optim=muon, which updates all weights that are not hidden matrices by AdamW."
    return ConfigError(f"{_named(config)}: {said}. {fix}")


def _check(config: CustomOptimConfig, built: Any) -> None:
    """Check the object that `_target_` has built.

    Raises:
        ConfigError: it is not an optimizer, its steps need a closure, or it lacks the weight decay that is configured.
    """
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigError(
            f"{_named(config)} makes a {type(built).__name__}, which is not a torch.optim.Optimizer. Name a class that "
            "is."
        )
    closure = inspect.signature(type(built).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{_named(config)} needs a closure in each step, to compute the loss again, and the loop computes it once. "
            "Use optim=adamw."
        )
    if config.weight_decay and "weight_decay" not in built.defaults:
        raise ConfigError(
            f"optim.weight_decay={config.weight_decay:g}: {config._target_} has no weight_decay among its defaults: "
            "nothing would decay. Use optim.weight_decay=0."
        )


def _named(config: CustomOptimConfig) -> str:
    given = f" optim.kwargs={config.kwargs}" if config.kwargs else ""
    return f"optim._target_={config._target_}{given}"


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
    """Run `try_on_parts` in a process that is not a rank: nothing is sent. Raises ConfigError."""
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


# Keys of a group that are not state here: weights are restored separately, and the loop sets the rate before each step.
_NOT_STATE = ("params", "lr")
_MISSING = object()

Undo = Callable[[], Any]
Node = dict[Any, Any]
"""A dict of the optimizer: its whole state, the state of a weight, a group, or a dict inside one of those."""


class PutBack:
    """Wrapper that steps `optimizer`, and undoes steps that turn out to be bad.

    It restores what torch.optim.Optimizer.state_dict covers: `state` and the groups. Random numbers that a bad step
    has drawn are not drawn again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: torch.optim.Optimizer = weakref.proxy(optimizer)  # which holds this object by its hooks
        self._was_bad: Callable[[], bool] = lambda: False
        self._undo: list[Undo] = []
        optimizer.register_state_dict_pre_hook(lambda _: self.undo_if_bad())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self._undo.clear())

    @torch.no_grad()
    def undo_if_bad(self) -> None:
        """Restore what the host keeps if the last step was bad, before anything reads it."""
        if self._undo and self._was_bad():
            for undo in self._undo:
                undo()
        self._undo.clear()

    def step_unless(self, bad: torch.Tensor) -> None:
        """Take a step that changes nothing if `bad`, a bool scalar on the weights' device, is true.

        It waits for `bad` if the state holds values that cannot be copied: tensors in lists, objects.
        """
        self.undo_if_bad()
        before = [(node, dict(node)) for node in self._nodes()]
        leaves = [(node, key, value) for node, was in before for key, value in was.items() if key not in _NOT_STATE]
        if not all(isinstance(value, dict) or _can_copy(value) for _, _, value in leaves):
            if not bad:
                self._optimizer.step()
            return
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        kept = [(weight, _copied(weight)) for weight in weights]
        copies = [(node, key, value, _copied(value)) for node, key, value in leaves]
        self._optimizer.step()
        for weight, was in kept:
            _choose(bad, was, weight)
        self._undo = [undo for leaf in copies for undo in _put_back(*leaf, bad)]
        for node, was in before:
            self._undo += [partial(node.pop, key, None) for key in node.keys() - was.keys()]
        if self._undo:
            self._was_bad = read_late(bad)

    def _nodes(self) -> Iterator[Node]:
        open_nodes: list[Node] = [self._optimizer.state, *self._optimizer.param_groups]
        while open_nodes:
            node = open_nodes.pop()
            yield node
            open_nodes += [value for value in node.values() if isinstance(value, dict)]


def is_put_back(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if bad steps of the optimizer have to be undone and can be: all its state is in `state` and groups.

    It is False for ZeRO's, and for optimizers with a state_dict of their own: for these the host waits.
    """
    asks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    return not asks_itself and not hasattr(optimizer, "optim") and _tells_all(optimizer)


def _tells_all(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer.state_dict, "__func__", None) is torch.optim.Optimizer.state_dict


def _put_back(node: Node, key: Any, value: Any, was: Any, bad: torch.Tensor) -> Iterator[Undo]:
    """Undo one entry of the state if `bad`: at once on the device; on the host by the calls that this yields.

    Args:
        value: the entry before the step.
        was: copy of `value`.
    """
    now = node.get(key, _MISSING)
    if isinstance(value, dict):
        if now is not value:
            yield partial(node.__setitem__, key, value)
    elif not isinstance(value, torch.Tensor):
        if type(now) is not type(was) or now != was:
            yield partial(node.__setitem__, key, was)
    elif value.device == bad.device and _is_alike(now, value):
        _choose(bad, was, now)
    elif now is not value or not torch.equal(value, was):
        yield partial(local_tensor(value).copy_, was)
        yield partial(node.__setitem__, key, value)


def _can_copy(value: Any) -> bool:
    """Return True for tensors whose elements do not overlap, and for numbers and strings, also in tuples and lists."""
    if isinstance(value, torch.Tensor):
        is_known = type(value) in (torch.Tensor, torch.nn.Parameter) or is_sharded(value)
        return is_known and value.layout is torch.strided and 0 not in value.stride()
    if isinstance(value, (tuple, list)):
        return all(_can_copy(item) and not isinstance(item, torch.Tensor) for item in value)
    return value is None or isinstance(value, (bool, int, float, complex, str))


@torch.no_grad()
def _copied(value: Any) -> Any:
    """Return a copy: of a DTensor this rank's shard; of a dict the dict itself, whose values are copied one by one."""
    if isinstance(value, torch.Tensor):
        return local_tensor(value).clone()
    return value if isinstance(value, dict) else copy.deepcopy(value)


def _is_alike(now: Any, value: torch.Tensor) -> bool:
    """Return True if `now` is the same tensor, or a new one that can be overwritten with its elements."""
    return now is value or (
        isinstance(now, torch.Tensor)
        and _can_copy(now)
        and (type(now), now.shape, now.dtype, now.device) == (type(value), value.shape, value.dtype, value.device)
    )


@torch.no_grad()
def _choose(bad: torch.Tensor, was: torch.Tensor, now: torch.Tensor) -> None:
    """Overwrite `now` with `was` if `bad` is true. The host reads nothing, and a NaN in `now` is overwritten."""
    part = local_tensor(now)
    torch.where(bad, was, part, out=part)


class CustomOptimAbility(Ability):
    @property
    def _optim(self) -> CustomOptimConfig:
        assert isinstance(self.config.optim, CustomOptimConfig)
        return self.config.optim

    def begin(self, mesh: Mesh, run: RunContext | None) -> None:
        if run is None:
            try_without_ranks(self.config)
        else:
            try_on_parts(self.config, mesh)

    def optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        return recipe_of(self._optim, recipe, self.config.trust)

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        may_skip = self.config.train.max_skipped_steps is not None and building.device.type == "cuda"
        if not may_skip or not is_put_back(state.optimizer):
            return make
        put_back = PutBack(state.optimizer)
        return partial(make, step_unless=lambda optimizer, bad: put_back.step_unless(bad))

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        """Keep only the configured keys of a group: other keys of such a class may be state of its own."""
        chosen = {"weight_decay", LR_FACTOR, *self._optim.kwargs}
        state.settings = [{key: group[key] for key in group.keys() & chosen} for group in state.settings]

    def memory(self, held: RankMemory, building: Building) -> None:
        may_skip = self.config.train.max_skipped_steps is not None and self.config.hardware.device_type == "cuda"
        held.is_put_back = may_skip and is_put_back(held.optimizer)


ABILITY = CustomOptimAbility
