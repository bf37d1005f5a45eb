"""`parallel.zero1`: each rank holds a shard of the optimizer's state."""

from hpc_trainer.config.table.feature import Feature, Row

FEATURE = Feature(
    on="parallel.zero1",
    example="parallel.zero1=true",
    needs=(Row("parallel=ddp", "the others have one rank, or share the state out already"),),
    excludes=(
        Row("hardware.world_size=1", "one rank shares nothing out", use="hardware with more ranks"),
        Row("parallel.tensor_parallel", "it shares out whole weights", use="parallel=fsdp"),
        Row("parallel.pipeline_parallel", "it shares out the weights of a whole model", use="parallel=fsdp"),
    ),
    after=("offload",),
)
