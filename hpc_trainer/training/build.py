"""What a run trains, built from its configuration: data, model, how ranks share it, optimizer, and the kind of step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_trainer.config.schema.data import CustomDataConfig
from hpc_trainer.config.schema.model import CustomModelConfig
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import locate
from hpc_trainer.datasets.own import as_map_dataset
from hpc_trainer.datasets.protocol import SPLITS, MapDataset, Split
from hpc_trainer.training import rollback
from hpc_trainer.training.ability import Ability, Building, abilities, overridden
from hpc_trainer.training.comm_hooks import add_comm_hook
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.data.target_shares import groups_to_count
from hpc_trainer.training.early_stop import EarlyStop
from hpc_trainer.training.fit_batch import BatchSizes, batch_sizes
from hpc_trainer.training.logical import LogicalStepper
from hpc_trainer.training.optim.build import build_optimizer, chosen_settings
from hpc_trainer.training.optim.trial import try_on_parts
from hpc_trainer.training.optim_place import place_optimizer
from hpc_trainer.training.parallel.fully_sharded import check_formats
from hpc_trainer.training.parallel.mesh import Mesh, build_mesh
from hpc_trainer.training.parallel.mesh_step import MeshStepper
from hpc_trainer.training.parallel.share import StopVote, VotingLoss, share
from hpc_trainer.training.precision.formats import build_scaler, set_precision
from hpc_trainer.training.rng import seed_everything
from hpc_trainer.training.rounds import needs_ddp, with_rounds
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper
from hpc_trainer.training.tensor_parallel import find_plan, share_layers

if TYPE_CHECKING:
    from hpc_trainer.training.build_stage import Stages


@dataclass(slots=True, kw_only=True)
class Task:
    """Everything built from the configuration: what is trained, on what, and how one step goes."""

    state: TrainState
    stepper: Stepper
    order: BatchOrder
    sizes: BatchSizes
    train_set: MapDataset
    eval_set: MapDataset
    mesh: Mesh
    abilities: list[Ability]
    after_step: list[Callable[[int], None]]

    def close(self) -> None:
        """Removes what was kept outside of the run's folder."""
        for each in self.abilities:
            each.close()


def build_task(config: TrainConfig, run: RunContext) -> Task:
    """Builds data, model, optimizer and step. Collective: weights become rank 0's.

    Raises:
        ConfigError: a `_target_` is not trusted or leads nowhere, or a value does not fit the model.
        DataError: the data set is missing or too small.
    """
    mesh = build_mesh(config.parallel, run.group)
    set_precision(config.precision)
    try_on_parts(config, mesh)
    train_set, eval_set = (build_dataset(config, split) for split in SPLITS)
    run.describe(dataset=train_set, eval_dataset=eval_set)
    active = abilities(config)
    building = Building(config=config, device=run.device, dataset=train_set, mesh=mesh, run=run)
    loss, stages = _build_loss(config, building, mesh, active)
    with contextlib.ExitStack() as trying:
        for each in active:
            trying.enter_context(each.trying())
        sizes = batch_sizes(config, run, loss, train_set)
    module, kind, needed = _share(config, run, mesh, loss, stages)
    state = _build_state(config, run, mesh, loss.model, module, stages)
    if kind is Stepper:
        kind, needed = with_rounds(config, state, run.group)
    stepper = kind(
        module=module,
        vote=StopVote(loss, run.group, mesh if stages is None else None),
        precision=config.precision,
        device=run.device,
        grad_accum_steps=sizes.grad_accum_steps,
        max_grad_norm=config.train.max_grad_norm,
        channels_last=config.train.channels_last,
        after_update=overridden(active, "after_update"),
        target_groups=groups_to_count(
            train_set, mesh, num_micro_batches=sizes.grad_accum_steps * (config.train.logical_ranks or 1)
        ),
        **needed,
    )
    for each in active:
        each.on_state(state, module, building)
    return Task(
        state=state,
        stepper=stepper,
        order=BatchOrder(len(train_set), config.train.global_batch_size, config.seed),
        sizes=sizes,
        train_set=train_set,
        eval_set=eval_set,
        mesh=mesh,
        abilities=active,
        after_step=overridden(active, "after_step"),
    )


