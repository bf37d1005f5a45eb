"""The files of one checkpoint: written through to the disk with a checksum, read back only if it still fits.

Tensors are in the safetensors format (https://huggingface.co/docs/safetensors): eight bytes of header length,
a JSON header, then the bytes of the tensors. We write it ourselves, tensor by tensor: the library would write
to a path of its own, and the checksum would cost a second pass over the file or a second copy in memory. Reading is
in saved.py.

The checksum is zlib's CRC-32. It finds every error of up to 32 bits in a row, and misses one in 2**32 of the
others, at 3 GB/s where sha256 does 1.4 and blake2b 0.8 (480 MiB on a 2-core machine). It guards against
disks, not against people: those are kept out by owner and mode.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hpc_trainer.errors import CorruptCheckpointError
from hpc_trainer.runs.files import check_trusted
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES

# A piece is summed while it is in the processor's cache, then written.
_PIECE_BYTES = 1 << 22
# The group may read if the umask lets it; nobody else may write, whatever the umask says.
FILE_MODE, FOLDER_MODE = 0o640, 0o750


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says about one file: name in the folder, bytes, CRC-32 of them."""

    name: str
    size: int
    crc32: int


def _nobody(num_bytes: int) -> None:
    """Nobody counts the bytes."""


def write_bytes(path: Path, pieces: Iterator[memoryview], *, advance: Callable[[int], None] = _nobody) -> FileRecord:
    """Creates `path` from pieces of bytes and waits until the disk has it; `advance` is told of bytes written.

    Raises OSError: the file is there already, the disk is full or broken.
    """
    size = checksum = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        for piece in pieces:
            for start in range(0, len(piece), _PIECE_BYTES):
                part = piece[start : start + _PIECE_BYTES]
                checksum = zlib.crc32(part, checksum)
                size += len(part)
                while part:
                    written = os.write(descriptor, part)
                    part = part[written:]
                    advance(written)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(path.name, size, checksum)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, advance: Callable[[int], None] = _nobody
) -> FileRecord:
    """Creates a safetensors file, one tensor in host memory at a time, and waits until the disk has it.

    Tensors may lie on any device and be of any stride. Raises OSError.
    """
    return write_bytes(path, _safetensors_pieces(tensors), advance=advance)


def read_bytes(path: Path, *, allow_group_write: bool = False) -> bytes:
    """A whole file. Raises CorruptCheckpointError if it is missing, UntrustedFileError, OSError."""
    with (
        open_trusted(path, allow_group_write) as descriptor,
        os.fdopen(descriptor, "rb", closefd=False) as file,
    ):
        return file.read()


def verify(path: Path, record: FileRecord, *, allow_group_write: bool = False) -> None:
    """Reads a file through and compares size and checksum.

    Raises:
        CorruptCheckpointError: the bytes are not those of `record`.
        UntrustedFileError: another user owns the file or may write it.
        OSError: it cannot be read.
    """
    size = checksum = 0
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with open_trusted(path, allow_group_write) as descriptor:
        size = os.fstat(descriptor).st_size
        check_size(path, record, size)
        while count := os.readv(descriptor, [buffer]):
            checksum = zlib.crc32(buffer[:count], checksum)
    _compare(path, record, size, checksum)


def _safetensors_pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    # Widest elements first, as the library does it: then each tensor lies aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, offset = {}, 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        tensor = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def open_trusted(path: Path, allow_group_write: bool) -> Iterator[int]:
    """A descriptor for reading. Raises CorruptCheckpointError: missing, or a folder; UntrustedFileError, OSError."""
    try:
        os.lstat(path)
        check_trusted(path, allow_group_write)
        # O_NONBLOCK: a named pipe put in the file's place must not hold us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{path} is missing.") from error
    try:
        yield descriptor
    except IsADirectoryError as error:
        raise CorruptCheckpointError(f"{path} is a folder; it must be a file.") from error
    finally:
        os.close(descriptor)


def check_size(path: Path, record: FileRecord, size: int) -> None:
    """Raises CorruptCheckpointError unless `size` is that of the record."""
    if size != record.size:
        raise CorruptCheckpointError(f"{path} has {size} bytes; its manifest says {record.size}.")


def _compare(path: Path, record: FileRecord, size: int, checksum: int) -> None:
    check_size(path, record, size)
    if checksum != record.crc32:
        raise CorruptCheckpointError(
            f"{path} has checksum {checksum:08x}; its manifest says {record.crc32:08x}: bytes have changed."
        )
