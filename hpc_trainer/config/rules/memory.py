"""GPU memory of a training from sizes alone: a lower bound of the estimate of `plan --memory`, and ways to save it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.gpu_types import find_gpu_type
from hpc_trainer.config.load import section_from_plain
from hpc_trainer.config.mesh import divisors, num_parts
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.model import CustomModelConfig, GptConfig, Positions
from hpc_trainer.config.schema.parallel import FORMATS, Dtype, FsdpDtype, Strategy
from hpc_trainer.config.schema.train import AUTO, Recompute, TrainConfig
from hpc_trainer.config.store import variant_of
from hpc_trainer.config.table.choice import holds, is_there

_MOMENT_BYTES = 4


def memory_line(plain: Mapping[str, Any], world_size: int, per_gpu: int = 1) -> str | None:
    """Return a line if a frozen configuration cannot fit the largest GPU of its type; None if it may, or if unknown.

    Args:
        plain: the configuration.
        world_size: number of ranks.
        per_gpu: number of runs that share each GPU and its memory.
    """
    name = plain["hardware"]["gpu_type"]
    gpu = find_gpu_type(name)
    least = None if gpu is None else least_bytes(plain, world_size)
    if gpu is None or least is None or least <= gpu.memory_gb[-1] * 1e9 / per_gpu:
        return None
    sizes = " or ".join(map(str, gpu.memory_gb))
    sharing = f" for the {per_gpu} runs that share it (pool.per_gpu)" if per_gpu > 1 else ""
    return (
        f"model=gpt needs at least {least / 1e9:.4g} GB a rank (for weights, gradients and optimizer state only), and "
        f"hardware.gpu_type={name} has {sizes} GB{sharing}. `plan --memory` estimates all of it, and names the "
        "keys that help."
    )


def least_bytes(plain: Mapping[str, Any], world_size: int) -> int | None:
    """Return a lower bound in bytes of weights, gradients, moments and averaged weights on one of `world_size` ranks.

    None if the configuration does not give the sizes of the model or data set, or if the loop is the user's own.
    """
    parallel, optim = plain["parallel"], plain["optim"]
    count = num_weights(plain)
    if count is None or plain["train"]["main"] is not None or plain["train"].get("command") is not None:
        return None
    divided = parallel["tensor_parallel"] * parallel["pipeline_parallel"]
    if parallel["strategy"] == "fsdp":
        divided = world_size // parallel["data_parallel_replicate"]
    kept = 1 + (not optim.get("in_backward")) + (plain["train"].get("ema_decay") is not None)
    kind: Any = variant_of("optim", optim)
    moments = 0 if optim.get("offload") else kind(**optim).num_moments
    weight_bytes = FORMATS[Dtype[plain["precision"]["compute_dtype"]]].weight_bytes
    of_moments = _MOMENT_BYTES * (count * moments // (world_size if parallel.get("zero1") else divided))
    return weight_bytes * int(count * kept // divided) + of_moments


def num_weights(plain: Mapping[str, Any]) -> int | None:
    """Return the number of weights of a gpt; None for other models, whose sizes are known only to torch."""
    model, data = plain["model"], plain["data"]
    if model["name"] != "gpt":
        return None
    kind: Any = variant_of("data", data)
    vocabulary = kind(**data).vocabulary()
    if vocabulary is None:
        return None
    gpt = section_from_plain(GptConfig, model)
    places = data["seq_len"] if gpt.positions == Positions.learned else 0
    embeddings = (gpt.num_rows(vocabulary) + places) * gpt.embed_dim
    return gpt.num_layers * gpt.num_block_weights + embeddings + gpt.num_norm_weights


def checkpoint_bytes(config: TrainConfig, count: int) -> int:
    """Return the approximate bytes of a checkpoint of `count` weights: weights, their averages, and moments."""
    copies = 1 + holds(config, "train.ema_decay")
    return count * (copies * config.precision.format.weight_bytes + _MOMENT_BYTES * config.optim.num_moments)


_CHUNK = 8192  # tokens


@dataclass(frozen=True, slots=True)
class Way:
    """Change that saves memory.

    `text` has its overrides; `share` has about the saved share of each part of the memory, by name.
    """

    text: str
    share: Mapping[str, float]

    def saves(self, parts: Mapping[str, float]) -> float:
        """Return the memory that this change saves, in the unit of `parts`."""
        return sum(share * (parts.get(name) or 0.0) for name, share in self.share.items())


def smaller_batch(config: TrainConfig) -> int | None:
    """Return the largest micro-batch of at most half the present size; None if that is one sample, or auto."""
    micro = config.train.given_micro_batch_size
    if micro is None or micro < 2:
        return None
    share = config.train.global_batch_size // num_parts(config.train, config.hardware, config.parallel)
    return max(size for size in divisors(share) if size <= micro // 2)


def ways(config: TrainConfig) -> Iterator[Way]:
    """Yield each legal change, the cheapest first. `config` is validated."""
    broken = set(find_problems(config))
    for way, group, changes in _wanted(config):
        if not all(is_there(f"{group}.{name}") for name in changes):  # a key of a feature that is not installed
            continue
        section = dataclasses.replace(getattr(config, group), **changes)
        if broken.issuperset(find_problems(dataclasses.replace(config, **{group: section}))):
            yield way


def may_be_auto(config: TrainConfig) -> bool:
    """Return True if `train.micro_batch_size=auto` would be legal and is not set."""
    train = dataclasses.replace(config.train, micro_batch_size=AUTO, grad_accum_steps=None)
    return not config.train.is_batch_auto and not list(find_problems(dataclasses.replace(config, train=train)))


def _wanted(config: TrainConfig) -> Iterator[tuple[Way, str, dict[str, Any]]]:
    train, world_size = config.train, config.hardware.world_size
    others = 1 - 1 / world_size  # the share that the other ranks would hold
    half = smaller_batch(config)
    if half is not None and config.parallel.strategy is not Strategy.fsdp:  # FSDP would hold unsharded gradients
        changes = {"micro_batch_size": half, "grad_accum_steps": None}
        yield Way(f"train.micro_batch_size={half}", {"activations": 0.5}), "train", changes
    yield from _of_loss(config)
    if train.recompute is not Recompute.full:
        # Only the input of a block's activations is kept; its share depends on the model.
        yield Way("train.recompute=full", {"activations": 0.6}), "train", {"recompute": Recompute.full}
        if is_there("train.recompute_budget"):
            share = {"activations": 1 - train.recompute_budget}
            yield Way("train.recompute=budget", share), "train", {"recompute": Recompute.budget}
    yield from _of_fsdp(config)
    if config.precision.compute_dtype in (Dtype.fp32, Dtype.tf32):
        yield Way("precision=bf16", {"activations": 0.4}), "precision", {"compute_dtype": Dtype.bf16}
    if not holds(config, "optim.offload"):
        yield Way("optim.offload=true", {"optimizer": 0.9}), "optim", {"offload": True}
    if not holds(config, "parallel.zero1") and config.parallel.strategy is Strategy.ddp:
        yield Way("parallel.zero1=true", {"optimizer": others}), "parallel", {"zero1": True}
    if config.parallel.strategy is not Strategy.fsdp:
        shared = dict.fromkeys(("weights", "gradients", "optimizer", "average"), others)
        if holds(config, "parallel.zero1"):
            way = Way("parallel=fsdp parallel.zero1=false", shared)
            yield way, "parallel", {"strategy": Strategy.fsdp, "zero1": False}
        else:
            yield Way("parallel=fsdp", shared), "parallel", {"strategy": Strategy.fsdp}
    if holds(config, "train.ema_decay"):
        yield Way("train.ema_decay=null", {"average": 1.0}), "train", {"ema_decay": None}


def _of_loss(config: TrainConfig) -> Iterator[tuple[Way, str, dict[str, Any]]]:
    """Yield the change that computes the logits of a part of the tokens at a time."""
    model, data, micro = config.model, config.data, config.train.given_micro_batch_size
    if not isinstance(model, GptConfig) or holds(config, "train.loss_chunk_size") or micro is None:
        return
    vocabulary = data.vocabulary()
    if not data.is_text or vocabulary is None or micro * getattr(data, "seq_len", 0) <= _CHUNK:
        return
    num_rows = model.num_rows(vocabulary)
    # Bytes of a token, by the estimate of GPT-2 124M in bf16: 16 for each row of the vocabulary, most of which are
    # saved, and some 34 for each element of the width of each block.
    logits = 16 * num_rows
    share = 0.7 * logits / (logits + 34 * model.num_layers * model.embed_dim)
    changes = {"loss_chunk_size": _CHUNK}
    yield Way(f"train.loss_chunk_size={_CHUNK}", {"activations": share, "evaluation": 0.9}), "train", changes


def _of_fsdp(config: TrainConfig) -> Iterator[tuple[Way, str, dict[str, Any]]]:
    """Yield the changes to the weights that FSDP gathers: how many at a time, and in which format."""
    parallel, computed, blocks = config.parallel, config.precision.compute_dtype, config.model.num_blocks
    if parallel.strategy is not Strategy.fsdp:
        return
    # A stage stays gathered in any case. Two blocks stay gathered too: the one that runs and the next.
    if not parallel.reshard_after_forward and parallel.pipeline_parallel == 1 and blocks is not None and blocks > 2:
        yield (
            Way("parallel.reshard_after_forward=true", {"gathered": 1 - 2 / blocks}),
            "parallel",
            {"reshard_after_forward": True},
        )
    # Whether a custom model has a batch norm, which does not take such weights, is unknown here.
    is_known = not isinstance(config.model, CustomModelConfig)
    if is_known and parallel.param_dtype is FsdpDtype.fp32 and computed in (Dtype.bf16, Dtype.fp16):
        # Saved activations: autocast's copies of weights, and half of what passes between blocks. By the estimate of
        # four GPTs of 4 to 12 blocks these are 0.29 to 0.62 of the activations.
        yield (
            Way(f"parallel.param_dtype={computed.value}", {"gathered": 0.5, "activations": 0.3}),
            "parallel",
            {"param_dtype": FsdpDtype(computed.value)},
        )
