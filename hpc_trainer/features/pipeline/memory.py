"""What a rank of a pipeline needs of a GPU's memory: each stage by itself, and the largest counts.

Activations of a stage are those of one micro-batch times the micro-batches that have gone forward and not yet back:
with 1f1b `stages - index` of them at most, with gpipe all of a step. Besides, torch keeps a place for what comes from
the neighbours, activations and gradients, for each micro-batch of a step.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from hpc_trainer.config.mesh import mesh_shape
from hpc_trainer.config.schema.parallel import PipelineSchedule, Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.datasets.protocol import MapDataset
from hpc_trainer.features.memory_estimate.estimate import (
    MemoryEstimate,
    bytes_of_moments,
    bytes_of_update,
    measure,
    share_with_host,
    sizes_here,
    update,
)
from hpc_trainer.features.memory_estimate.shares import find_shares
from hpc_trainer.features.pipeline.cut import Between, Stage, keep, stages_of
from hpc_trainer.features.pipeline.step import run_parts
from hpc_trainer.training.ability import Building, abilities
from hpc_trainer.training.build import build_dataset, build_model, make_optimizer
from hpc_trainer.training.optim.decay import decaying
from hpc_trainer.training.parallel.fully_sharded import gathered_dtype, share_of_fp32
from hpc_trainer.training.tensor_bytes import num_bytes


def largest_stage(config: TrainConfig) -> MemoryEstimate:
    """The estimate of the rank that needs most. `config` is validated, with `parallel.pipeline_parallel` > 1.

    Raises:
        HpcTrainerError: the model or the data set cannot be built, or the model cannot be cut.
    """
    micro = config.train.given_micro_batch_size
    assert micro is not None, "micro_batch_size=auto and stages are refused together"
    dataset = build_dataset(config, "train")
    samples = dataset.__getitems__(range(1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs, targets = (torch.empty((micro, *each.shape[1:]), dtype=each.dtype) for each in samples)
        model = build_model(config, dataset)
        stages = stages_of(
            model, config.parallel.pipeline_parallel, inputs=Between(tuple(inputs.shape), inputs.dtype),
            precision=config.precision, device_type="cpu",
            param_dtype=gathered_dtype(config.parallel),
        )  # fmt: skip
        decays = frozenset(decaying(model).values())
        found = [_estimate(config, dataset, stage, inputs, targets, decays) for stage in stages]
    seen: set[str] = set()
    checkpoint = 0
    for estimate, sizes in found:
        new = sum(size for name, size in sizes.items() if name not in seen)
        checkpoint += int(estimate.checkpoint * (new / max(1, sum(sizes.values()))))
        seen |= sizes.keys()
    largest = max((estimate for estimate, _ in found), key=_total)
    return dataclasses.replace(largest, checkpoint=checkpoint)


def _total(estimate: MemoryEstimate) -> int:
    parts = (estimate.weights, estimate.gradients, estimate.optimizer, estimate.average, estimate.gathered)
    return sum(parts) + estimate.activations + estimate.update


def _estimate(
    config: TrainConfig, dataset: MapDataset, stage: Stage, inputs: torch.Tensor, targets: torch.Tensor,
    decays: frozenset[bool],
) -> tuple[MemoryEstimate, dict[str, int]]:  # fmt: skip
    """(of one stage, bytes of its tensors by name)."""
    train, accum = config.train, config.train.grad_accum_steps or 1
    batch = [inputs if stage.is_first else torch.empty(stage.inputs.shape, dtype=stage.inputs.dtype)]
    batch[0].requires_grad_(not stage.is_first)
    if stage.is_last:
        batch.append(targets)
    model = build_model(config, dataset)
    loss = _StageLoss(model, train.label_smoothing)
    active = abilities(config)
    building = Building(config=config, device=torch.device("cpu"), dataset=dataset, abilities=active)
    for each in active:
        each.see_whole(model, building)
        each.on_loss(loss, building)
    shape = mesh_shape(config.parallel, config.hardware.world_size)
    shares = find_shares(model, shape)
    keep(model, stage)
    run_parts(model, stage, config.precision, channels_last=False)
    found = measure(config, loss, batch, shares)
    activations = found.kept * (_num_in_flight(config, stage) - 1) + found.peak
    optimizer = make_optimizer(building, model, decays)
    made, note = update(config, optimizer)
    places = [] if stage.is_first else [stage.inputs]
    places += [] if stage.is_last else [stage.outputs]
    between = sum(torch.empty(each.shape, dtype=each.dtype).nbytes for each in places)
    handed = (inputs.nbytes if stage.is_first else 0) + (targets.nbytes if stage.is_last else 0)
    # Of this rank, before FSDP cuts it; and of all ranks of the stage together, as a checkpoint has it.
    weights, buffers = shares.num_bytes(model.parameters()), num_bytes(model.buffers())
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    of_all = bytes_of_moments(model, optimizer, is_guess=note is not None)
    moments = sum(size // shares.share_of(weight) for weight, size in of_all.items())
    on_device, host = share_with_host(
        config, moments // shape.dp_shard, sizes_here(model, shares, shape.dp_shard),
        moments / max(1, shares.num_bytes(trained)),
    )  # fmt: skip
    activations += accum * (between + handed)
    # A pipeline's stage stays whole from its first micro-batch to its last.
    gathered = int(weights * share_of_fp32(config.parallel.param_dtype)) * (config.parallel.strategy is Strategy.fsdp)
    held = shares.num_bytes(trained) // shape.dp_shard + on_device
    averaged = train.ema_decay is not None
    words = f"stage {stage.index} of 0 to {stage.num_stages - 1} needs most"
    return MemoryEstimate(
        micro_batch_size=inputs.shape[0],
        weights=weights // shape.dp_shard + buffers,
        # With FSDP too: a pipeline adds micro-batches up before it shares them out.
        gradients=int(shares.num_bytes(trained) * share_of_fp32(config.parallel.reduce_dtype)),
        optimizer=on_device,
        host=host,
        average=(weights // shape.dp_shard + buffers) * averaged,
        activations=activations,
        gathered=gathered,
        update=bytes_of_update(
            config, optimizer, shares, made // shape.dp_shard, held=held, gone=activations + gathered
        ),
        checkpoint=num_bytes(model.parameters()) * (1 + averaged)
        + buffers * (1 + shape.num_data_ranks * shape.tp + averaged)
        + sum(of_all.values()),
        note=f"{words}; {note}" if note else words,
    ), {name: each.nbytes for name, each in model.state_dict().items()}


def _num_in_flight(config: TrainConfig, stage: Stage) -> int:
    accum = config.train.grad_accum_steps or 1
    if config.parallel.pipeline_schedule is PipelineSchedule["gpipe"]:
        return accum
    return min(accum, stage.num_stages - stage.index)


class _StageLoss(nn.Module):
    """A number to go back from: of the last stage the loss."""

    def __init__(self, model: nn.Module, label_smoothing: float) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        value: torch.Tensor = self.model(inputs)
        if targets is None:
            return value.sum()
        return functional.cross_entropy(value.flatten(0, -2), targets.flatten(), label_smoothing=self.label_smoothing)
