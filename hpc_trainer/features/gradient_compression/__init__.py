"""`parallel.comm_hook`: gradients travel in fewer bytes."""

from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row

FEATURE = Feature(
    on="parallel.comm_hook",
    example="parallel.comm_hook=bf16",
    needs=(Row("parallel=ddp", "it changes what DDP sends"),),
    excludes=(
        Row("hardware.world_size=1", "one rank sends nothing", use="hardware with more ranks"),
        Row("train.logical_ranks", "logical ranks have a sum of their own"),
        Row("parallel.tensor_parallel", "it is for whole layers"),
        Row("parallel.pipeline_parallel", "it is for whole models"),
        OF_SHARED_LOOP,
        Row(
            "train.max_skipped_steps=null & precision!=fp16",
            "a gradient above 65504 is sent as infinity, and nobody looks",
            when="parallel.comm_hook=fp16",
            use="train.max_skipped_steps=10, or parallel.comm_hook=bf16",
        ),
        Row(
            "precision=fp16",
            "it remembers what it did not send in units of the loss scale, which changes",
            when="parallel.comm_hook=powersgd",
            use="precision=bf16, or parallel.comm_hook=fp16",
        ),
        Row(
            "train.deterministic=false",
            "it remembers what it did not send bucket by bucket, and buckets would be laid out anew at each start",
            when="parallel.comm_hook=powersgd",
            use="train.deterministic=true, or parallel.comm_hook=bf16",
        ),
        Row(
            "parallel.elastic",
            "it has a state for each rank, so their number cannot change",
            when="parallel.comm_hook=powersgd",
            use="parallel.elastic=false, or parallel.comm_hook=bf16",
        ),
    ),
)
