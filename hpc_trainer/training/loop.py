"""The training loop: restore, then step, log, evaluate, save, until done or until all ranks agree to stop."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from hpc_trainer.config.lr_scaling import peak_lr
from hpc_trainer.config.schema.data import CustomDataConfig
from hpc_trainer.config.schema.model import CustomModelConfig
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import locate
from hpc_trainer.datasets.protocol import MapDataset
from hpc_trainer.training import rollback
from hpc_trainer.training.comm_hooks import add_comm_hook
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.device_batches import Batches, on_device
from hpc_trainer.training.early_stop import EarlyStop
from hpc_trainer.training.ema import build_ema
from hpc_trainer.training.evaluate import evaluate
from hpc_trainer.training.fit_batch import BatchSizes, batch_sizes
from hpc_trainer.training.float8 import use_float8
from hpc_trainer.training.flops import flops_per_sample, peak_flops
from hpc_trainer.training.loader import train_batches
from hpc_trainer.training.logical import LogicalStepper
from hpc_trainer.training.memory_report import MemoryReport
from hpc_trainer.training.mesh import Mesh, build_mesh
from hpc_trainer.training.mesh_step import MeshStepper
from hpc_trainer.training.optim import build_optimizer, chosen_settings
from hpc_trainer.training.optim_place import place_optimizer
from hpc_trainer.training.order import BatchOrder
from hpc_trainer.training.parallel import StopVote, VotingLoss, for_evaluation, share
from hpc_trainer.training.precision import build_scaler, set_precision
from hpc_trainer.training.recompute import recompute_blocks
from hpc_trainer.training.rng import seed_everything
from hpc_trainer.training.rounds import needs_ddp, with_rounds
from hpc_trainer.training.schedule import learning_rate
from hpc_trainer.training.speed import Speed
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper, StepResult
from hpc_trainer.training.tensor_parallel import share_layers

if TYPE_CHECKING:
    from hpc_trainer.training.compile_cache import CompileCache


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
    compile_cache: CompileCache | None = None


def train(config: TrainConfig, run: RunContext) -> None:
    """Trains until `train.num_steps`, or until any rank was asked to stop. Collective. The `main` of most runs.

    However it ends, everything is saved: started again it goes on with the same bits.
    """
    with MemoryReport(config=config, run=run) as memory:
        task = build_task(config, run)
        try:
            _train(config, run, task, memory)
        finally:
            if task.compile_cache is not None:
                task.compile_cache.close()


def _train(config: TrainConfig, run: RunContext, task: Task, memory: MemoryReport) -> None:
    state = task.state
    memory.state, memory.micro_batch_size = state, task.sizes.micro_batch_size
    state.resume(run.restore(**state.objects()))
    rollback.begin(config, run, state)
    while True:
        batches = _batches(config, run, task)
        try:
            run.restore_rng()  # building a loader may draw from the random state
            with _profiled(config, run, task):
                _run_steps(config, run, task, batches, memory)
            return
        except rollback.GoBackError as back:
            trouble = back.trouble
        finally:
            batches.close()
        rollback.go_back(config, run, state, trouble)


def _batches(config: TrainConfig, run: RunContext, task: Task) -> Batches:
    """The batches from the state's step on, past those that rollbacks left out."""
    offset = task.state.guard.offset
    loaded = train_batches(
        task.train_set,
        task.order,
        first_step=task.state.step + offset,
        num_steps=config.train.num_steps + offset,
        rank=task.mesh.data_rank,
        world_size=task.mesh.num_data_ranks,
        micro_batch_size=task.sizes.micro_batch_size,
        grad_accum_steps=task.stepper.grad_accum_steps,
        num_workers=config.data.num_workers,
        logical_ranks=config.train.logical_ranks,
    )
    return on_device(loaded, run.device)


