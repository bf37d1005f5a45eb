"""`train.recompute=budget`: the compiler chooses what to compute again, within a budget of memory."""

from hpc_trainer.config.table.feature import Feature, Row
from hpc_trainer.config.table.kinds import models

_BY_BLOCKS = "train.recompute=full train.compile_scope=blocks"

FEATURE = Feature(
    on="train.recompute=budget",
    example="train.recompute=budget train.compile=true",
    needs=(
        Row("train.compile=true", "it is a choice of the compiler", use="train.compile=true, or train.recompute=full"),
    ),
    excludes=(
        Row(
            models(key="dropout") + " & model.dropout>0",
            "dropout would be drawn anew when it is computed again (a fault of torch up to 2.13)",
            use=f"model.dropout=0, or {_BY_BLOCKS}",
        ),
        Row(
            "parallel.tensor_parallel",
            "torch (2.13) cannot measure what a layer keeps where it is given process groups to keep",
            use=_BY_BLOCKS,
        ),
    ),
)
