"""Construction of a run from its configuration: data, model, its sharing among ranks, optimizer, kind of step."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hpc_trainer.config.schema.data import CustomDataConfig
from hpc_trainer.config.schema.model import CustomModelConfig
from hpc_trainer.config.schema.task import CustomTaskConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import locate
from hpc_trainer.errors import ConfigError
from hpc_trainer.tasks.own import as_task
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.ability import Ability, Building, abilities, overridden
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.data.order import BatchOrder, BatchSizes
from hpc_trainer.training.data.own import as_map_dataset
from hpc_trainer.training.data.protocol import SPLITS, MapDataset, Split
from hpc_trainer.training.data.target_shares import groups_to_count
from hpc_trainer.training.optim.build import Recipe, build_optimizer, chosen_settings, decaying
from hpc_trainer.training.parallel.fully_sharded import check_formats
from hpc_trainer.training.parallel.mesh import Mesh, build_mesh
from hpc_trainer.training.parallel.share import StopVote, VotingLoss, share
from hpc_trainer.training.rng import seed_everything
from hpc_trainer.training.state import StepGuard, TrainState
from hpc_trainer.training.step import Stepper, build_scaler, set_precision


class HasShape(Protocol):
    """Shapes that a model is built for: those of a data set, or those that a checkpoint keeps of one."""

    @property
    def input_shape(self) -> tuple[int, ...] | None: ...

    @property
    def num_classes(self) -> int | None: ...


@dataclass(slots=True, kw_only=True)
class Training:
    """Everything built from the configuration: the state, the data, and how one step is done."""

    state: TrainState
    stepper: Stepper
    order: BatchOrder | None
    """Order of the training samples; None if they are a stream, which has its own order."""
    sizes: BatchSizes
    train_set: MapDataset
    eval_set: MapDataset
    eval_beside: Mapping[str, MapDataset]
    """Further held-out samples that each evaluation reports, by the name in their metrics."""
    mesh: Mesh
    task: Task
    abilities: Sequence[Ability]


@contextlib.contextmanager
def open_training(config: TrainConfig, run: RunContext) -> Iterator[Training]:
    """Build data, model, optimizer and step; at the end, close the features. Collective.

    All ranks get the weights of rank 0.

    Raises:
        ConfigError: a `_target_` is not trusted or cannot be found, or a value does not fit the model.
        DataError: the data set is missing or too small.
    """
    active = abilities(config)
    error: BaseException | None = None
    try:
        yield _build_training(config, run, active)
    except BaseException as raised:
        error = raised
        raise
    finally:
        for ability in active:
            ability.close(error)


def _build_training(config: TrainConfig, run: RunContext, active: Sequence[Ability]) -> Training:
    mesh = build_mesh(config.parallel, run.group)
    set_precision(config.precision)
    _prepare_node(config, run)
    for ability in active:
        ability.begin(mesh, run)
    task = build_task(config)
    train_set, eval_set = (build_dataset(config, split, task, active) for split in SPLITS)
    beside = {
        name: _with_features(dataset, "eval", active)
        for eval_sets in overridden(active, "eval_sets")
        for name, dataset in eval_sets(task).items()
    }
    run.describe(
        dataset=train_set, eval_dataset=eval_set, **{f"eval_{name}": dataset for name, dataset in beside.items()}
    )
    building = Building(
        config=config, device=run.device, task=task, dataset=train_set, eval_set=eval_set, mesh=mesh, run=run,
        abilities=active,
    )  # fmt: skip
    loss, decays = build_loss(building)
    sizes = building.sizes = _find_sizes(building, loss)
    module = _share(building, run, loss)
    optimizer = make_optimizer(building, loss.model, decays)
    state = TrainState(
        model=loss.model,
        optimizer=optimizer,
        scaler=build_scaler(config.precision, run.device.type),
        guard=StepGuard(config.train.max_skipped_steps),
        settings=chosen_settings(optimizer),
    )
    stream, order = getattr(train_set, "stream", None), None
    if stream is None:
        order = BatchOrder(len(train_set), config.train.global_batch_size, config.seed)
    else:
        state.more["stream"] = stream
    stepper = _build_stepper(building, run, state, loss, module, sizes)
    for ability in active:
        ability.on_state(state, module, building)
    return Training(
        state=state,
        stepper=stepper,
        order=order,
        sizes=sizes,
        train_set=train_set,
        eval_set=eval_set,
        eval_beside=beside,
        mesh=mesh,
        task=task,
        abilities=active,
    )


def _build_stepper(
    building: Building, run: RunContext, state: TrainState, loss: VotingLoss, module: nn.Module, sizes: BatchSizes
) -> Stepper:
    """Return what does one step: an ability's own kind of step if there is one, with the hooks of all abilities."""
    config, active, task = building.config, building.abilities, building.task
    make: Callable[..., Stepper] = Stepper
    for ability in active:
        make = ability.stepper(make, state, building)
    return make(
        module=module,
        vote=StopVote(loss, run.group, building.mesh),
        precision=config.precision,
        device=run.device,
        grad_accum_steps=sizes.grad_accum_steps,
        max_grad_norm=config.train.max_grad_norm,
        prepare=overridden(active, "inputs") if task.takes_pairs else (),
        before_clip=overridden(active, "before_clip"),
        after_update=overridden(active, "after_update"),
        target_groups=groups_to_count(task, building.dataset, building.mesh, num_micro_batches=sizes.grad_accum_steps),
        num_targets=task.num_targets,
    )


