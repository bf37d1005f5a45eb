"""`train.guard`: spikes are skipped, or the run goes back before them."""

from hpc_trainer.config.table.feature import Feature, Row

FEATURE = Feature(
    on="train.guard.on_spike or train.guard.on_divergence",
    example="train.guard.on_spike=skip",
    logs=("spikes", "rollbacks"),
    excludes=(
        Row(
            "train.max_skipped_steps=null",
            "it needs the norm of each gradient, and none is computed",
            use="train.max_skipped_steps=10",
        ),
        Row(
            "checkpoint.every=auto",
            "it goes back to a step that checkpoint.every_steps divides, and auto saves as the clock says",
            when="train.guard.on_spike=rollback or train.guard.on_divergence=rollback",
        ),
        Row(
            "precision=fp16",
            "it counts skipped steps, and fp16 skips some while it looks for its loss scale",
            when="train.guard.on_divergence=rollback",
            use="precision=bf16, or train.guard.on_divergence=stop",
        ),
        Row("parallel.sync", "ranks that step alone do not agree on a spike"),
        Row(
            "parallel.comm_hook=powersgd",
            "a step that is left out would stay in its memory",
            use="parallel.comm_hook=bf16",
        ),
        Row("parallel.pipeline_parallel", "nobody has tried both"),
        Row("optim.in_backward", "a weight is updated before the norm of all gradients is known"),
        Row("optim.offload", "nobody has tried both"),
    ),
)
