"""Files of one checkpoint: written through to the disk with a checksum, read back only if it still matches.

Tensors are in the safetensors format (https://huggingface.co/docs/safetensors): eight bytes of header length,
a JSON header, then the bytes of the tensors. This module writes the format itself, tensor by tensor: the library would
write to a path of its own, and the checksum would cost a second pass over the file or a second copy in memory.

Files are read, not mapped: a process that maps a file on NFS dies with SIGBUS when another node deletes the file.
Tensors are read whole or in part, and no byte more.

The checksum is zlib's CRC-32. It finds every error of up to 32 bits in a row, and misses one in 2**32 of the others, at
3 GB/s where sha256 does 1.4 and blake2b 0.8 (480 MiB on a 2-core machine). It detects errors of disks; owner and mode
of the files keep attackers out.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hpc_trainer.errors import CorruptCheckpointError
from hpc_trainer.record.trust import check_trusted
from hpc_trainer.runtime.tensors import is_sharded, local_tensor
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES, DTYPES, Box, local_box, runs

# The checksum of a piece is computed while it is in the processor's cache; then the piece is written.
_PIECE_BYTES = 1 << 22
# The group may read if the umask allows it; no other user may write, whatever the umask is.
FILE_MODE, FOLDER_MODE = 0o640, 0o750
_LONGEST_HEADER = 100_000_000  # bytes; the limit of safetensors, too
_LONGEST_READ = 1 << 30  # Linux reads at most 2 GiB at once


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Entry of one file in the manifest: name in the folder, size in bytes, CRC-32 of the bytes."""

    name: str
    size: int
    crc32: int


def _nobody(num_bytes: int) -> None:
    """Do nothing: the default of `advance`."""


def write_bytes(path: Path, pieces: Iterator[memoryview], *, advance: Callable[[int], None] = _nobody) -> FileRecord:
    """Create `path` from pieces of bytes, wait until the disk has it, and return its size and checksum.

    The folder belongs to this save alone. So O_EXCL would only fail if the answer to a create was lost (NFS).

    Args:
        path: the file.
        pieces: its content.
        advance: called with the number of bytes after each write.

    Raises:
        OSError: the disk is full or broken; NFS reports this at the fsync or the close.
    """
    size = checksum = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
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
    """Create a safetensors file, with one tensor in host memory at a time, and wait until the disk has it.

    Tensors may be on any device and have any stride. Raises OSError.
    """
    return write_bytes(path, _safetensors_pieces(tensors), advance=advance)


