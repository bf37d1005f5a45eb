"""`train.logical_ranks`: the same bits on any number of ranks."""

from collections.abc import Iterator

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row

_LARGEST = 2**20


def _problems(config: TrainConfig) -> Iterator[str]:
    count, world_size = config.train.logical_ranks, config.hardware.world_size
    assert count is not None
    if not (1 <= count <= _LARGEST and _is_power_of_two(count)):
        yield f"train.logical_ranks={count} must be a power of two, at most {_LARGEST}. Use {_power_near(count)}."
        return
    if world_size < 1:
        return
    if not _is_power_of_two(world_size):
        yield (
            f"hardware={config.hardware.name} has {world_size} ranks, and train.logical_ranks={count} is divided among "
            f"1, 2, 4, .. ranks. Use hardware with {_power_near(world_size)}."
        )
    elif world_size > count:
        yield (
            f"train.logical_ranks={count} must be at least world_size={world_size} (hardware={config.hardware.name}). "
            f"Use {world_size}."
        )


def _is_power_of_two(value: int) -> bool:
    return value >= 1 and value & (value - 1) == 0


def _power_near(value: int) -> int:
    return min(_LARGEST, 1 << (max(1, value).bit_length() - 1))


FEATURE = Feature(
    on="train.logical_ranks",
    example="train.logical_ranks=4",
    excludes=(
        Row("parallel=fsdp", "it needs the whole model and optimizer on each rank"),
        Row("parallel.zero1", "it needs the whole model and optimizer on each rank"),
        Row("parallel.tensor_parallel", "it needs the whole model on each rank"),
        Row("parallel.pipeline_parallel", "it needs the whole model on each rank"),
        Row("train.deterministic=false", "other kernels give other bits each time"),
        Row("train.main", "it is part of the shared loop; parallel.elastic=true lets the number of ranks change"),
        Row("train.batch_per_rank", "the batch would follow the ranks, and the training is to stay the same"),
    ),
    problems=_problems,
    num_threads=1,  # two threads add in another order than one, and two ranks may have fewer cores each than one has
)
