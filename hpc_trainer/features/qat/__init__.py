"""`qat`: linear layers that compute with the rounded numbers of a quantized export while they train."""

from collections.abc import Iterator

from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.features.compress import QatTo
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row


def _problems(config: TrainConfig) -> Iterator[str]:
    qat, num_steps = config.qat, config.train.num_steps
    if qat.to is QatTo.none:
        return
    if qat.start_step >= num_steps:
        yield (
            f"qat.start_step={qat.start_step} must be less than train.num_steps={num_steps}: nothing would be rounded. "
            f"Use {num_steps // 2}."
        )
    problem = missing(f"qat.to={qat.to.name}", "torchao")
    if problem is not None:
        yield f"{problem}, on this machine too, or qat.to=none."


FEATURE = Feature(
    on="qat.to",
    example="qat.to=dynamic_int8",
    excludes=(
        Row("precision=fp8", "both say what linear layers compute with", use="precision=bf16"),
        Row("parallel.tensor_parallel", "it needs whole layers on each rank", use="parallel=fsdp"),
        Row("parallel.pipeline_parallel", "nobody has tried both"),
        Row("train.compile", "nobody has tried both"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
)