def _build_loss(
    config: TrainConfig, building: Building, mesh: Mesh, active: list[Ability]
) -> tuple[VotingLoss, Stages | None]:
    """The model, as this rank holds it, with its loss; and how it was cut, where it was."""
    train, device, dataset = config.train, building.device, building.dataset
    seed_everything(config.seed)  # the same weights on every rank and for every number of ranks
    model = build_model(config, dataset)
    for each in active:
        each.see_whole(model, building)
    plan = find_plan(model, mesh)
    stages = _cut_into_stages(config, mesh, model, dataset, device.type)
    model = model.to(device)
    share_layers(model, mesh, plan)
    seed_everything(config.seed, mesh.stream)  # but dropout of its own on each that reads samples of its own
    if train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for each in active:
        each.on_device(model, building)
    loss = VotingLoss(model, label_smoothing=train.label_smoothing, chunk_size=train.loss_chunk_size).to(device)
    for each in active:
        each.on_loss(loss, building)
    return loss, stages


def _build_state(
    config: TrainConfig, run: RunContext, mesh: Mesh, model: nn.Module, module: nn.Module, stages: Stages | None
) -> TrainState:
    """`model` with its optimizer, on `module`, what ranks share it by. Collective."""
    train = config.train
    optimizer = build_optimizer(
        config.optim,
        model,
        share_state=config.parallel.zero1,
        trust=config.trust,
        whole=None if stages is None else stages.groups,
        mesh=mesh,
    )
    place_optimizer(optimizer, config.optim)
    return TrainState(
        model=model,
        optimizer=optimizer,
        scaler=build_scaler(config.precision, run.device.type),
        early_stop=None if train.early_stop.patience is None else EarlyStop(train.early_stop),
        guard=rollback.build_guard(config),
        more=add_comm_hook(module, config.parallel, seed=config.seed),
        settings=chosen_settings(config.optim, optimizer),
    )


def _cut_into_stages(
    config: TrainConfig, mesh: Mesh, model: nn.Module, dataset: MapDataset, device_type: str
) -> Stages | None:
    """Leaves this rank's stage of `model`, where there are any."""
    if mesh.shape.pp == 1:
        return None
    from hpc_trainer.training.build_stage import cut_out

    return cut_out(config, mesh, model, dataset, device_type)


def _share(
    config: TrainConfig, run: RunContext, mesh: Mesh, loss: VotingLoss, stages: Stages | None
) -> tuple[nn.Module, type[Stepper], dict[str, Any]]:
    """(the loss, or a stage, as ranks share it; the kind of step; what only that kind needs). Collective."""
    if stages is not None:
        from hpc_trainer.training.pipeline import PipelineStepper

        stage, of_stage = stages.share(config, mesh, loss.model)
        return stage, PipelineStepper, of_stage
    count = config.train.logical_ranks
    is_shared = count is None and needs_ddp(config)
    module = share(
        loss,
        run.group,
        mesh,
        config.parallel if is_shared else dataclasses.replace(config.parallel, strategy=Strategy.none),
        deterministic=config.train.deterministic,
    )
    if count is not None:
        return module, LogicalStepper, {"group": run.group, "num_logical": count, "seed": config.seed}
    return (module, Stepper, {}) if mesh.model_group is None else (module, MeshStepper, {"mesh": mesh})


def build_dataset(config: TrainConfig, split: Split) -> MapDataset:
    """The data set that `data=` chose; `split` is `train` or `eval`.

    Raises ConfigError: a person's own is none that the loop can take (datasets/own.py).
    """
    builder = locate("data._target_", config.data._target_, config.trust)
    if isinstance(config.data, CustomDataConfig):
        return as_map_dataset(builder(split=split, **config.data.kwargs), config.data._target_, split)
    dataset: MapDataset = builder(config.data, split)
    return dataset


def build_model(config: TrainConfig, dataset: MapDataset) -> nn.Module:
    """The model that `model=` chose, for the shape of the data.

    Raises:
        ConfigError: a `_target_` is not trusted or leads nowhere, or the model has not what `train` asks of it.
    """
    target = locate("model._target_", config.model._target_, config.trust)
    shape = {"input_shape": dataset.input_shape, "num_classes": dataset.num_classes}
    if isinstance(config.model, CustomModelConfig):
        model: nn.Module = target(**shape, **config.model.kwargs)
    else:
        model = target(config.model, **shape)
    check_formats(model, config.parallel)
    return model
