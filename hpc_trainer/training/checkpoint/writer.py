"""Writing of a state into the checkpoints folder: all ranks begin together, and a thread writes.

While training continues, the thread writes a copy of the state in host memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.record import checkpoint_folders as folders
from hpc_trainer.record.checkpoint_folders import Retention
from hpc_trainer.record.files import fsync_folder, make_folder_once, rename
from hpc_trainer.record.reading import is_there
from hpc_trainer.runtime.disk_room import QuotaWatch, free_room
from hpc_trainer.runtime.rank_group import Mail, RankGroup, attempt, on_each_rank, on_rank_zero, raise_any
from hpc_trainer.training.checkpoint.manifest import NAME, Manifest, RankParts, merge_pieces, parts_of_rank, shard_file
from hpc_trainer.training.checkpoint.tensor_files import FOLDER_MODE, FileRecord, write_bytes, write_tensors

# Alignment of each tensor in the buffer, in bytes: a cache line, and wide enough for every element type.
_ALIGNMENT = 64
# Training has priority: with every core busy it lost 3 % of its speed at 19, and 12-33 % at 10 (decision 0015). With
# a core to spare this changes nothing.
_NICENESS = 19


class HostCopy:
    """One host buffer, as large as the largest state, reused from save to save; pinned if tensors are on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """Copy the tensors into the buffer, and return the contiguous copies by the same names.

        This overwrites the copies of the last call. When it returns, the originals may change. Tensors may have any
        stride and be on any device.

        Raises:
            RuntimeError: there is not enough memory for the buffer.
        """
        tensors = [tensor for file in files.values() for tensor in file.values()]
        is_on_gpu = any(tensor.is_cuda for tensor in tensors)
        views = iter(self._views(tensors, pinned=is_on_gpu))
        copies = {
            name: {key: next(views).copy_(tensor, non_blocking=True) for key, tensor in file.items()}
            for name, file in files.items()
        }
        if is_on_gpu:
            # The copies run on each device's current stream, after the kernels that made the tensors.
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
        return copies

    def _views(self, tensors: list[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if self._buffer.numel() < end or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before the new one is allocated
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        return [
            self._buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, offsets, strict=True)
        ]


class WriterThread:
    """One save on one rank. `work` runs in a thread, takes this object, and returns JSON.

    The thread calls no collective, prints nothing and logs nothing: training forks loader processes meanwhile, and a
    stream's lock that a thread holds at that moment would stay locked in them for ever. Its messages are in `notes`,
    for the main thread.
    """

    def __init__(self, step: int, path: Path, work: Callable[[WriterThread], Any], *, is_background: bool) -> None:
        self.step, self.path = step, path
        self.progress = 0
        """Bytes written so far: a sign of life."""
        self.notes: list[str] = []
        self.outcome: dict[str, Any] | None = None
        """Outcome of the work, the first result of `rank_errors.attempt`; None while the thread runs."""
        self.cause: Exception | None = None
        self.begin, self.seconds = time.perf_counter(), 0.0
        self._work, self._is_background = work, is_background
        # A daemon thread: ranks exit by os._exit, and a half-written checkpoint does not look complete.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes` to the bytes written. The thread calls this."""
        self.progress += num_bytes

    def mark_committed(self) -> None:
        """Record the time at which the checkpoint is complete; only clean-up follows. The thread calls this."""
        self.seconds = time.perf_counter() - self.begin

    def is_this_thread(self) -> bool:
        """Return True if the writing thread itself calls this."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        if self._is_background:
            with contextlib.suppress(OSError, AttributeError):  # on Linux each thread has its own priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        outcome, self.cause = attempt(lambda: self._work(self))
        self.seconds = self.seconds or time.perf_counter() - self.begin
        self.outcome = outcome  # last: a reader that sees it may read the rest


# Seconds that ranks wait for their own threads before they ask each other again.
_WAIT_S = 1.0
_FILES_BESIDE_SHARDS = 2  # rank 0's file of the state that all ranks share, and the manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Result of a save: the seconds until the checkpoint was complete, or the error that prevented it."""

    step: int
    path: Path
    seconds: float
    error: HpcTrainerError | None


class CheckpointWriter:
    """Writer of a `CheckpointStore`'s checkpoints, one save at a time. The main thread calls every method.

    Args:
        folder: the checkpoints of one run.
        group: the ranks of this attempt.
        attempt: number of this attempt.
        retention: rules for keeping old checkpoints.
        make_room: quarantines the checkpoint at a path, or returns False if it is valid. Rank 0.
        is_valid: reads all of a checkpoint unless that was done before; quarantines a damaged one. Rank 0.
        verified: checkpoints that need not be read again; written ones are added here, deleted ones removed.
        warn: takes one line, on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: RankGroup,
        attempt: int,
        retention: Retention,
        make_room: Callable[[Path], bool],
        is_valid: Callable[[Path], bool],
        verified: set[Path],
        warn: Callable[[str], None],
    ) -> None:
        self.retention = retention
        self.scores: dict[int, float] = {}
        """Scores that determine the best checkpoint, by step; on rank 0. Add to them as steps are evaluated."""
        self.before_commit: Callable[[], None] = _nothing
        """Called by rank 0's thread right before a checkpoint gets its name, and before old ones are deleted; an error
        that it raises prevents both."""
        self._folder, self._group, self._attempt = folder, group, attempt
        self._make_room, self._is_valid, self._verified, self._say = make_room, is_valid, verified, warn
        self._host_copy = HostCopy()
        self._quota: QuotaWatch | None = None
        self._is_copied = False
        self._thread: WriterThread | None = None
        self._num_saves = 0

    def begin(
        self,
        step: int,
        *,
        replicated: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        meta: Mapping[str, Any],
        is_background: bool = True,
    ) -> bool:
        """Begin to save `step` and return while it is written; return False if its checkpoint exists. Collective.

        The state is copied first, and may change when this returns. With `is_background` False it is not copied, and
        must not change before `wait` has returned. One save at a time: call only after `result` or `wait` returned the
        last result.

        Args and errors as in `CheckpointStore.save`, except for errors of writing, which `result` and `wait` return.
        """
        assert self._thread is None, "one save at a time"
        path = self._folder / folders.step_name(step)
        temporary = folders.temporary_path(self._folder, step, self._attempt)
        if not on_rank_zero(self._group, lambda: self._begin(path, temporary)):
            return False
        try:
            parts, reports = on_each_rank(
                self._group,
                lambda: self._copy_parts(parts_of_rank(replicated, per_rank, self._group.rank), is_background),
            )

            shards = {shard_file(rank) for rank in range(self._group.world_size)}

            def describe(files: list[FileRecord]) -> Manifest:
                return Manifest(
                    step=step,
                    world_size=self._group.world_size,
                    attempt=self._attempt,
                    meta=dict(meta),
                    files=sorted(files, key=lambda record: record.name in shards),  # stable: those of shards come last
                    replicated=parts.structure,
                    per_rank=[report["structure"] for report in reports],
                    sharded=merge_pieces(reports),
                )

            num_bytes = sum(report["bytes"] for report in reports)
            on_rank_zero(self._group, lambda: self._check_room(step, num_bytes + len(describe([]).to_bytes())))
        except HpcTrainerError:
            if self._group.is_rank_zero:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._num_saves += 1
        # The attempt is named: in a test a killed one may still wait for its mail when the next one sends.
        mail = Mail(f"checkpoint-{self._attempt}-{self._num_saves}") if self._group.world_size > 1 else None
        work = partial(self._write, temporary=temporary, files=parts.files, mail=mail, describe=describe)
        self._thread = WriterThread(step, path, work, is_background=is_background)
        self._thread.start()
        if is_background and not self._is_copied:
            self._thread.join()  # the state itself is being written; other ranks wait for this one in their next step
        return True

    @property
    def seconds(self) -> float | None:
        """Seconds until the checkpoint was complete; None until this rank's thread has succeeded. Not collective."""
        thread = self._thread
        is_done = thread is not None and thread.outcome is not None and not thread.outcome["kind"]
        return thread.seconds if is_done and thread is not None else None

    def result(self) -> SaveResult | None:
        """Return the result of the save that was begun; None while it is written, as rank 0 knows. Collective."""
        return self._ask()[0]

    def wait(self, beat: Callable[[], None] | None = None) -> SaveResult:
        """Wait until the save that was begun has ended, and return its result. Collective.

        Args:
            beat: called about once a second while the ranks together make progress, so that a hung disk is noticed.
        """
        seen = -1
        while True:
            assert self._thread is not None, "a save was begun"
            self._thread.join(_WAIT_S)
            ended, progress = self._ask()
            if beat is not None and progress > seen:
                beat()
            seen = progress
            if ended is not None:
                return ended

    def warn(self, text: str) -> None:
        """Print a warning; if the writing thread calls this, the main thread prints it when it asks for the result."""
        if self._thread is not None and self._thread.is_this_thread():
            self._thread.notes.append(text)
        else:
            self._say(text)

    def _ask(self) -> tuple[SaveResult | None, int]:
        """Return (result of the save, bytes written by all ranks). Collective."""
        thread = self._thread
        assert thread is not None, "a save was begun"
        progress, outcome = thread.progress, thread.outcome
        reports = self._group.gather({"progress": progress, "outcome": outcome, "seconds": thread.seconds})
        outcome, progress = reports[0]["outcome"], sum(report["progress"] for report in reports)
        if outcome is None:
            return None, progress
        thread.join()  # returns at once: other ranks' threads reported to rank 0 before its thread could end
        self._thread = None
        for note in thread.notes:
            self._say(note)
        error: HpcTrainerError | None = None
        try:
            raise_any([outcome], thread.cause)
        except HpcTrainerError as raised:
            error = raised
        return SaveResult(step=thread.step, path=thread.path, seconds=reports[0]["seconds"], error=error), progress

    def _begin(self, path: Path, temporary: Path) -> bool:
        """Create the fresh folder; return False if the checkpoint exists already."""
        if not is_there(self._folder):
            self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            fsync_folder(self._folder.parent)  # else a power cut could remove the folder with everything synced in it
        if not self._make_room(path):
            return False
        folders.discard_unfinished(
            self._folder, self._attempt
        )  # of this attempt too: a failed save may have left files
        if not make_folder_once(temporary, FOLDER_MODE):
            raise FileExistsError(errno.EEXIST, "the files of a failed save cannot be removed", str(temporary))
        return True

    def _copy_parts(self, parts: RankParts, is_background: bool) -> tuple[RankParts, dict[str, Any]]:
        """Return (parts that this rank writes, copied if training continues meanwhile; JSON for rank 0)."""
        files = parts.files
        self._is_copied = False
        if is_background:
            try:
                files, self._is_copied = self._host_copy.copy(files), True
            except (MemoryError, RuntimeError) as error:  # torch's errors of memory are RuntimeErrors
                self._say(f"no host memory to copy the state into; training waits for this save. {error}")
        num_bytes = sum(tensor.numel() * tensor.element_size() for file in files.values() for tensor in file.values())
        return RankParts(files, parts.structure, {}), {**parts.description, "bytes": num_bytes}

    def _check_room(self, step: int, num_bytes: int) -> None:
        """Warn if disk or quota lack room. The save is tried all the same, because their figures are often wrong."""
        self._quota = self._quota or QuotaWatch(self._folder)
        num_files = self._group.world_size + _FILES_BESIDE_SHARDS
        for whose, room in (("the file system", free_room(self._folder)), ("your quota", self._quota.room())):
            lacks = []
            if room.num_bytes is not None and room.num_bytes < num_bytes:
                lacks.append(f"{(num_bytes - room.num_bytes) / 1e6:.1f} of its {num_bytes / 1e6:.1f} MB")
            if room.num_files is not None and room.num_files < num_files:
                lacks.append(f"{num_files - room.num_files} of its {num_files} files")
            if lacks:
                self._say(
                    f"WARNING: {whose} lacks room for {' and '.join(lacks)}: the checkpoint of step {step} in "
                    f"{self._folder}. The save is tried all the same; make room there, or keep fewer checkpoints "
                    "(checkpoint.keep_last)."
                )

    # The methods below run in the writing thread of each rank and call no collective.

    def _write(
        self,
        thread: WriterThread,
        *,
        temporary: Path,
        files: Mapping[str, Mapping[str, torch.Tensor]],
        mail: Mail | None,
        describe: Callable[[list[FileRecord]], Manifest],
    ) -> None:
        def write_mine() -> list[dict[str, Any]]:
            return [
                asdict(write_tensors(temporary / name, tensors, advance=thread.advance))
                for name, tensors in files.items()
            ]

        outcome, cause = attempt(write_mine)
        if mail is not None and not self._group.is_rank_zero:
            mail.send(str(self._group.rank), outcome)
            return
        others = mail.take([str(rank) for rank in range(1, self._group.world_size)]) if mail is not None else []
        try:
            raise_any([outcome, *others], cause)
            records = [FileRecord(**record) for result in (outcome, *others) for record in result["value"]]
            self.before_commit()
            self._commit(temporary, thread.path, describe(records))
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        thread.mark_committed()
        self._verified.add(thread.path)
        self._retain(thread.path)

    def _commit(self, temporary: Path, path: Path, manifest: Manifest) -> None:
        write_bytes(temporary / NAME, iter([memoryview(manifest.to_bytes())]))
        fsync_folder(temporary)
        rename(temporary, path)
        fsync_folder(self._folder)

    def _retain(self, saved: Path) -> None:
        """Delete old checkpoints; only warn on errors, because the new checkpoint is complete all the same."""
        try:
            self.before_commit()
            deleted = self.retention.apply(self._folder, saved=saved, scores=dict(self.scores), is_valid=self._is_valid)
            self._verified.difference_update(deleted)
        except (OSError, HpcTrainerError) as error:
            self.warn(f"old checkpoints in {self._folder} were not deleted: {error}")


def _nothing() -> None:
    """Do nothing: the default of `before_commit`."""
