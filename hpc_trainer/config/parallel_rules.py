"""What `parallel=` can share out among the ranks that there are."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.mesh import num_data_ranks
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig


def parallel_problems(config: TrainConfig) -> Iterator[str]:
    """Every rule that `parallel` breaks, a line each."""
    parallel, hardware = config.parallel, config.hardware
    ranks = f"hardware={hardware.name} has {hardware.world_size}"
    if parallel.strategy is Strategy.none and hardware.world_size > 1:
        yield f"parallel=none takes one rank, and {ranks}. Use parallel=ddp, or hardware with one rank."
    if parallel.strategy is Strategy.fsdp and hardware.world_size == 1:
        yield (
            f"parallel=fsdp shares weights out among two ranks or more, and {ranks}. "
            "Use parallel=ddp, or hardware with more ranks."
        )
    elif parallel.strategy is Strategy.fsdp and num_data_ranks(parallel, hardware) == 1:
        yield (
            f"parallel=fsdp shares weights out among two data-parallel ranks or more, and {ranks}, all taken by "
            f"parallel.tensor_parallel={parallel.tensor_parallel} × parallel.pipeline_parallel="
            f"{parallel.pipeline_parallel}. Use parallel.strategy=ddp, or hardware with more ranks."
        )
    if parallel.zero1 and parallel.strategy is not Strategy.ddp:
        why = "shares optimizer state out already" if parallel.strategy is Strategy.fsdp else "has one rank"
        yield (
            f"parallel.zero1=true goes with parallel=ddp only; parallel={parallel.strategy.value} {why}. "
            "Use parallel.zero1=false."
        )
    elif parallel.zero1 and hardware.world_size == 1:
        yield (
            f"parallel.zero1=true shares optimizer state out among two ranks or more, and {ranks}. "
            "Use parallel.zero1=false, or hardware with more ranks."
        )
