"""Lower bound of a `model=gpt` run's GPU memory, from its sizes alone: `plan` prints it without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_trainer.config.gpu_types import find_gpu_type
from hpc_trainer.config.load import section_from_plain
from hpc_trainer.config.schema.model.shipped import GptConfig, Positions
from hpc_trainer.config.schema.precision import FORMATS, Dtype
from hpc_trainer.config.store import variant_of

_MOMENT_BYTES = 4


def memory_line(plain: Mapping[str, Any], world_size: int) -> str | None:
    """Return a line if a frozen configuration cannot fit the largest GPU of its type; None if it may, or if unknown."""
    name = plain["hardware"]["gpu_type"]
    gpu = find_gpu_type(name)
    least = None if gpu is None else least_bytes(plain, world_size)
    if gpu is None or least is None or least <= gpu.memory_gb[-1] * 1e9:
        return None
    sizes = " or ".join(map(str, gpu.memory_gb))
    return (
        f"model=gpt needs more than {least / 1e9:.4g} GB a rank for weights, gradients and optimizer state, and "
        f"hardware.gpu_type={name} has {sizes} GB. `plan --memory` says what the rest needs, and which keys help."
    )


def least_bytes(plain: Mapping[str, Any], world_size: int) -> int | None:
    """Return a lower bound in bytes of weights, gradients, moments and averaged weights on one of `world_size` ranks.

    None if the configuration does not give the sizes of the model or data set, or if the loop is the user's own.
    """
    parallel, optim = plain["parallel"], plain["optim"]
    count = _num_weights(plain)
    if count is None or plain["train"]["main"] is not None or plain["train"].get("command") is not None:
        return None
    divided = parallel["tensor_parallel"] * parallel["pipeline_parallel"]
    if parallel["strategy"] == "fsdp":
        divided = world_size // parallel["data_parallel_replicate"]
    kept = 1 + (not optim["in_backward"]) + (plain["train"]["ema_decay"] is not None)
    kind: Any = variant_of("optim", optim)
    moments = 0 if optim["offload"] else kind(**optim).num_moments
    weight_bytes = FORMATS[Dtype[plain["precision"]["compute_dtype"]]].weight_bytes
    of_moments = _MOMENT_BYTES * (count * moments // (world_size if parallel["zero1"] else divided))
    return weight_bytes * int(count * kept // divided) + of_moments


def _num_weights(plain: Mapping[str, Any]) -> int | None:
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
