"""Store of one run's checkpoints: saved whole or not at all, read back only if every byte is unchanged.

`save` uses CheckpointWriter. Ranks learn of each other's errors in the collective that they all call (`rank_errors`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_trainer.errors import CheckpointError, ConfigError, CorruptCheckpointError
from hpc_trainer.record import checkpoint_folders as folders
from hpc_trainer.record.checkpoint_folders import Retention
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.trust import check_trusted
from hpc_trainer.runtime.rank_group import RankGroup, on_each_rank, on_rank_zero
from hpc_trainer.training.checkpoint.manifest import NAME, STATE_FILE, Manifest, rank_file, shard_file
from hpc_trainer.training.checkpoint.tensor_files import (
    OpenFiles,
    SavedTensor,
    open_trusted,
    read_bytes,
    verify,
    whole_tree,
)
from hpc_trainer.training.checkpoint.trees import DTYPES, unpack
from hpc_trainer.training.checkpoint.writer import CheckpointWriter

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that was valid when it was read. `meta` is the argument of `save`.

    `checksum`: that of the manifest, in hexadecimal. A run that goes back saves the same step again: the path stays.
    """

    step: int
    path: Path
    world_size: int
    meta: dict[str, Any]
    checksum: str


def _take_all(shared: Any, own: Any) -> Any:
    return whole_tree(shared), whole_tree(own)