def _run_steps(config: TrainConfig, run: RunContext, task: Task, batches: Batches, memory: MemoryReport) -> None:
    state, num_steps = task.state, config.train.num_steps
    rollback.look(run, state.guard)  # the attempt before may have been stopped before it could go back
    is_evaluation_due = 0 < state.step < num_steps and _is_due(state.step, config.train.eval_every_steps)
    # The attempt before may have been stopped between save and evaluation, or between evaluation and end.
    if is_evaluation_due and not _goes_on(run, task, run.last_evaluation() or _evaluate(config, run, task)):
        return
    _mark_best(run, state)
    speed, peak = _speed(config, run, task, batches), peak_lr(config)
    while state.step < num_steps:
        lr = learning_rate(config.schedule, peak, state.step, num_steps)
        result = task.stepper.step(state, batches, lr=lr, wish_to_stop=run.stop.is_set)
        state.step += 1
        if task.compile_cache is not None:
            task.compile_cache.save_once()
        state.samples_seen += config.train.global_batch_size

        if _is_due(state.step, config.monitor.log_every_steps, num_steps):
            values = _step_metrics(run, result, lr) | speed.figures(state.step)
            run.log(state.step, values | state.guard.figures())
            state.guard.check(state.step, state.scaler)
            memory.tell(state.step)
        else:
            run.heartbeat(state.step)
        if state.step < num_steps and result.should_stop:
            run.agree_to_stop(state.step)
            run.saver.save_at_stop(state.step, state.objects())
            return
        if state.guard.sees_spikes and rollback.is_time_to_look(config, state.step):
            rollback.look(run, state.guard)
        if state.step < num_steps and run.should_save(state.step):
            run.save_in_background(state.step, **state.objects())  # before an evaluation: a kill in it loses nothing
        if state.step < num_steps and _is_due(state.step, config.train.eval_every_steps):
            if not _goes_on(run, task, _evaluate(config, run, task)):
                return
            _mark_best(run, state)
            speed.restart(state.step)

    run.save(state.step, **state.objects())  # before the evaluation: a kill in it loses nothing
    metrics = _evaluate(config, run, task)
    if metrics:
        run.finish(metrics)


def _goes_on(run: RunContext, task: Task, metrics: dict[str, float] | None) -> bool:
    """False if the evaluation was stopped, or if it was the one that ends the run. Collective."""
    state = task.state
    if metrics is None or state.early_stop is None:
        return metrics is not None
    state.early_stop.see(state.step, metrics)
    reason = run.group.broadcast(state.early_stop.reason_to_stop)
    if reason is not None:
        run.save(state.step, **state.objects())
        run.finish(metrics, reason)
    return reason is None


def _mark_best(run: RunContext, state: TrainState) -> None:
    """The best metric goes into the state, and the checkpoint of its step is kept. Collective."""
    if run.keep_best is not None:
        state.best_metric = run.saver.save_best(state.step, state.objects())


def build_task(config: TrainConfig, run: RunContext) -> Task:
    """Builds data, model, optimizer and step. Collective: weights become rank 0's.

    Raises:
        ConfigError: a `_target_` is not trusted or leads nowhere, or a value does not fit the model.
        DataError: the data set is missing or too small.
    """
    train_config, device = config.train, run.device
    mesh = build_mesh(config.parallel, run.group)
    set_precision(config.precision)
    train_set, eval_set = (build_dataset(config, split) for split in ("train", "eval"))
    run.describe(dataset=train_set, eval_dataset=eval_set)
    seed_everything(config.seed)  # the same weights on every rank and for every number of ranks
    model = build_model(config, train_set).to(device)
    share_layers(model, mesh)
    seed_everything(config.seed, mesh.stream)  # but dropout of its own on each that reads samples of its own
    if train_config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.precision.compute_dtype is Dtype.fp8:
        use_float8(model)
    loss = VotingLoss(model, label_smoothing=train_config.label_smoothing, chunk_size=train_config.loss_chunk_size).to(
        device
    )
    compile_cache = _compile(config, run, loss)
    recompute_blocks(model, train_config.recompute)
    sizes = batch_sizes(config, run, loss, train_set)
    strategy = config.parallel.strategy
    is_logical = train_config.logical_ranks is not None
    if is_logical or not needs_ddp(config):
        strategy = Strategy.none
    module = share(
        loss,
        run.group,
        deterministic=train_config.deterministic,
        strategy=strategy,
        mesh=mesh,
        bucket_cap_mb=config.parallel.bucket_cap_mb,
    )
    state = TrainState(
        model=model,
        optimizer=build_optimizer(config.optim, model, share_state=config.parallel.zero1, trust=config.trust),
        scaler=build_scaler(config.precision, device.type),
        early_stop=None if train_config.early_stop.patience is None else EarlyStop(train_config.early_stop),
        guard=rollback.build_guard(config),
        more=add_comm_hook(module, config.parallel, seed=config.seed),
    )
    place_optimizer(state.optimizer, config.optim)
    state.settings = chosen_settings(config.optim, state.optimizer)
    kind, needed = with_rounds(config, state, run.group)
    if is_logical:
        kind = LogicalStepper
        needed = {"group": run.group, "num_logical": train_config.logical_ranks, "seed": config.seed}
    elif mesh.model_group is not None:
        kind, needed = MeshStepper, {"mesh": mesh}
    stepper = kind(
        module=module,
        vote=StopVote(loss, run.group, mesh),
        precision=config.precision,
        device=device,
        grad_accum_steps=sizes.grad_accum_steps,
        max_grad_norm=train_config.max_grad_norm,
        channels_last=train_config.channels_last,
        **needed,
    )
    state.ema = build_ema(model, train_config.ema_decay)  # after the weights became rank 0's
    order = BatchOrder(len(train_set), train_config.global_batch_size, config.seed)
    return Task(
        state=state,
        stepper=stepper,
        order=order,
        sizes=sizes,
        train_set=train_set,
        eval_set=eval_set,
        mesh=mesh,
        compile_cache=compile_cache,
    )


