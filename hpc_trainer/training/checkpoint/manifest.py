"""manifest.json, the list of a checkpoint's contents. It is written last: a folder without it is no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError
from hpc_trainer.record.checkpoint_folders import MANIFEST, manifest_tail
from hpc_trainer.training.checkpoint.tensor_files import FileRecord
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES, Box, find_fault, pack, pack_sharded

NAME = MANIFEST
STATE_FILE = "state.safetensors"
FORMAT = 2  # format 1 had no shards, and optimizer state by the index of the weight instead of by its name
_MOST = 2**62  # elements along a dimension


def rank_file(rank: int) -> str:
    """Return the name of a rank's file, `rank-000.safetensors`, for state that differs between ranks."""
    return f"rank-{rank:03d}.safetensors"


def shard_file(rank: int) -> str:
    """Return the name of the file in which a rank writes its pieces of sharded tensors, as `shard-000.safetensors`."""
    return f"shard-{rank:03d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of one checkpoint. `files`: the state file, one file per rank, shard files. The structures are `pack`'s.

    `sharded`: name -> {"shape": [..], "dtype": "F32", "pieces": [[rank, [offset, ..], [length, ..]], ..]}, the pieces
    in the ranks' shard files, under the same name.
    `checksum`: the CRC-32 in the file that was read, in hexadecimal; two saves of one step differ in it.
    """

    step: int
    world_size: int
    attempt: int
    meta: dict[str, Any]
    files: list[FileRecord]
    replicated: Any
    per_rank: list[Any]
    sharded: dict[str, dict[str, Any]] = field(default_factory=dict)
    checksum: str = field(default="", compare=False)

    def to_bytes(self) -> bytes:
        """Return one JSON object, whose last key is the CRC-32 of all bytes before it.

        Raises:
            CheckpointError: `meta` is not JSON.
        """
        values = asdict(self)
        del values["checksum"]
        try:
            text = json.dumps({"format": FORMAT, **values}, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"meta={self.meta!r} must be JSON with finite numbers: {error}.") from error
        body = text[:-1].encode()  # the closing brace comes after the checksum
        return body + manifest_tail(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read the bytes of `to_bytes`; the checksum covers every byte, so any change is detected.

        Raises:
            CorruptCheckpointError: the checksum does not match, or the parts contradict each other.
            CheckpointError: another version of this program wrote another format.
        """
        body = data[: -len(manifest_tail(b""))]
        if data != body + manifest_tail(body):
            raise CorruptCheckpointError(f"{NAME} does not fit its own checksum: it is torn or its bytes changed.")
        values = json.loads(data)
        version = values.pop("format")
        if version != FORMAT:
            raise CheckpointError(
                f"{NAME} has format {version!r}; this version reads {FORMAT}. Continue with the version that wrote it."
            )
        files = [FileRecord(**record) for record in values.pop("files")]
        manifest = cls(files=files, **values)
        manifest._check()
        return manifest

    def boxes(self, name: str) -> list[tuple[Box, str]]:
        """Return the box in the whole tensor, and the file, of each piece of a sharded tensor."""
        return [(_box(piece), shard_file(piece[0])) for piece in self.sharded[name]["pieces"]]

    def _check(self) -> None:
        ranks = range(self.world_size)
        try:
            writers = {piece[0] for entry in self.sharded.values() for piece in entry["pieces"]}
            expected = [STATE_FILE, *map(rank_file, ranks), *map(shard_file, sorted(writers))]
            if [record.name for record in self.files] != expected or len(self.per_rank) != self.world_size:
                raise CorruptCheckpointError(f"{NAME} lists other files than its {self.world_size} ranks have.")
            if not writers <= set(ranks):
                raise CorruptCheckpointError(f"{NAME} has pieces of rank {max(writers)} of {self.world_size}.")
            for name, entry in self.sharded.items():
                fault = find_sharded_fault(entry)
                if fault:
                    raise CorruptCheckpointError(f"{NAME}, sharded tensor {name}: {fault}.")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CorruptCheckpointError(f"{NAME} does not describe its sharded tensors: {error!r}.") from error


def find_sharded_fault(entry: Mapping[str, Any]) -> str | None:
    """Return why an entry of `sharded` does not describe a tensor in pieces; None if it does.

    A malformed entry may also raise KeyError, TypeError, ValueError, IndexError or AttributeError.
    """
    if set(entry) != {"shape", "dtype", "pieces"} or entry["dtype"] not in DTYPE_NAMES.values():
        return f"it has the keys {sorted(entry)} and the number format {entry.get('dtype')}"
    numbers = [*entry["shape"], *(number for _, offsets, lengths in entry["pieces"] for number in (*offsets, *lengths))]
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
        return "shapes, offsets and lengths must be whole numbers ≥ 0"
    return find_fault(entry["shape"], [_box(piece) for piece in entry["pieces"]])


def _box(piece: Sequence[Any]) -> Box:
    _, offsets, lengths = piece
    return Box(tuple(offsets), tuple(lengths))


@dataclass(frozen=True, slots=True)
class RankParts:
    """Parts of a state that one rank writes.

    `files`: name -> tensors that this rank writes, those in use, not copies. `structure`: rank 0's; None on other
    ranks. `description`: JSON, for rank 0: the structure of the rank's own state, and the pieces that the rank writes.
    """

    files: dict[str, dict[str, torch.Tensor]]
    structure: Any
    description: dict[str, Any]


def parts_of_rank(replicated: Mapping[str, Any], per_rank: Mapping[str, Any], rank: int) -> RankParts:
    """Return the part of a state that this rank writes. Not collective.

    Rank 0 writes whole tensors; each rank writes its piece of sharded tensors.

    Raises:
        CheckpointError: something in the trees cannot be saved.
    """
    whole, shards, structure = pack_sharded(replicated)
    own, own_structure = pack(per_rank)
    files = {rank_file(rank): own}
    if rank == 0:
        files = {STATE_FILE: whole, **files}
    mine = {name: shard.local for name, shard in shards.items() if shard.local is not None}
    if mine:
        files[shard_file(rank)] = mine
    description: dict[str, Any] = {"structure": own_structure}
    description["pieces"] = {name: shards[name].box for name in mine}
    if rank == 0:
        description["forms"] = {
            name: {"shape": list(shard.shape), "dtype": DTYPE_NAMES[shard.dtype]} for name, shard in shards.items()
        }
    return RankParts(files, structure if rank == 0 else None, description)


def merge_pieces(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the manifest's `sharded` from the `descriptions` of all ranks, in the order of ranks.

    Raises:
        CheckpointError: the pieces of a tensor, which the message names, do not make the whole, each part once.
    """
    sharded: dict[str, dict[str, Any]] = {
        name: {**form, "pieces": []} for name, form in descriptions[0]["forms"].items()
    }
    for rank, part in enumerate(descriptions):
        for name, (offsets, lengths) in part["pieces"].items():
            if name not in sharded:
                raise CheckpointError(
                    f"rank {rank} holds a part of {name}, and rank 0 has no such sharded tensor; all ranks must save "
                    "the same objects."
                )
            sharded[name]["pieces"].append([rank, list(offsets), list(lengths)])
    for name, entry in sharded.items():
        fault = find_sharded_fault(entry)
        if fault:
            raise CheckpointError(f"the ranks' parts of {name} do not make one tensor: {fault}.")
    return sharded
