"""Newest collectives of this process, read from torch's flight recorder, which records every collective anyway.

The recorder covers all process groups: collectives of our code, and those of the backward pass of DDP and FSDP. On gloo
it works since torch 2.8, and keeps the last 2,000 collectives by default (`TORCH_FR_BUFFER_SIZE`). There it knows when
a collective was entered and whether it is over, but not when it ended. NCCL's recorder has another function name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch._C import _distributed_c10d as c10d

from hpc_trainer.runs.monitoring.flight import MAX_KEPT, Collective

_ASKED_BY = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
# Bytes of an element by number format, in torch's C++ names. A format that is not listed counts as 1 byte.
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "ComplexFloat": 8}


def recent_collectives() -> list[Collective]:
    """Return the newest collectives, at most 256, the oldest first. Takes 0.2 s.

    The fields `step` and `during` are left for the caller to set. The list is empty if torch has no recorder, or if the
    recorder returns no entries.
    """
    collectives: list[Collective] = []
    for name in _ASKED_BY:
        ask = getattr(c10d, name, None)
        if ask is not None:
            collectives += _read(ask())
    return sorted(collectives, key=lambda collective: collective.begin)[-MAX_KEPT:]


def _read(told: bytes | str) -> Iterator[Collective]:
    for entry in json.loads(told).get("entries", [])[-MAX_KEPT:]:
        sizes, formats = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
        is_p2p = bool(entry.get("is_p2p"))
        name, number = entry["process_group"][:2][::-1], entry["p2p_seq_id" if is_p2p else "collective_seq_id"]
        yield Collective(
            group=f"{name[0]} ({name[1]})", seq=int(number),
            name=str(entry["profiling_name"]).rpartition(":")[2], shape=_shape(sizes, formats),
            num_bytes=_num_bytes(sizes, formats), begin=entry["time_created_ns"] / 1e9, is_open=_is_open(entry),
            is_p2p=is_p2p,
        )  # fmt: skip


def _is_open(entry: Mapping[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def _shape(sizes: list[list[int]], formats: list[str]) -> str:
    texts = [f"{kind.lower()}{size}" for size, kind in zip(sizes[:3], formats[:3], strict=False)]
    return " ".join([*texts, f"and {len(sizes) - 3} more"] if len(sizes) > 3 else texts)


def _num_bytes(sizes: list[list[int]], formats: list[str]) -> int:
    return sum(math.prod(size) * _BYTES.get(kind, 1) for size, kind in zip(sizes, formats, strict=False))
