"""The table of combinations that are refused or allowed: every declaration, and the rows that a configuration breaks.

Refusals at plan time, the matrix in the docs and the test that walks all pairs come from this table. The layer of
configurations is below that of features. So this module alone finds features, by their folders' names and in the
registry of domains.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator

from hpc_trainer.config.load import Memo
from hpc_trainer.config.mesh import nearest_divisor, num_data_ranks
from hpc_trainer.config.schema.key import FEATURES
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.schema.parallel import Dtype, Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import defaults_of, holds, split, state
from hpc_trainer.config.table.feature import Feature, Row, datasets, models
from hpc_trainer.domains import contributions

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


@functools.cache
def features() -> tuple[Feature, ...]:
    """Return every feature, sorted by name, without importing torch."""
    package = importlib.import_module(FEATURES)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    by_name = {name: importlib.import_module(f"{FEATURES}.{name}").FEATURE for name in names}
    for of_domain in contributions("features"):
        by_name |= of_domain
    return tuple(
        dataclasses.replace(
            feature, name=name, rank_half=feature.rank_half or f"{FEATURES}.{name}.{name}",
            needs=_read(feature.needs), excludes=_read(feature.excludes),
        )
        for name, feature in sorted(by_name.items())
    )  # fmt: skip


def _read(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(dataclasses.replace(row, choice=row.what) for row in rows)


@functools.cache
def declarations() -> tuple[Feature, ...]:
    """Return the declarations of the core's own choices, then those of the features that a user chooses."""
    return (*CORE, *(feature for feature in features() if feature.on))


def num_threads(config: TrainConfig) -> int:
    """Return the threads of each rank, which decide the order of sums."""
    wanted = (feature.num_threads for feature in features() if feature.is_on(config))
    return next((count for count in wanted if count is not None), config.hardware.cpus_per_rank)


CARRIED_OUT = {
    "precision=fp8": "float8", "precision=bf16_sr": "stochastic_rounding", "optim=lion": "lion", "optim=muon": "muon",
    "optim=custom": "custom_optim", "model=hf": "hf_model", "train.recompute=full|selective": "recompute",
    "train.recompute=budget": "recompute_budget", "train.micro_batch_size=auto": "memory", "train.compile": "compile",
    "train.logical_ranks": "logical_ranks", "parallel.tensor_parallel>1": "tensor_parallel",
    "parallel.pipeline_parallel>1": "pipeline",
}  # fmt: skip
"""Choices of keys that the core reads itself, and the feature that carries each out."""


@functools.cache
def _not_installed() -> tuple[tuple[str, str], ...]:
    names = {feature.name for feature in features()}
    return tuple((choice, name) for choice, name in CARRIED_OUT.items() if name not in names)


def feature_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem of features, alone and in combination with other choices."""
    for choice, name in _not_installed():
        if holds(config, choice):
            other = defaults_of(choice)
            yield (
                f"{state(config, choice)} needs the feature {name}, and its folder hpc_trainer/features/{name} is "
                f"missing. Restore it{f', or use {other}' if other else ''}."
            )
    for feature in declarations():
        if feature.is_on(config):
            yield from feature.problems(config)
            yield from _pairs(config, feature)
        else:
            yield from feature.problems_if_off(config)


def fill_in(config: TrainConfig, memo: Memo) -> None:
    """Fill in the values that features derive in a configuration without problems.

    Raises:
        ConfigError: a feature cannot fill in its values.
    """
    for feature in features():
        if feature.is_on(config):
            feature.fill(config, memo)


def _pairs(config: TrainConfig, feature: Feature) -> Iterator[str]:
    for rows, are_excluded in ((feature.needs, False), (feature.excludes, True)):
        for row in rows:
            if holds(config, row.what) is not are_excluded or (row.when and not holds(config, row.when)):
                continue
            named, other = state(config, row.when or feature.on), state(config, row.what)
            verb = f"does not go with {other}" if are_excluded else f"needs {_in_words(row.what)}, and this is {other}"
            use = row.use(config) if callable(row.use) else row.use or way_out(row, are_excluded)
            # A row about one value of a feature suggests another value of it.
            off = "" if row.when and row.use else feature.without_in(config)
            ways = ", or ".join(dict.fromkeys(way for way in (use, off) if way))
            yield f"{named} {verb}: {row.why}. Use {ways}."


def way_out(row: Row, is_excluded: bool) -> str:
    """Return the override for the other side of a row; "" if one override is not enough."""
    if not is_excluded:
        return row.what.partition(" or ")[0].partition("|")[0].replace(" & ", " ")
    if " " in row.what:
        return ""
    key, sign, values = split(row.what)
    if sign == "!=":
        return f"{key}={values.partition('|')[0]}"
    if sign in ("<", ">"):  # the bound, which is neither below nor above itself
        return f"{key}={values}"
    return next((feature.without for feature in declarations() if feature.on == row.what), defaults_of(row.what))


def _in_words(choice: str) -> str:
    return choice.replace("|", " or ").replace(" & ", " and ")
