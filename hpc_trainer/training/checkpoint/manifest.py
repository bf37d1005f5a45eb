"""manifest.json: what a checkpoint is made of. Written last: a folder without it is no checkpoint."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError
from hpc_trainer.training.checkpoint.files import FileRecord

NAME = "manifest.json"
STATE_FILE = "state.safetensors"
FORMAT = 1


def rank_file(rank: int) -> str:
    """`rank-000.safetensors`: what differs between ranks."""
    return f"rank-{rank:03d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint: `files` are the state file, then one for each rank; the structures are `pack`'s."""

    step: int
    world_size: int
    attempt: int
    meta: dict[str, Any]
    files: list[FileRecord]
    replicated: Any
    per_rank: list[Any]

    def to_bytes(self) -> bytes:
        """One JSON object whose last key is the CRC-32 of all bytes before it.

        Raises CheckpointError: `meta` is not JSON.
        """
        try:
            text = json.dumps({"format": FORMAT, **asdict(self)}, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"meta={self.meta!r} must be JSON with finite numbers: {error}.") from error
        body = text[:-1].encode()  # the closing brace comes after the checksum
        return body + _tail(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads what `to_bytes` wrote; every byte is covered, so any change is found.

        Raises:
            CorruptCheckpointError: the checksum does not fit, or the parts contradict each other.
            CheckpointError: another version of this program wrote another format.
        """
        body = data[: -len(_tail(b""))]
        if data != body + _tail(body):
            raise CorruptCheckpointError(f"{NAME} does not fit its own checksum: it is torn or its bytes changed.")
        values = json.loads(data)
        del values["checksum"]
        found = values.pop("format")
        if found != FORMAT:
            raise CheckpointError(
                f"{NAME} has format {found!r}; we read {FORMAT}. Go on with the version that wrote it."
            )
        files = [FileRecord(**record) for record in values.pop("files")]
        manifest = cls(files=files, **values)
        expected = [STATE_FILE, *(rank_file(rank) for rank in range(manifest.world_size))]
        if [record.name for record in files] != expected or len(manifest.per_rank) != manifest.world_size:
            raise CorruptCheckpointError(f"{NAME} lists other files than its {manifest.world_size} ranks have.")
        return manifest


def _tail(body: bytes) -> bytes:
    return f',"checksum":"{zlib.crc32(body):08x}"}}\n'.encode()
