"""Rules of pipeline parallelism: which models are cut, into how many stages, and how many micro-batches fill them."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.rank_rules import num_parts, whole_batch, with_batch
from hpc_trainer.config.schema.model import CustomModelConfig, GptConfig, ModelConfig, ResnetConfig
from hpc_trainer.config.schema.parallel import PipelineSchedule, Strategy
from hpc_trainer.config.schema.train import CompileScope, TrainConfig

_BLOCKS = {18: 8, 50: 16}
"""Of ResNets, by depth (He et al. 2015, table 1)."""


def pipeline_problems(config: TrainConfig) -> Iterator[str]:
    """What `parallel.pipeline_parallel` > 1 breaks, a line each. The mesh is right already."""
    parallel, train = config.parallel, config.train
    stages, named = parallel.pipeline_parallel, f"parallel.pipeline_parallel={parallel.pipeline_parallel}"
    blocks = num_blocks(config.model)
    if blocks is not None and stages > blocks:
        yield f"{named} must be at most the {blocks} blocks of model={config.model.name}. Use {blocks}."
    elif blocks is None and not isinstance(config.model, CustomModelConfig):
        yield (
            f"{named} cuts a model between its blocks, and model={config.model.name} has none. Use model=gpt, resnet18 "
            "or resnet50, a model of your own with pipeline_parts (hpc_trainer/models/parts.py), or "
            "parallel.pipeline_parallel=1."
        )
    if not train.is_batch_auto:
        yield from _micro_batches(config)
    if parallel.data_parallel_replicate > 1:
        yield (
            f"{named} goes with parallel.data_parallel_replicate=1 only, and it is {parallel.data_parallel_replicate}. "
            "Use 1."
        )
    if train.compile and train.compile_scope is CompileScope.model:
        yield (
            f"{named} compiles blocks: a stage is given its inputs by another rank, and has no loss but in the last. "
            "Use train.compile_scope=blocks, or train.compile=false."
        )
    elif train.compile and (parallel.tensor_parallel > 1 or parallel.strategy is Strategy.fsdp):
        other = "parallel=fsdp" if parallel.tensor_parallel == 1 else "parallel.tensor_parallel"
        yield (
            f"{named} with compiled blocks and {other} was never seen to train. Use train.compile=false, or "
            "parallel=pp with parallel.tensor_parallel=1."
        )
    if train.is_batch_auto:
        yield (
            f"{named} needs to know its micro-batches, and train.micro_batch_size=auto finds them by trials of the "
            f"whole model. Use train.grad_accum_steps={2 * stages} train.micro_batch_size=null."
        )
    if train.loss_chunk_size is not None:
        yield (
            f"{named} and train.loss_chunk_size={train.loss_chunk_size} do not go together yet. Use "
            "train.loss_chunk_size=null."
        )
    guard = train.guard
    for key, value, usual in (("on_spike", guard.on_spike, "none"), ("on_divergence", guard.on_divergence, "stop")):
        if value.value != usual:
            yield f"{named} and train.guard.{key}={value.value} do not go together yet. Use train.guard.{key}={usual}."
    if config.optim.in_backward:
        yield f"{named} and optim.in_backward=true do not go together yet. Use optim.in_backward=false."


def _micro_batches(config: TrainConfig) -> Iterator[str]:
    """1f1b fills all stages before the first micro-batch goes back: torch takes as many as there are, or more."""
    parallel, train = config.parallel, config.train
    parts, stages = num_parts(train, config.hardware, parallel), parallel.pipeline_parallel
    total, given = whole_batch(train, config.hardware, parallel), train.given_micro_batch_size
    if parallel.pipeline_schedule is not PipelineSchedule["1f1b"]:
        return
    if min(parts, total, given or 1, train.grad_accum_steps or 1) < 1:
        return
    if total % (parts * (given or 1) * (train.grad_accum_steps or 1)):  # another rule says so
        return
    whole = with_batch(train, config.hardware, parallel)
    micro, accum = whole.given_micro_batch_size or 1, whole.grad_accum_steps or 1
    if accum >= stages:
        return
    share = total // parts
    smaller = next((size for size in range(share // stages, 0, -1) if share % size == 0), None)
    ways = [] if smaller is None else [f"train.micro_batch_size={smaller} train.grad_accum_steps={share // smaller}"]
    larger = micro * stages * (1 if train.batch_per_rank else parts)
    ways += [f"train.global_batch_size={larger} train.grad_accum_steps={stages}"]
    yield (
        f"train.grad_accum_steps={accum} must be at least parallel.pipeline_parallel={stages} with "
        f"parallel.pipeline_schedule=1f1b: the micro-batches of a step are what fills the stages. Use "
        f"{', or '.join(ways)}."
    )


def num_blocks(model: ModelConfig) -> int | None:
    """What stages and FSDP cut between. None of a model that has none, or of which only its own code knows."""
    if isinstance(model, GptConfig):
        return model.num_layers
    return _BLOCKS.get(model.depth) if isinstance(model, ResnetConfig) else None