class CheckpointStore:
    """The `checkpoints/` folder of a run, for all its ranks.

    Args:
        folder: created at the first save. It may itself be a symbolic link; nothing in it may be one.
        group: the ranks of this attempt.
        keep_last: number of valid checkpoints to keep, ≥ 1.
        attempt: number of this start of the run, ≥ 0; higher than that of any earlier attempt.
        retention: rules for keeping more; the argument `keep_last` replaces the one in it.
        warn: takes one line about a checkpoint that is damaged or was not deleted, on rank 0; default: logging.
        read_only: for the folder of another run: nothing is deleted or renamed, and nothing may be saved.

    The constructor is not collective; rank 0 deletes what dead attempts left behind.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: RankGroup,
        keep_last: int,
        attempt: int,
        retention: Retention | None = None,
        warn: Callable[[str], None] | None = None,
        read_only: bool = False,
    ) -> None:
        self.folder = folder
        self._group = group
        self._read_only = read_only
        # Checkpoints that this process read in full: retention must not read the kept ones again after every save.
        self._verified: set[Path] = set()
        self.writer = CheckpointWriter(
            folder,
            group=group,
            attempt=attempt,
            retention=dataclasses.replace(retention or Retention(), keep_last=keep_last),
            make_room=self._make_room,
            is_valid=lambda path: path in self._verified or self._inspect(path) is not None,
            verified=self._verified,
            warn=warn or logging.getLogger(__name__).warning,
        )
        """Writer that saves while training continues."""
        self._warn = self.writer.warn
        if group.is_rank_zero and not read_only:
            try:
                folders.discard_unfinished(folder, attempt)
            except OSError as error:
                self._warn(f"leftovers in {folder} could not be deleted: {error}")

    def save(
        self,
        step: int,
        *,
        replicated: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        meta: Mapping[str, Any],
        beat: Callable[[], None] | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, then delete the checkpoints that no rule of `retention` keeps. Collective.

        A valid checkpoint of this step that exists already is left as it is.

        Args:
            step: optimizer steps done, ≥ 0.
            replicated: tree of the state that is the same on all ranks; rank 0's is written (others may pass {}). Of
                sharded tensors in it (DTensors, `Shard`s) each rank writes its part; one rank writes each replica.
            per_rank: tree of each rank's own state. Both trees may hold what `pack` takes.
            meta: JSON about the checkpoint; that of rank 0 is written.
            beat: as in `CheckpointWriter.wait`.

        Returns:
            The folder of the checkpoint, on all ranks.

        Raises:
            CheckpointError: on all ranks, if any rank could not write. Older checkpoints are unchanged.
                StorageError, if the file system was the reason.
            UntrustedFileError: on all ranks; other users may write to the existing checkpoint of this step.
        """
        if self.writer.begin(step, replicated=replicated, per_rank=per_rank, meta=meta, is_background=False):
            ended = self.writer.wait(beat)
            if ended.error is not None:
                raise ended.error
        return self.folder / folders.step_name(step)

    def newest_valid(self, only: int | None = None) -> CheckpointInfo | None:
        """Return the newest checkpoint whose bytes are all correct, or None. Collective; rank 0 reads.

        Damaged checkpoints on the way are renamed to `.bad-<n>`, with a warning. A checkpoint that cannot be read now
        (EIO, ESTALE, EACCES) may be whole: it is skipped with a warning, and keeps its name.

        Args:
            only: the one step to consider; None: all steps.

        Raises:
            UntrustedFileError: another user owns a file or may write it, or it is a symbolic link.
            CheckpointError: the checkpoint has a newer format, or the folder cannot be read.
        """
        fields = on_rank_zero(self._group, lambda: self._scan(only))
        return None if fields is None else CheckpointInfo(**{**fields, "path": self.folder / fields["path"]})

    def load(self, info: CheckpointInfo, take: Callable[[Any, Any], T] = _take_all) -> T:
        """Call `take` with (state that ranks share, state of this rank alone), and return its result. Collective.

        The tensors are `SavedTensor`s: `take` reads those that it needs, and only while it runs. The default reads all
        of them to the CPU. This rank's own state is None if fewer ranks saved the checkpoint.

        Args:
            info: the checkpoint.
            take: not collective. An error that it raises on one rank is raised on all ranks.

        Raises:
            CheckpointError: on all ranks; a rank could not read or use the checkpoint.
            CorruptCheckpointError: on all ranks; bytes have changed since `newest_valid`, or another process replaced
                the checkpoint by another one of the same step.
            UntrustedFileError: as in `newest_valid`.
        """
        return on_each_rank(self._group, lambda: (self._read(info, take), None))[0]

    def forget_after(self, step: int) -> None:
        """Delete the checkpoints after `step`; pinned ones are renamed to `.bad-<n>`. Collective.

        Raises:
            CheckpointError: on all ranks; the folder cannot be changed.
        """
        on_rank_zero(self._group, lambda: self._forget_after(step))

    # The methods below run on one rank at a time.

    def _forget_after(self, step: int) -> None:
        for newer, path in folders.committed(self.folder):  # the newest first: a kill leaves no gap
            if newer > step:
                (folders.quarantine if folders.is_pinned(path) else folders.discard)(path)
                self._verified.discard(path)
                self.writer.scores.pop(newer, None)

    def _make_room(self, path: Path) -> bool:
        """Quarantine the checkpoint at `path`, if any; return False if it is valid, and stays."""
        if is_there(path):
            if self._inspect(path) is not None:
                return False
            if is_there(path):  # unreadable now, so it has kept its name
                self._quarantine(path, "it could not be read")
        return True

    def _scan(self, only: int | None) -> dict[str, Any] | None:
        if not is_there(self.folder):
            return None
        check_trusted(self.folder.resolve())
        for step, path in folders.committed(self.folder):
            manifest = self._inspect(path) if only in (None, step) else None
            if manifest is not None:
                return {
                    "step": manifest.step,
                    "path": path.name,
                    "world_size": manifest.world_size,
                    "meta": manifest.meta,
                    "checksum": manifest.checksum,
                }
        return None

    def _inspect(self, path: Path) -> Manifest | None:
        """Return the manifest if every byte is correct, else None with a warning; quarantine a damaged checkpoint."""
        try:
            manifest = self._read_manifest(path)
            for record in manifest.files:
                verify(path / record.name, record)
        except CorruptCheckpointError as error:
            self._quarantine(path, str(error))
            return None
        except OSError as error:
            self._warn(f"checkpoint {path} cannot be read now and is skipped: {error}")
            return None
        self._verified.add(path)
        return manifest

    def _quarantine(self, path: Path, reason: str) -> None:
        if self._read_only:
            self._warn(f"checkpoint {path} is damaged and not used: {reason}")
            return
        target = folders.quarantine(path)
        self._verified.discard(path)
        self._warn(f"checkpoint {path} is damaged and not used; it is now {target.name}: {reason}")

    def _read_manifest(self, path: Path) -> Manifest:
        check_trusted(path)
        manifest = Manifest.from_bytes(read_bytes(path / NAME))
        if folders.step_name(manifest.step) != path.name:
            raise CorruptCheckpointError(f"{path} holds step {manifest.step}; it was renamed or copied.")
        return manifest

    def _read(self, info: CheckpointInfo, take: Callable[[Any, Any], T]) -> T:
        manifest, rank = self._read_the_same_manifest(info), self._group.rank
        mine = {STATE_FILE, rank_file(rank), shard_file(rank)}
        for record in manifest.files:
            # Files that this rank reads in full. `newest_valid` verified those of other ranks, moments ago.
            if record.name in mine:
                verify(info.path / record.name, record)
        with OpenFiles(info.path, manifest.files, open_trusted) as files:
            shared = unpack(files.tensors(STATE_FILE), manifest.replicated, _sharded(manifest, files))
            own = None
            if rank < len(manifest.per_rank):
                own = unpack(files.tensors(rank_file(rank)), manifest.per_rank[rank])
            taken = take(shared, own)
        # This rank did not verify the files of the others. They are those of `info` if its manifest is still there.
        self._read_the_same_manifest(info)
        return taken

    def _read_the_same_manifest(self, info: CheckpointInfo) -> Manifest:
        manifest = self._read_manifest(info.path)
        if manifest.checksum != info.checksum:
            raise CorruptCheckpointError(
                f"{info.path} was replaced while it was read: another process saved step {info.step} again. Start this "
                "process once more, and it reads the new one."
            )
        return manifest


