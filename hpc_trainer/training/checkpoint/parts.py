"""Who writes what of a checkpoint: each rank's tensors by file, and what rank 0 must know to describe them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpc_trainer.errors import CheckpointError
from hpc_trainer.training.checkpoint.manifest import STATE_FILE, find_sharded_fault, rank_file, shard_file
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES, pack, pack_sharded


@dataclass(frozen=True, slots=True)
class RankParts:
    """`files`: name -> tensors that this rank writes, those in use, not copies. `structure`: rank 0's, else None.

    `told`: JSON, for rank 0: the structure of the rank's own state, and the pieces that it writes.
    """

    files: dict[str, dict[str, torch.Tensor]]
    structure: Any
    told: dict[str, Any]


def split(replicated: Mapping[str, Any], per_rank: Mapping[str, Any], rank: int) -> RankParts:
    """Cuts a state into what each rank writes: rank 0 writes what is whole; each rank its piece of what is sharded.

    Not collective. Raises CheckpointError: something in the trees cannot be saved.
    """
    whole, shards, structure = pack_sharded(replicated)
    own, own_structure = pack(per_rank)
    files = {rank_file(rank): own}
    if rank == 0:
        files = {STATE_FILE: whole, **files}
    mine = {name: shard.local for name, shard in shards.items() if shard.local is not None}
    if mine:
        files[shard_file(rank)] = mine
    told: dict[str, Any] = {"structure": own_structure}
    told["pieces"] = {name: shards[name].box for name in mine}
    if rank == 0:
        told["forms"] = {
            name: {"shape": list(shard.shape), "dtype": DTYPE_NAMES[shard.dtype]} for name, shard in shards.items()
        }
    return RankParts(files, structure if rank == 0 else None, told)


def join(told: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The manifest's `sharded`, from what the ranks told, in their order.

    Raises CheckpointError: the pieces are not the whole of every tensor, each part once; by name.
    """
    sharded: dict[str, dict[str, Any]] = {name: {**form, "pieces": []} for name, form in told[0]["forms"].items()}
    for rank, each in enumerate(told):
        for name, (offsets, lengths) in each["pieces"].items():
            if name not in sharded:
                raise CheckpointError(
                    f"rank {rank} holds a part of {name}, and rank 0 knows no such sharded tensor; all ranks must save "
                    "the same objects."
                )
            sharded[name]["pieces"].append([rank, list(offsets), list(lengths)])
    for name, entry in sharded.items():
        fault = find_sharded_fault(entry)
        if fault:
            raise CheckpointError(f"the ranks' parts of {name} do not make one tensor: {fault}.")
    return sharded
