"""Rules of pipeline parallelism: which models are cut, into how many stages, and how many micro-batches fill them."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.rank_rules import num_parts, with_batch
from hpc_trainer.config.schema.model import CustomModelConfig, GptConfig, ModelConfig, ResnetConfig
from hpc_trainer.config.schema.parallel import PipelineSchedule
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import TrainConfig

_BLOCKS = {18: 8, 50: 16}
"""Of ResNets, by depth (He et al. 2015, table 1)."""


def pipeline_problems(config: TrainConfig) -> Iterator[str]:
    """What `parallel.pipeline_parallel` > 1 breaks, a line each. The mesh is right already."""
    parallel, train = config.parallel, config.train
    stages, named = parallel.pipeline_parallel, f"parallel.pipeline_parallel={parallel.pipeline_parallel}"
    blocks = _num_blocks(config.model)
    is_fp8 = config.precision.compute_dtype is Dtype.fp8
    if blocks is not None and stages > blocks:
        yield f"{named} must be at most the {blocks} blocks of model={config.model.name}. Use {blocks}."
    elif blocks is None and not isinstance(config.model, CustomModelConfig):
        yield (
            f"{named} cuts a model between its blocks, and model={config.model.name} has none. Use model=gpt, resnet18 "
            "or resnet50, a model of your own with pipeline_parts (hpc_trainer/models/parts.py), or "
            "parallel.pipeline_parallel=1."
        )
    yield from _micro_batches(config)
    if parallel.tensor_parallel > 1:
        yield (
            f"{named} and parallel.tensor_parallel={parallel.tensor_parallel} do not go together yet. Use "
            "parallel.tensor_parallel=1, or parallel.pipeline_parallel=1."
        )
    if parallel.data_parallel_replicate > 1:
        yield (
            f"{named} goes with parallel.data_parallel_replicate=1 only, and it is {parallel.data_parallel_replicate}. "
            "Use 1."
        )
    others = {
        "train.compile": (train.compile, "false"),
        "train.loss_chunk_size": (train.loss_chunk_size, "null"),
        "train.guard.on_spike": (train.guard.on_spike, "none"),
        "train.guard.on_divergence": (train.guard.on_divergence, "stop"),
        "optim.in_backward": (config.optim.in_backward, "false"),
        "precision.compute_dtype": (config.precision.compute_dtype if is_fp8 else None, "bf16"),
        "optim": (config.optim.name if config.optim.name == "muon" else None, "adamw"),
    }
    for key, (value, usual) in others.items():
        text = str(getattr(value, "value", value)).lower()
        if text not in (usual, "none", "null"):
            yield f"{named} and {key}={text} do not go together yet. Use {key}={usual}."


def _micro_batches(config: TrainConfig) -> Iterator[str]:
    """1f1b fills all stages before the first micro-batch goes back: torch takes as many as there are, or more."""
    parallel, train = config.parallel, config.train
    parts, stages = num_parts(train, config.hardware, parallel), parallel.pipeline_parallel
    given = [train.global_batch_size, train.given_micro_batch_size or 1, train.grad_accum_steps or 1]
    if parallel.pipeline_schedule is not PipelineSchedule["1f1b"] or parts < 1 or min(given) < 1 or train.is_batch_auto:
        return
    if train.global_batch_size % (parts * given[1] * given[2]):  # another rule says so
        return
    whole = with_batch(train, config.hardware, parallel)
    micro, accum, total = whole.given_micro_batch_size or 1, whole.grad_accum_steps or 1, train.global_batch_size
    if accum >= stages:
        return
    share = total // parts
    smaller = next((size for size in range(share // stages, 0, -1) if share % size == 0), None)
    ways = [] if smaller is None else [f"train.micro_batch_size={smaller} train.grad_accum_steps={share // smaller}"]
    ways += [f"train.global_batch_size={parts * micro * stages} train.grad_accum_steps={stages}"]
    yield (
        f"train.grad_accum_steps={accum} must be at least parallel.pipeline_parallel={stages} with "
        f"parallel.pipeline_schedule=1f1b: the micro-batches of a step are what fills the stages. Use "
        f"{', or '.join(ways)}."
    )


def _num_blocks(model: ModelConfig) -> int | None:
    """None of a model that has none, or of which only its own code knows."""
    if isinstance(model, GptConfig):
        return model.num_layers
    return _BLOCKS.get(model.depth) if isinstance(model, ResnetConfig) else None
