"""`train.recompute=budget`: the compiler chooses what to compute again, within a budget of memory."""

from __future__ import annotations

from hpc_trainer.config.schema.key import ONCE_SET, SCHEDULE, key, only_with
from hpc_trainer.config.table.feature import Feature, Row, models


class Keys:
    """Key in the section `train`."""

    recompute_budget: float = key(
        0.5, only_with("train.recompute=budget"), ONCE_SET, SCHEDULE, in_graph=True, limits="[0, 1]"
    )
    """Share of the compiler's usual activations for the backward pass that `recompute=budget` may keep."""


_BY_BLOCKS = "train.recompute=full train.compile_scope=blocks"

FEATURE = Feature(
    on="train.recompute=budget",
    example="train.recompute=budget train.compile=true",
    needs=(
        Row("train.compile=true", "it is a choice of the compiler", use="train.compile=true, or train.recompute=full"),
    ),
    excludes=(
        Row(
            lambda: f"{models(key='dropout')()} & model.dropout>0",
            "dropout would be drawn anew when it is computed again (a bug of torch up to 2.13)",
            use=f"model.dropout=0, or {_BY_BLOCKS}",
        ),
        Row(
            "parallel.tensor_parallel",
            "torch (2.13) cannot measure what a layer keeps where it is given process groups to keep",
            use=_BY_BLOCKS,
        ),
    ),
)
