"""Needs and exclusions of the core's own choices, in the form that features use (`feature.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpc_trainer.config.mesh import nearest_divisor, num_data_ranks
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.schema.parallel import Dtype, Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row
from hpc_trainer.config.table.kinds import datasets, models

_NO_OWN_LOOP = Row("train.main", "it is part of the shared loop, and your own loop calls fully_shard itself")
_ONE_RANK = "it is for one rank"
_FSDP = "parallel=fsdp, hsdp or fsdp_tp"


def _fsdp(config: TrainConfig) -> Iterator[str]:
    parallel, hardware = config.parallel, config.hardware
    if parallel.strategy is Strategy.fsdp and hardware.world_size > 1 and num_data_ranks(parallel, hardware) == 1:
        yield (
            f"parallel=fsdp shares weights out among two data-parallel ranks or more, and hardware={hardware.name} has "
            f"{hardware.world_size}, all taken by parallel.tensor_parallel={parallel.tensor_parallel} × "
            f"parallel.pipeline_parallel={parallel.pipeline_parallel}. Use parallel.strategy=ddp, or hardware with "
            "more ranks."
        )


def _hsdp(config: TrainConfig) -> Iterator[str]:
    parallel, count = config.parallel, num_data_ranks(config.parallel, config.hardware)
    copies = parallel.data_parallel_replicate
    if parallel.strategy is Strategy.fsdp and copies > 1 and (count % copies or count // copies < 2):
        nearest = nearest_divisor(count, copies, lambda size: count // size >= 2)
        yield (
            f"parallel.data_parallel_replicate={copies} must divide the {count} data-parallel ranks into groups of two "
            f"or more (hardware={config.hardware.name}). Use {nearest}."
        )


def _nearest(config: TrainConfig) -> str:
    """Return the format of `param_dtype` that goes with the computed format."""
    return {Dtype.bf16: "bf16", Dtype.fp16: "fp16"}.get(config.precision.compute_dtype, "fp32")


def _beside_ddp(config: TrainConfig) -> str:
    """Return the ways to send less: FSDP, and for DDP also its own communication hook."""
    hook = f", or parallel.comm_hook={config.parallel.reduce_dtype.value}"
    return _FSDP + (hook if config.parallel.strategy is Strategy.ddp else "")


def _of_fsdp(
    key: str, example: str, excludes: tuple[Row, ...] = (), use: str | Callable[[TrainConfig], str] = _FSDP
) -> Feature:
    """Declare a key that decides what FSDP2 gathers, reduces or keeps."""
    return Feature(
        name=key,
        on=f"parallel.{key}",
        example=f"parallel.{key}={example} parallel=fsdp",
        needs=(Row("parallel=fsdp", "it is a key of FSDP2", use=use),),
        excludes=(*excludes, _NO_OWN_LOOP),
    )


def _computed(format: str) -> Row:
    return Row(
        f"precision!={format}",
        "blocks compute in that format",
        when=f"parallel.param_dtype={format}",
        use=lambda config: f"precision={format}, or parallel.param_dtype={_nearest(config)}",
    )


CORE = (
    Feature(
        name="gpt",
        on=models(having=[Trait.reads_tokens])(),
        off="model=cnn",
        example="model=gpt",
        excludes=(
            Row(
                f"{datasets(of_text=False)()} or data=hf_dataset & data.seq_len=null",
                "it reads text",
                use="data=text_bytes",
            ),
        ),
    ),
    Feature(
        name="text",
        on=f"{datasets(of_text=True)()} or data=hf_dataset & data.seq_len",
        off="data=digits",
        example="data=text_bytes",
        excludes=(
            Row(models(without=[Trait.reads_tokens]), "it is text, and the model reads images", use="model=gpt"),
        ),
    ),
    Feature(
        name="image_model",
        on=models(having=[Trait.reads_images])(),
        off="model=mlp",
        example="model=cnn data=digits",
        excludes=(Row("data=table", "it reads images, and the data are rows of columns", use="model=mlp"),),
    ),
    Feature(
        name="custom_task",
        on="task=custom",
        off="task=classification",
        example="task=custom task._target_=hpc_trainer.tasks.cross_entropy.CrossEntropy",
        excludes=(Row("train.main", "it is for the shared loop, and your own loop computes its own loss"),),
    ),
    Feature(
        name="lr_scaling",
        on="optim.lr_scaling",
        example="optim.lr_scaling=linear optim.lr_base_batch=8",
        needs=(
            Row(
                "optim.lr_base_batch",
                "it is the batch size for which optim.lr was chosen",
                use=lambda config: f"optim.lr_base_batch={config.train.global_batch_size}",
            ),
        ),
    ),
    Feature(
        name="local",
        on="cluster=local",
        off="cluster=slurm",
        example="cluster=local",
        excludes=(Row("hardware.num_nodes>1", "it uses only this machine"),),
    ),
    Feature(
        name="fsdp",
        on="parallel=fsdp",
        example="parallel=fsdp",
        excludes=(Row("hardware.world_size=1", "it shares weights out among ranks", use="hardware with more ranks"),),
        problems=_fsdp,
    ),
    Feature(
        name="hsdp",
        on="parallel.data_parallel_replicate>1",
        example="parallel.data_parallel_replicate=2 parallel=fsdp",
        needs=(Row("parallel=fsdp", "without it every rank holds the whole model", use="parallel=hsdp"),),
        problems=_hsdp,
    ),
    _of_fsdp(
        "param_dtype",
        "bf16 precision=bf16",
        (
            _computed("bf16"),
            _computed("fp16"),
            Row(
                models(having=[Trait.batch_norm]),
                "batch norm takes weights in the format of its running statistics, fp32",
            ),
            Row("task=regression|custom", "FSDP converts the targets to it too, which would round numbers"),
        ),
    ),
    _of_fsdp(
        "reduce_dtype",
        "bf16",
        (
            Row(
                "precision!=fp16",
                "gradients below 6e-8 are lost and those above 65504 overflow without fp16's loss scaler",
                when="parallel.reduce_dtype=fp16",
                use="precision=fp16, or parallel.reduce_dtype=bf16",
            ),
        ),
        _beside_ddp,
    ),
    _of_fsdp("reshard_after_forward", "false"),
    Feature(
        name="tf32",
        on="precision=tf32",
        example="precision=tf32",
        excludes=(Row("hardware.device_type=cpu", "it is a format of GPUs", use="hardware with a GPU"),),
    ),
    Feature(
        name="single",
        on="hardware.device=mps|xla",
        example="hardware.device=mps",
        excludes=(
            Row("hardware.gpus_per_node>0", "it is not a CUDA device"),
            Row("hardware.world_size>1", _ONE_RANK, use="hardware.num_nodes=1 hardware.tasks_per_node=1"),
            Row("precision!=fp32|bf16", "it supports only fp32 and bf16", use="precision=bf16"),
        ),
    ),
    Feature(
        name="one_rank",
        on="parallel=none",
        example="parallel=none",
        excludes=(Row("hardware.world_size>1", _ONE_RANK, use="hardware with one rank"),),
    ),
    Feature(
        name="bucket_cap",
        on="parallel.bucket_cap_mb",
        example="parallel.bucket_cap_mb=50",
        needs=(Row("parallel=ddp", "it is the size of DDP's messages"),),
    ),
    Feature(
        name="elastic",
        on="parallel.elastic",
        example="parallel.elastic=true",
        excludes=(
            Row(
                "train.batch_per_rank",
                "the batch would change with the number of ranks, and the training must stay the same",
            ),
        ),
    ),
)