def _compile(config: TrainConfig, run: RunContext, loss: VotingLoss) -> CompileCache | None:
    """Collective."""
    if not config.train.compile:
        return None
    from hpc_trainer.training.compile_cache import open_cache  # late: both need torch._dynamo, as slow as torch
    from hpc_trainer.training.compiled import compile_step

    cache = open_cache(config, run)
    compile_step(loss, config.train)
    return cache


def build_dataset(config: TrainConfig, split: str) -> MapDataset:
    """The data set that `data=` chose; `split` is `train` or `eval`."""
    builder = locate("data._target_", config.data._target_, config.trust)
    if isinstance(config.data, CustomDataConfig):
        dataset: MapDataset = builder(split=split, **config.data.kwargs)
    else:
        dataset = builder(config.data, split)
    return dataset


def build_model(config: TrainConfig, dataset: MapDataset) -> nn.Module:
    """The model that `model=` chose, for the shape of the data."""
    target = locate("model._target_", config.model._target_, config.trust)
    shape = {"input_shape": dataset.input_shape, "num_classes": dataset.num_classes}
    if isinstance(config.model, CustomModelConfig):
        model: nn.Module = target(**shape, **config.model.kwargs)
    else:
        model = target(config.model, **shape)
    return model


def _is_due(step: int, every_steps: int, last_step: int | None = None) -> bool:
    return (every_steps > 0 and step % every_steps == 0) or step == last_step


def _evaluate(config: TrainConfig, run: RunContext, task: Task) -> dict[str, float] | None:
    """Evaluates and logs; None if all ranks agreed to stop meanwhile: everything is saved then."""
    step = task.state.step
    metrics = evaluate(
        for_evaluation(task.stepper.module, task.state.model) if task.state.ema is None else task.state.ema.module,
        task.eval_set,
        group=run.group,
        batch_size=task.sizes.eval_batch_size,
        precision=config.precision,
        should_stop=partial(run.vote_to_stop, step),
        num_shares=config.train.logical_ranks,
        seed=config.seed,
        step=step,
        mesh=task.mesh,
        max_rows=config.train.loss_chunk_size,
    )
    if metrics is None:
        run.agree_to_stop(step)
        run.saver.save_at_stop(step, task.state.objects())
        return None
    run.log(step, metrics)
    return metrics


def _step_metrics(run: RunContext, result: StepResult, lr: float) -> dict[str, float]:
    """Collective: the loss is the mean over all ranks. The one place in the loop that waits for the device."""
    metrics = {"loss": result.mean_loss(run.group), "lr": lr}
    if result.grad_norm is not None:
        metrics["grad_norm"] = result.grad_norm.item()
    return metrics


def _profiled(config: TrainConfig, run: RunContext, task: Task) -> contextlib.AbstractContextManager[None]:
    """Watches a window of steps, where `monitor.profile_steps` asks for it: on rank 0."""
    if not config.monitor.profile_steps or not run.is_rank_zero:
        return contextlib.nullcontext()
    from hpc_trainer.training.profiler import profiled

    return profiled(config, run.paths, task)


def _speed(config: TrainConfig, run: RunContext, task: Task, batches: Batches) -> Speed:
    peak = peak_flops(config, run.device) if run.is_rank_zero else None  # rank 0 logs
    return Speed(
        task.state.step,
        batches,
        batch_size=config.train.global_batch_size,
        peak_flops=None if peak is None else peak * run.world_size,
        count_flops=lambda: flops_per_sample(lambda: build_model(config, task.train_set), batches.example or ()),
    )
