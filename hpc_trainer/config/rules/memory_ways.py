"""Changes that would save memory in a training: only those that break no rule which was not broken before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.batch import divisors, num_parts
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.model.shipped import CustomModelConfig, GptConfig
from hpc_trainer.config.schema.parallel import FsdpDtype, Strategy
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import AUTO, Recompute, TrainConfig

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
        share = {"activations": 1 - train.recompute_budget}
        yield Way("train.recompute=budget", share), "train", {"recompute": Recompute.budget}
    yield from _of_fsdp(config)
    if config.precision.compute_dtype in (Dtype.fp32, Dtype.tf32):
        yield Way("precision=bf16", {"activations": 0.4}), "precision", {"compute_dtype": Dtype.bf16}
    if not config.optim.offload:
        yield Way("optim.offload=true", {"optimizer": 0.9}), "optim", {"offload": True}
    if not config.parallel.zero1 and config.parallel.strategy is Strategy.ddp:
        yield Way("parallel.zero1=true", {"optimizer": others}), "parallel", {"zero1": True}
    if config.parallel.strategy is not Strategy.fsdp:
        shared = dict.fromkeys(("weights", "gradients", "optimizer", "average"), others)
        text = "parallel=fsdp parallel.zero1=false" if config.parallel.zero1 else "parallel=fsdp"
        yield Way(text, shared), "parallel", {"strategy": Strategy.fsdp, "zero1": False}
    if train.ema_decay is not None:
        yield Way("train.ema_decay=null", {"average": 1.0}), "train", {"ema_decay": None}


def _of_loss(config: TrainConfig) -> Iterator[tuple[Way, str, dict[str, Any]]]:
    """Yield the change that computes the logits of a part of the tokens at a time."""
    model, data, micro = config.model, config.data, config.train.given_micro_batch_size
    if not isinstance(model, GptConfig) or config.train.loss_chunk_size is not None or micro is None:
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