def _prepare_node(config: TrainConfig, run: RunContext) -> None:
    """Call `prepare_node` beside the builder of the data set (`data/protocol.py`), if there is one."""
    if not isinstance(config.data, CustomDataConfig):
        builder = locate("data._target_", config.data._target_, config.trust)
        prepare = getattr(sys.modules[builder.__module__], "prepare_node", None)
        if prepare is not None:
            for line in prepare(config.data, run.beat, lambda: run.stop.is_set):
                print(line, flush=True)


def build_loss(building: Building, model: nn.Module | None = None) -> tuple[VotingLoss, Collection[bool]]:
    """Return this rank's model with its loss, and the weights of the whole model that decay. Collective in a run.

    Args:
        building: the parts that are built already.
        model: the whole model without content, in an estimate; None to build the model here.
    """
    config, device = building.config, building.device
    seed_everything(config.seed)  # the same weights on every rank, for any number of ranks
    if model is None:
        model = build_model(config, building.dataset)
    for ability in building.abilities:
        ability.see_whole(model, building)
    decays = frozenset(decaying(model).values())
    for ability in building.abilities:
        ability.cut(model, building)
    if building.run is not None:  # tensors without content cannot move
        model = model.to(device)
    for ability in building.abilities:
        ability.on_device(model, building)
    # Dropout differs between ranks that read different samples. After all groups of DTensors, which draw numbers too.
    seed_everything(config.seed, building.mesh.stream)
    loss = VotingLoss(model, building.task, device=device)
    for ability in building.abilities:
        ability.on_loss(loss, building)
    return loss, decays


def _find_sizes(building: Building, loss: VotingLoss) -> BatchSizes:
    """Determine the batch sizes: those of the configuration, or those that features choose. Collective."""
    sizes = BatchSizes.given(building.config.train)
    with contextlib.ExitStack() as trying:
        for ability in building.abilities:
            trying.enter_context(ability.trying())
        for ability in building.abilities:
            sizes = ability.sizes(sizes, loss, building)
    return sizes


def make_optimizer(
    building: Building, model: nn.Module, decays: Collection[bool] | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer of `model` from configuration and features; args as in `build_optimizer`. Collective."""

    def change(recipe: Recipe) -> Recipe:
        for ability in building.abilities:
            recipe = ability.optimizer(recipe, model, building)
        for ability in building.abilities:
            recipe = ability.around_optimizer(recipe, model, building)
        return recipe

    config = building.config
    return build_optimizer(config.optim, model, decays=decays, change=change)


def _share(building: Building, run: RunContext, loss: VotingLoss) -> nn.Module:
    """Return the module through which ranks share `loss`. Collective."""
    config = building.config
    modules = (ability.share(loss, building) for ability in building.abilities)
    module = next((shared for shared in modules if shared is not None), None)
    if module is not None:
        return module
    return share(loss, run.group, building.mesh, config.parallel, deterministic=config.train.deterministic)


def build_task(config: TrainConfig) -> Task:
    """Build the task that `task=` chose.

    Raises:
        ConfigError: its `_target_` is not trusted, cannot be found, or does not make a task.
    """
    target = locate("task._target_", config.task._target_, config.trust)
    if isinstance(config.task, CustomTaskConfig):
        return as_task(target(**config.task.kwargs), config.task)
    task: Task = target(config)
    return task


def build_dataset(
    config: TrainConfig, split: Split, task: Task, active: Sequence[Ability] = (),
    fed: Mapping[str, Any] | None = None,
) -> MapDataset:  # fmt: skip
    """Build the data set that `data=` chose, with batches as `task` takes them, and apply the changes of features.

    Args:
        fed: `classes` and `preprocessing` of a trained model that is evaluated on these data; None in training.

    Raises:
        ConfigError: the loop (training/data/own.py) or a feature cannot use the data set of the user.
    """
    builder = locate("data._target_", config.data._target_, config.trust)
    dataset: MapDataset
    if isinstance(config.data, CustomDataConfig):
        dataset = as_map_dataset(builder(split=split, **config.data.kwargs), config.data._target_, split, task)
    else:
        more = (config.task,) if config.data.takes_task else ()
        named = {"fed": fed} if fed is not None and config.data.takes_fed else {}
        dataset = builder(config.data, split, *more, **named)
    return _with_features(dataset, split, active)


def _with_features(dataset: MapDataset, split: Split, active: Sequence[Ability]) -> MapDataset:
    for ability in active:
        dataset = ability.samples(dataset, split)
    return dataset


def build_model(config: TrainConfig, dataset: HasShape) -> nn.Module:
    """Build the model that `model=` chose, for the shape of the data.

    Raises:
        ConfigError: a `_target_` is not trusted or cannot be found, or the model lacks something that `train` needs.
    """
    target = locate("model._target_", config.model._target_, config.trust)
    shape = {"input_shape": dataset.input_shape, "num_classes": dataset.num_classes}
    if isinstance(config.model, CustomModelConfig):
        wanted = {name: value for name, value in shape.items() if value is not None and _takes(target, name)}
        model: nn.Module = target(**wanted, **config.model.kwargs)
    else:
        unknown = next((name for name, value in shape.items() if value is None), None)
        if unknown is not None:
            raise ConfigError(
                f"model={config.model.name} is built for the data's {unknown}, and "
                f"data._target_={config.data._target_} does not tell it. Give the data set an attribute {unknown}, or "
                "use model=custom."
            )
        model = target(config.model, **shape)
    check_formats(model, config.parallel)
    return model


def _takes(target: Any, name: str) -> bool:
    """Return True if a user's class or function takes an argument `name`, or if its signature is unknown."""
    try:
        arguments = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return True
    return name in arguments or any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