def read_bytes(path: Path) -> bytes:
    """Read a whole file. Raises CorruptCheckpointError if it is missing, UntrustedFileError, OSError."""
    with open_trusted(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read()


def verify(path: Path, record: FileRecord) -> None:
    """Read all of a file and compare its size and checksum with `record`.

    Raises:
        CorruptCheckpointError: the bytes are not those of `record`.
        UntrustedFileError: another user owns the file or may write it.
        OSError: the file cannot be read.
    """
    size = checksum = 0
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with open_trusted(path) as descriptor:
        size = os.fstat(descriptor).st_size
        check_size(path, record, size)
        while count := os.readv(descriptor, [buffer]):
            checksum = zlib.crc32(buffer[:count], checksum)
    _compare(path, record, size, checksum)


def _safetensors_pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    # Widest elements first, as in the library: so each tensor is aligned to its element size.
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
def open_trusted(path: Path) -> Iterator[int]:
    """Open a file for reading in a context that gives its descriptor.

    Raises:
        CorruptCheckpointError: the file is missing, or is a folder.
        UntrustedFileError: another user owns the file or may write it.
        OSError: it cannot be opened.
    """
    try:
        os.lstat(path)
        check_trusted(path)
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
    """Raise CorruptCheckpointError unless `size` is that of the record."""
    if size != record.size:
        raise CorruptCheckpointError(f"{path} has {size} bytes; its manifest says {record.size}.")


def _compare(path: Path, record: FileRecord, size: int, checksum: int) -> None:
    check_size(path, record, size)
    if checksum != record.crc32:
        raise CorruptCheckpointError(
            f"{path} has checksum {checksum:08x}; its manifest says {record.crc32:08x}: bytes have changed."
        )


class TensorFile:
    """An open safetensors file, and the place of each tensor in it."""

    def __init__(self, path: Path, descriptor: int, record: FileRecord) -> None:
        """Read only the header.

        Raises:
            CorruptCheckpointError: the file is not a safetensors file, or its size is not that of `record`.
            OSError: it cannot be read.
        """
        self._path, self._descriptor = path, descriptor
        check_size(path, record, os.fstat(descriptor).st_size)
        length = int.from_bytes(self._read(0, 8), "little")
        if not 2 <= length <= min(record.size - 8, _LONGEST_HEADER):
            raise CorruptCheckpointError(f"{path} is not a safetensors file: its header has {length} bytes.")
        self._first, self._end = 8 + length, record.size
        try:
            header = json.loads(self._read(8, length))
            self._entries = {name: self._entry(entry) for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{path} is not a safetensors file that we can read: {error!r}.") from error

    def form(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return number format and shape of a tensor. Raises CorruptCheckpointError if the file does not hold it."""
        if name not in self._entries:
            raise CorruptCheckpointError(f"{self._path} does not hold {name}, although its manifest lists it.")
        dtype, shape, _ = self._entries[name]
        return dtype, shape

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._entries)

    def read_into(self, memory: memoryview, name: str, pieces: Iterator[tuple[int, int, int]]) -> None:
        """Copy elements of a tensor into `memory`, bytes of the same number format.

        Args:
            memory: the destination.
            name: the name of the tensor.
            pieces: the runs to copy, as `shards.runs` yields them.
        """
        dtype, _, begin = self._entries[name]
        for there, here, count in pieces:
            part = memory[here * dtype.itemsize : (here + count) * dtype.itemsize]
            self._fill(begin + there * dtype.itemsize, part)

    def _entry(self, entry: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...], int]:
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = (self._first + int(offset) for offset in entry["data_offsets"])
        if end - begin != Box.whole(shape).numel * dtype.itemsize or not self._first <= begin <= end <= self._end:
            raise ValueError(f"{entry} does not fit in {self._end} bytes")
        return dtype, shape, begin

    def _read(self, offset: int, length: int) -> bytearray:
        data = bytearray(length)
        self._fill(offset, memoryview(data))
        return data

    def _fill(self, offset: int, part: memoryview) -> None:
        while part:
            count = os.preadv(self._descriptor, [part[:_LONGEST_READ]], offset)
            if count == 0:
                raise CorruptCheckpointError(f"{self._path} ends at byte {offset}; it was cut while we read it.")
            part, offset = part[count:], offset + count


class OpenFiles:
    """Files of the checkpoint in `folder`, or other files of this format, each opened when it is first needed.

    A context manager: nothing can be read after it is closed.

    Args:
        opener: opens a file for reading, in a context that gives its descriptor.
    """

    def __init__(
        self, folder: Path, records: Sequence[FileRecord], opener: Callable[[Path], AbstractContextManager[int]]
    ) -> None:
        self._folder, self._opener = folder, opener
        self._records = {record.name: record for record in records}
        self._open: dict[str, TensorFile] = {}
        self._stack = ExitStack()

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._open:
            path = self._folder / name
            descriptor = self._stack.enter_context(self._opener(path))
            self._open[name] = TensorFile(path, descriptor, self._records[name])
        return self._open[name]

    def tensors(self, name: str) -> dict[str, SavedTensor]:
        """Return all tensors of a file that holds each of them whole."""
        file, tensors = self[name], {}
        for tensor in file.names():
            dtype, shape = file.form(tensor)
            tensors[tensor] = SavedTensor(tensor, shape, dtype, ((Box.whole(shape), name),), self)
        return tensors

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """Tensor of a checkpoint that is not in memory. `name`: in each file. `pieces`: (box in the whole, file name)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Box, str], ...]
    files: OpenFiles
    _whole: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)

    @property
    def ndim(self) -> int:
        """Number of dimensions, ≥ 0."""
        return len(self.shape)

    def whole(self) -> torch.Tensor:
        """Return the whole tensor on the CPU. Raises as `fill`.

        Every call returns the same memory, so tied weights stay tied.
        """
        if not self._whole:
            out = torch.empty(self.shape, dtype=self.dtype)
            self._read_into(out, Box.whole(self.shape))
            self._whole.append(out)
        return self._whole[0]

    def fill(self, goal: torch.Tensor) -> None:
        """Fill `goal`, of the same shape and number format: all of it, or a DTensor's local part. Not collective.

        A contiguous `goal` on the CPU needs no extra memory. Raises CorruptCheckpointError, OSError.
        """
        with torch.no_grad():
            if is_sharded(goal):
                local, box = local_tensor(goal), local_box(goal)
            else:
                local, box = goal.detach(), Box.whole(self.shape)
            if not box.numel:
                return
            if local.device.type == "cpu" and local.is_contiguous() and not local.is_conj() and not local.is_neg():
                self._read_into(local, box)
                return
            copy = torch.empty(box.lengths, dtype=self.dtype)
            self._read_into(copy, box)
            local.copy_(copy)

    def _read_into(self, out: torch.Tensor, box: Box) -> None:
        if not box.numel:
            return
        memory = out.reshape(-1).view(torch.uint8).numpy().data
        for piece, file_name in self.pieces:
            shared = piece.overlap(box)
            if shared is not None:
                file = self.files[file_name]
                if file.form(self.name) != (self.dtype, piece.lengths):
                    raise CorruptCheckpointError(
                        f"{file_name} holds {self.name} as {file.form(self.name)}, and its manifest says "
                        f"{(self.dtype, piece.lengths)}."
                    )
                file.read_into(memory, self.name, runs(piece, box, shared))


def whole_tree(tree: Any) -> Any:
    """Return `tree` with all its `SavedTensor`s read into memory."""
    return tree_map(lambda leaf: leaf.whole() if isinstance(leaf, SavedTensor) else leaf, tree)


def fill(goal: torch.Tensor, saved: SavedTensor | torch.Tensor) -> None:
    """Fill `goal` (a DTensor's local part) in place from a tensor of its shape on the disk or in memory."""
    if isinstance(saved, SavedTensor):
        saved.fill(goal)
    elif is_sharded(goal):
        box = local_box(goal)
        ends = (offset + length for offset, length in zip(box.offsets, box.lengths, strict=True))
        local_tensor(goal).copy_(saved[tuple(map(slice, box.offsets, ends))])
    else:
        goal.detach().copy_(saved)


def like(saved: Any, here: Any) -> Any:
    """Read `saved` into memory: as DTensors where `here` (of the same structure) has them, else as whole tensors."""
    if isinstance(saved, (SavedTensor, torch.Tensor)):
        if not is_sharded(here) or here.shape != saved.shape:
            return whole_tree(saved)
        filled = torch.empty_like(here.detach(), dtype=saved.dtype)
        fill(filled, saved)
        return filled
    if isinstance(saved, Mapping):
        here = here if isinstance(here, Mapping) else {}
        return {key: like(item, here.get(key)) for key, item in saved.items()}
    if isinstance(saved, (list, tuple)):
        here = here if isinstance(here, (list, tuple)) and len(here) == len(saved) else [None] * len(saved)
        return type(saved)(like(item, other) for item, other in zip(saved, here, strict=True))
    return saved