def _sharded(manifest: Manifest, files: OpenFiles) -> dict[str, SavedTensor]:
    return {
        name: SavedTensor(name, tuple(entry["shape"]), DTYPES[entry["dtype"]], tuple(manifest.boxes(name)), files)
        for name, entry in manifest.sharded.items()
    }


def find_start(
    own: CheckpointStore, resume_from: str | None, run_id: str, num_steps: int, group: RankGroup
) -> tuple[CheckpointStore, CheckpointInfo | None]:
    """Return the store to load from and the checkpoint in it, or None for a fresh start. Collective.

    The folder of another run is only read: nothing in it is renamed or deleted, even if it is damaged.

    Raises:
        CheckpointError: the run's own checkpoint was saved by another run, or `resume_from` has no valid one.
        ConfigError: `num_steps` leaves nothing to do after the checkpoint of `resume_from`.
        UntrustedFileError: another user owns a file, or others may write it.
    """
    newest = own.newest_valid()
    if newest is not None:
        _check_owner(newest, run_id)
    if newest is not None or resume_from is None:
        return own, newest
    store, step = _open(Path(resume_from), group)
    checkpoint = store.newest_valid(only=step)
    if checkpoint is None:
        raise CheckpointError(
            f"checkpoint.resume_from={resume_from} holds no valid checkpoint (any more). Name another, or leave it out "
            "to begin at step 0."
        )
    if checkpoint.step >= num_steps:
        raise ConfigError(
            f"train.num_steps={num_steps} must be more than {checkpoint.step}, the step at which "
            f"checkpoint.resume_from={resume_from} begins: it counts all steps from 0. Use for example "
            f"{2 * checkpoint.step}."
        )
    return store, checkpoint


def _open(path: Path, group: RankGroup) -> tuple[CheckpointStore, int | None]:
    """Open the store at `path`; return it and the step that `path` names, or None for the newest step."""
    step = folders.step_of(path)
    folder = path / "checkpoints" if step is None else path.parent
    return CheckpointStore(folder, group=group, keep_last=1, attempt=0, read_only=True), step


def _check_owner(checkpoint: CheckpointInfo, run_id: str) -> None:
    saved_by = checkpoint.meta.get("run_id", run_id)
    if saved_by != run_id:
        raise CheckpointError(
            f"{checkpoint.path} was saved by {saved_by}, and this run is {run_id}: another configuration. "
            "Remove it from this run's folder, or start anew with --fresh. To begin another run from it: "
            "checkpoint.resume_from."
        )
