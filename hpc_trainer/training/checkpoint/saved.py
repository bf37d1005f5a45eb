"""Tensors that still lie in the files of a checkpoint: whoever needs one reads all of it or a part, and no byte more.

Read, not mapped: a map of a file on NFS dies with SIGBUS when another node deletes the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.errors import CorruptCheckpointError
from hpc_trainer.training.checkpoint.boxes import Box, runs
from hpc_trainer.training.checkpoint.files import FileRecord, check_size, open_trusted
from hpc_trainer.training.checkpoint.trees import DTYPES
from hpc_trainer.training.checkpoint.shards import is_sharded, local_box, local_tensor

_LONGEST_HEADER = 100_000_000  # of safetensors, too
_LONGEST_READ = 1 << 30  # Linux reads at most 2 GiB at once


class TensorFile:
    """An open safetensors file: where each tensor lies in it."""

    def __init__(self, path: Path, descriptor: int, record: FileRecord) -> None:
        """Reads the header only. Raises CorruptCheckpointError: it is none, or the file has another size; OSError."""
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
        """Number format and shape of a tensor. Raises CorruptCheckpointError: it is not there."""
        if name not in self._entries:
            raise CorruptCheckpointError(f"{self._path} does not hold {name}, and its manifest says so.")
        dtype, shape, _ = self._entries[name]
        return dtype, shape

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._entries)

    def read_into(self, memory: memoryview, name: str, pieces: Iterator[tuple[int, int, int]]) -> None:
        """Copies runs of a tensor's elements (there, here, count) into `memory`, bytes of the same number format."""
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
    """Files of one checkpoint, each opened when it is first needed."""

    def __init__(self, folder: Path, records: Sequence[FileRecord], allow_group_write: bool) -> None:
        self._folder, self._allow_group_write = folder, allow_group_write
        self._records = {record.name: record for record in records}
        self._open: dict[str, TensorFile] = {}
        self._stack = ExitStack()

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._open:
            path = self._folder / name
            descriptor = self._stack.enter_context(open_trusted(path, self._allow_group_write))
            self._open[name] = TensorFile(path, descriptor, self._records[name])
        return self._open[name]

    def tensors(self, name: str) -> dict[str, SavedTensor]:
        """Every tensor of a file, whole in it."""
        file, found = self[name], {}
        for tensor in file.names():
            dtype, shape = file.form(tensor)
            found[tensor] = SavedTensor(tensor, shape, dtype, ((Box.whole(shape), name),), self)
        return found

    def close(self) -> None:
        """What was not read by now cannot be read any more."""
        self._stack.close()


@contextmanager
def open_files(folder: Path, records: Sequence[FileRecord], allow_group_write: bool) -> Iterator[OpenFiles]:
    """The files of the checkpoint in `folder`, closed at the end."""
    files = OpenFiles(folder, records, allow_group_write)
    try:
        yield files
    finally:
        files.close()


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """A tensor of a checkpoint that is not in memory: `name` in each file, `pieces` are (where in the whole, file)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Box, str], ...]
    files: OpenFiles
    _whole: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)

    @property
    def ndim(self) -> int:
        """Dimensions, ≥ 0."""
        return len(self.shape)

    def whole(self) -> torch.Tensor:
        """All of it, on the CPU; the same memory at every call, so tied weights stay tied. Raises as `fill` does."""
        if not self._whole:
            out = torch.empty(self.shape, dtype=self.dtype)
            self._read_into(out, Box.whole(self.shape))
            self._whole.append(out)
        return self._whole[0]

    def fill(self, goal: torch.Tensor) -> None:
        """Fills `goal`, of the same shape and number format: all of it, or a DTensor's local part. Not collective.

        On the CPU without memory of its own. Raises CorruptCheckpointError, OSError.
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
    """`tree` with all its tensors read."""
    if isinstance(tree, SavedTensor):
        return tree.whole()
    if isinstance(tree, Mapping):
        return {key: whole_tree(item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(whole_tree(item) for item in tree)
    return tree


def fill(goal: torch.Tensor, saved: SavedTensor | torch.Tensor) -> None:
    """Fills `goal` in place, whole or a DTensor's local part, from a tensor of its shape on the disk or in memory."""
    if isinstance(saved, SavedTensor):
        saved.fill(goal)
    elif is_sharded(goal):
        box = local_box(goal)
        ends = (offset + length for offset, length in zip(box.offsets, box.lengths, strict=True))
        local_tensor(goal).copy_(saved[tuple(map(slice, box.offsets, ends))])
    else:
        goal.detach().copy_(saved)


def like(saved: Any, here: Any) -> Any:
    """`saved` in memory: a DTensor where `here`, of the same outline, has one; whole tensors elsewhere."""
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
