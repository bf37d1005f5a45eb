"""`qat`: linear layers that compute with the rounded numbers of a quantized export while they train."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, ONCE_SET, SCHEDULE, key, only_with, section
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class QatTo(str, enum.Enum):
    """Format to which weights are rounded; with `dynamic_` the inputs of layers too."""

    none = "none"
    int8 = "int8"
    int4 = "int4"
    dynamic_int8 = "dynamic_int8"
    dynamic_int4 = "dynamic_int4"


_QAT = only_with("qat.to")


@dataclass(kw_only=True, slots=True)
class QatConfig:
    to: QatTo = key(QatTo.none, ALWAYS)
    """Linear layers compute with numbers rounded as an export will have them, so that training adapts to it (torchao).
    int8: weights, one scale a row. int4: weights, one scale for each `group_size` of a row. dynamic_int8, dynamic_int4:
    the inputs too, in 8 bits, one scale for each row of a batch. Evaluations round as well. none: off."""
    group_size: int = key(32, only_with("qat.to=int4", "qat.to=dynamic_int4"), limits="≥ 1")
    """Number of 4-bit weights that share a scale. It must divide the inputs of a layer; other layers are not
    rounded."""
    start_step: int = key(0, _QAT, resume=SCHEDULE, limits="≥ 0")
    """Steps before rounding begins."""
    exclude: list[str] = key([], _QAT)
    """Names of linear layers, with * and ?, that are not rounded, such as ['head']."""


class Keys:
    """Section `qat` at the root."""

    qat: QatConfig = section(QatConfig, ONCE_SET, INCOMPATIBLE, in_graph=True)


def _problems(config: TrainConfig) -> Iterator[str]:
    qat, num_steps = config.qat, config.train.num_steps
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
        Row("precision=fp8", "both choose the number format of linear layers", use="precision=bf16"),
        Row("parallel.tensor_parallel", "it needs whole layers on each rank", use="parallel=fsdp"),
        Row("parallel.pipeline_parallel", "the combination is untested"),
        Row("train.compile", "the combination is untested"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
)
