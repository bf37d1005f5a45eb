"""Rules of the device mesh: tensor parallel, pipeline parallel and HSDP on the ranks, the model and the other keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpc_trainer.config.checks import at_least
from hpc_trainer.config.mesh import num_data_ranks
from hpc_trainer.config.pipeline_rules import pipeline_problems
from hpc_trainer.config.schema.data import SyntheticTokensConfig, TextBytesConfig
from hpc_trainer.config.schema.model import CustomModelConfig, GptConfig
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import CompileMode, Recompute, TrainConfig

_LARGEST = 2**20
VOCABULARY = 256
"""Of `data=text_bytes`: classes that the head of gpt tells apart."""


def mesh_problems(config: TrainConfig) -> Iterator[str]:
    """What `tensor_parallel`, `pipeline_parallel` and `data_parallel_replicate` break, a line each."""
    parallel, hardware = config.parallel, config.hardware
    keys = ("tensor_parallel", "pipeline_parallel", "data_parallel_replicate")
    bad = [line for key in keys for line in at_least(f"parallel.{key}", getattr(parallel, key), 1, most=_LARGEST)]
    if bad or hardware.world_size < 1:
        yield from bad
        return
    tp, pp = parallel.tensor_parallel, parallel.pipeline_parallel
    if hardware.world_size % (tp * pp):
        product = f"parallel.tensor_parallel={tp}" + (f" × parallel.pipeline_parallel={pp}" if pp > 1 else "")
        if tp == 1:
            product = f"parallel.pipeline_parallel={pp}"
        key, other = ("tensor_parallel", pp) if tp > 1 else ("pipeline_parallel", 1)
        room = hardware.world_size // other if hardware.world_size % other == 0 else 1
        yield (
            f"{product} must divide world_size={hardware.world_size} (hardware={hardware.name}). "
            f"Use parallel.{key}={nearest_divisor(room, getattr(parallel, key))}, or hardware with "
            f"{-(-hardware.world_size // (tp * pp)) * tp * pp} ranks."
        )
        return
    yield from _replicate_problems(config)
    if tp > 1:
        yield from _tensor_problems(config)
    if pp > 1:
        yield from pipeline_problems(config)
    if tp * pp > 1:
        yield from _other_problems(config)


def nearest_divisor(total: int, wanted: int, fits: Callable[[int], bool] = lambda count: True) -> int:
    """The divisor of `total` (≥ 1) nearest to `wanted` that `fits`; of two the smaller. 1 if none does."""
    divisors = [count for count in range(1, min(total, 2 * wanted) + 1) if total % count == 0 and fits(count)]
    return min(divisors, key=lambda count: (abs(count - wanted), count), default=1)


def _replicate_problems(config: TrainConfig) -> Iterator[str]:
    parallel, count = config.parallel, num_data_ranks(config.parallel, config.hardware)
    copies = parallel.data_parallel_replicate
    if copies > 1 and parallel.strategy is not Strategy.fsdp:
        yield (
            f"parallel.data_parallel_replicate={copies} goes with parallel=fsdp (HSDP); with "
            f"parallel={parallel.strategy.value} every rank holds the model anyway. Use "
            "parallel.data_parallel_replicate=1, or parallel=hsdp."
        )
    elif copies > 1 and (count % copies or count // copies < 2):
        nearest = nearest_divisor(count, copies, lambda each: count // each >= 2)
        yield (
            f"parallel.data_parallel_replicate={copies} must divide the {count} data-parallel ranks into groups of two "
            f"or more (hardware={config.hardware.name}). Use {nearest}."
        )


def _tensor_problems(config: TrainConfig) -> Iterator[str]:
    tp, hardware, model = config.parallel.tensor_parallel, config.hardware, config.model
    if hardware.ranks_per_node % tp:
        yield (
            f"parallel.tensor_parallel={tp} must divide the {hardware.ranks_per_node} ranks of a node "
            f"(hardware={hardware.name}): its ranks speak several times in each layer. Use "
            f"{nearest_divisor(hardware.ranks_per_node, tp)}."
        )
    if isinstance(model, GptConfig):
        sizes = {"model.num_heads": model.num_heads, "model.embed_dim": model.embed_dim}
        if isinstance(config.data, (SyntheticTokensConfig, TextBytesConfig)):
            known = VOCABULARY if isinstance(config.data, TextBytesConfig) else config.data.vocab_size
            sizes[f"vocabulary of data={config.data.name}"] = model.num_rows(known)
        for name, size in sizes.items():
            if size % tp:
                nearest = nearest_divisor(
                    size, tp, lambda each: not any(size % each for size in (*sizes.values(), hardware.ranks_per_node))
                )
                yield f"parallel.tensor_parallel={tp} must divide {name}={size}, which it cuts up. Use {nearest}."
    elif not isinstance(model, CustomModelConfig):
        yield (
            f"parallel.tensor_parallel={tp} shares layers out by the model's plan, and model={model.name} has none. "
            "Use model=gpt, a model of your own with a `tensor_parallel_plan`, or parallel.tensor_parallel=1."
        )
    if config.train.channels_last:
        yield (
            f"train.channels_last=true orders weights otherwise than parallel.tensor_parallel={tp} can cut them. Use "
            "train.channels_last=false, or parallel.tensor_parallel=1."
        )
    yield from _compiled_problems(config)


def _compiled_problems(config: TrainConfig) -> Iterator[str]:
    """Of a compiler that sees layers which ranks share."""
    train, named = config.train, f"parallel.tensor_parallel={config.parallel.tensor_parallel}"
    if train.compile and train.recompute is Recompute.budget:
        yield (
            f"train.recompute=budget measures what a layer keeps, and torch (2.13) cannot where {named} gives it "
            "process groups to keep. Use train.recompute=full train.compile_scope=blocks."
        )
    if train.compile and train.compile_mode is not CompileMode.default:
        yield (
            f"train.compile_mode={train.compile_mode.value} would capture what ranks send each other with {named}, "
            "which nobody has tried. Use train.compile_mode=default."
        )


def _other_problems(config: TrainConfig) -> Iterator[str]:
    """What neither tensor nor pipeline parallel goes with."""
    parallel, train = config.parallel, config.train
    keys = ("tensor_parallel", "pipeline_parallel")
    named = " ".join(f"parallel.{key}={getattr(parallel, key)}" for key in keys if getattr(parallel, key) > 1)
    unset = " ".join(f"parallel.{key}=1" for key in keys if getattr(parallel, key) > 1)
    if train.logical_ranks is not None:
        yield (
            f"train.logical_ranks={train.logical_ranks} needs the whole model on each rank, and {named} shares it out. "
            f"Use train.logical_ranks=null, or {unset}."
        )
    if parallel.zero1:
        yield f"parallel.zero1=true shares out whole weights: not with {named}. Use parallel=fsdp, or {unset}."
    if train.main is not None:
        yield (
            f"{named} is a way of the shared loop, and train.main={train.main} is your own, which builds its mesh "
            f"itself. Use {unset}."
        )
