"""The checkpoints of one run: saved whole or not at all, read back only if every byte is as it was written.

A save goes: fresh folder, files written and fsync'ed by their ranks, checksums gathered, manifest, rename,
fsync of the parent. Whoever kills it when, the folder of the last save stays as it is.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError, HpcTrainerError, UntrustedFileError
from hpc_trainer.runs.files import check_trusted, fsync_folder
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint import folders
from hpc_trainer.training.checkpoint.files import (
    FOLDER_MODE,
    FileRecord,
    read_bytes,
    verify,
    write_bytes,
    write_tensors,
)
from hpc_trainer.training.checkpoint.manifest import NAME, STATE_FILE, Manifest, own_part, rank_file, shard_file
from hpc_trainer.training.checkpoint.pack import unpack
from hpc_trainer.training.checkpoint.parts import join, split
from hpc_trainer.training.checkpoint.saved import DTYPES, OpenFiles, SavedTensor, open_files, whole_tree

T = TypeVar("T")
# What one rank met is raised on all, by name: nothing is unpickled from a peer.
_KINDS = {kind.__name__: kind for kind in (CheckpointError, CorruptCheckpointError, UntrustedFileError)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that was valid when it was looked at. `meta` is what `save` was given."""

    step: int
    path: Path
    world_size: int
    meta: dict[str, Any]


def _take_all(shared: Any, own: Any) -> Any:
    return whole_tree(shared), whole_tree(own)


class CheckpointStore:
    """The `checkpoints/` folder of a run, as all its ranks see it.

    Args:
        folder: made at the first save. It may itself be a symbolic link; nothing in it may.
        group: the ranks of this attempt.
        keep_last: valid checkpoints kept, ≥ 1.
        attempt: number of this start of the run, ≥ 0; higher than that of any attempt before.
        warn: takes one line about what was found damaged or not deleted, on rank 0; default: logging.
        allow_group_write: accept files that the group may write.
        read_only: another run's: nothing is swept or renamed, and nothing may be saved.

    Not collective to build; rank 0 deletes what dead attempts left behind.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: RankGroup,
        keep_last: int,
        attempt: int,
        warn: Callable[[str], None] | None = None,
        allow_group_write: bool = False,
        read_only: bool = False,
    ) -> None:
        if keep_last < 1:
            raise CheckpointError(f"checkpoint.keep_last={keep_last!r} must be ≥ 1; nearest legal: 1.")
        self.folder = folder
        self._group = group
        self._keep_last = keep_last
        self._attempt = attempt
        self._warn = warn or logging.getLogger(__name__).warning
        self._allow_group_write = allow_group_write
        self._read_only = read_only
        # Read through by this process: retention must not read the kept ones again after every save.
        self._verified: set[Path] = set()
        if group.is_rank_zero and not read_only:
            try:
                folders.sweep(folder, attempt)
            except OSError as error:
                self._warn(f"leftovers in {folder} could not be deleted: {error}")

    def save(
        self,
        step: int,
        *,
        replicated: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        meta: Mapping[str, Any],
    ) -> Path:
        """Writes the checkpoint of `step`, then deletes what `keep_last` leaves over. Collective.

        A valid checkpoint of this step that stands already is left as it is.

        Args:
            step: optimizer steps done, ≥ 0.
            replicated: the same on all ranks; rank 0's is written (others may pass {}). Of sharded tensors in it
                (DTensors, `Shard`s) each rank writes its part, and one of those that hold the same part.
            per_rank: each rank's own. Both hold what `pack` takes.
            meta: JSON about the checkpoint; rank 0's counts.

        Returns:
            The folder, on all ranks.

        Raises:
            CheckpointError: on all ranks, if any rank could not write. Older checkpoints are as they were.
            UntrustedFileError: on all ranks; others may write what stands at this step.
        """
        path = self.folder / folders.step_name(step)
        temporary = folders.temporary_path(self.folder, step, self._attempt)
        if not self._on_rank_zero(lambda: self._begin(path, temporary)):
            return path
        try:
            structure, parts = self._on_each_rank(lambda: self._write_parts(temporary, replicated, per_rank))

            def commit() -> None:
                manifest = self._describe(step, meta, structure, parts)
                self._commit(temporary, path, manifest)

            self._on_rank_zero(commit)
        except HpcTrainerError:
            if self._group.is_rank_zero:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if self._group.is_rank_zero:
            self._verified.add(path)
            self._retain(path)
        return path

    def newest_valid(self, only: int | None = None) -> CheckpointInfo | None:
        """The newest checkpoint of which every byte is right, or None. Collective; rank 0 looks.

        `only`: the one step to look at; None: all.

        Damaged ones on the way are renamed to `.bad-<n>`, with a warning. One that cannot be read now (EIO,
        ESTALE, EACCES) may be whole: it is passed over with a warning, and keeps its name.

        Raises:
            UntrustedFileError: another user owns a file or may write it, or it is a symbolic link.
            CheckpointError: the checkpoint has a newer format, or the folder cannot be read.
        """
        found = self._on_rank_zero(lambda: self._scan(only))
        return None if found is None else CheckpointInfo(**{**found, "path": self.folder / found["path"]})

    def load(self, info: CheckpointInfo, take: Callable[[Any, Any], T] = _take_all) -> T:
        """Hands (what all ranks share, this rank's own) of a checkpoint to `take`; returns what it returns. Collective.

        Tensors are `SavedTensor`s: `take` reads what it needs, and only while it runs. Without it: all of them, on the
        CPU. This rank's own is None if the checkpoint is of fewer ranks.

        Args:
            take: not collective. What it raises on one rank is raised on all.

        Raises:
            CheckpointError: on all ranks; a rank could not read or use it.
            CorruptCheckpointError: on all ranks; bytes have changed since `newest_valid`.
            UntrustedFileError: as there.
        """
        return self._on_each_rank(lambda: (self._read(info, take), None))[0]

    # What follows runs on one rank at a time.

    def _begin(self, path: Path, temporary: Path) -> bool:
        """Makes the fresh folder; False if the checkpoint stands already."""
        self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        if path.exists() or path.is_symlink():
            if self._inspect(path) is not None:
                return False
            if path.exists():  # unreadable now, so it was left its name
                self._quarantine(path, "it could not be read")
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(mode=FOLDER_MODE)
        return True

    def _write_parts(
        self, temporary: Path, replicated: Mapping[str, Any], per_rank: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        parts = split(replicated, per_rank, self._group.rank)
        files = [write_tensors(temporary / name, tensors) for name, tensors in parts.files.items()]
        return parts.structure, {"files": [asdict(record) for record in files], **parts.told}

    def _describe(self, step: int, meta: Mapping[str, Any], structure: Any, parts: list[Any]) -> Manifest:
        written = [FileRecord(**record) for part in parts for record in part["files"]]
        shards = {shard_file(rank) for rank in range(self._group.world_size)}
        return Manifest(
            step=step,
            world_size=self._group.world_size,
            attempt=self._attempt,
            meta=dict(meta),
            files=sorted(written, key=lambda record: record.name in shards),  # stable: those of shards come last
            replicated=structure,
            per_rank=[part["structure"] for part in parts],
            sharded=join(parts),
        )

    def _commit(self, temporary: Path, path: Path, manifest: Manifest) -> None:
        write_bytes(temporary / NAME, iter([memoryview(manifest.to_bytes())]))
        fsync_folder(temporary)
        temporary.rename(path)
        fsync_folder(self.folder)

    def _scan(self, only: int | None) -> dict[str, Any] | None:
        if not self.folder.exists():
            return None
        check_trusted(self.folder.resolve(), self._allow_group_write)
        for step, path in folders.committed(self.folder):
            manifest = self._inspect(path) if only in (None, step) else None
            if manifest is not None:
                return {
                    "step": manifest.step,
                    "path": path.name,
                    "world_size": manifest.world_size,
                    "meta": manifest.meta,
                }
        return None

    def _inspect(self, path: Path) -> Manifest | None:
        """The manifest if every byte is right, else None with a warning; damaged ones are put away."""
        try:
            manifest = self._read_manifest(path)
            for record in manifest.files:
                verify(path / record.name, record, allow_group_write=self._allow_group_write)
        except CorruptCheckpointError as error:
            self._quarantine(path, str(error))
            return None
        except OSError as error:
            self._warn(f"checkpoint {path} cannot be read now and is passed over: {error}")
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
        check_trusted(path, self._allow_group_write)
        manifest = Manifest.from_bytes(read_bytes(path / NAME, allow_group_write=self._allow_group_write))
        if folders.step_name(manifest.step) != path.name:
            raise CorruptCheckpointError(f"{path} holds step {manifest.step}; it was renamed or copied.")
        return manifest

    def _read(self, info: CheckpointInfo, take: Callable[[Any, Any], T]) -> T:
        manifest, rank = self._read_manifest(info.path), self._group.rank
        mine = {STATE_FILE, rank_file(rank), shard_file(rank)}
        for record in manifest.files:
            # What this rank reads to the end. Parts of other ranks' files count on `newest_valid`, moments ago.
            if record.name in mine:
                verify(info.path / record.name, record, allow_group_write=self._allow_group_write)
        with open_files(info.path, manifest.files, self._allow_group_write) as files:
            shared = unpack(files.tensors(STATE_FILE), manifest.replicated, _sharded(manifest, files))
            structure = own_part(manifest.per_rank, rank)
            own = None if structure is None else unpack(files.tensors(rank_file(rank)), structure)
            return take(shared, own)

    def _retain(self, saved: Path) -> None:
        """Never fails: the checkpoint stands, and an old one too many is no reason to lose the run."""
        try:
            valid = 0
            for _, path in folders.committed(self.folder):
                if path not in self._verified and self._inspect(path) is None:
                    continue
                valid += 1
                if valid > self._keep_last and path != saved:
                    folders.discard(path)
                    self._verified.discard(path)
            folders.discard_old_bad(self.folder)
        except (OSError, HpcTrainerError) as error:
            self._warn(f"old checkpoints in {self.folder} were not deleted: {error}")

    # How ranks learn of each other's errors: by saying so in the collective that they all call.

    def _on_rank_zero(self, action: Callable[[], Any]) -> Any:
        """Rank 0's result (JSON) on all ranks, or its error. Collective."""
        outcome, cause = None, None
        if self._group.is_rank_zero:
            outcome, cause = _attempt(action)
        outcome = self._group.broadcast(outcome)
        _raise_any([outcome], cause)
        return outcome["value"]

    def _on_each_rank(self, action: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """(what stays here, what all ranks share (JSON, by rank)), or the errors of all. Collective."""
        kept: list[T] = []

        def share() -> Any:
            own, shared = action()
            kept.append(own)
            return shared

        outcome, cause = _attempt(share)
        outcomes = self._group.gather(outcome)
        _raise_any(outcomes, cause)
        return kept[0], [each["value"] for each in outcomes]


def _sharded(manifest: Manifest, files: OpenFiles) -> dict[str, SavedTensor]:
    return {
        name: SavedTensor(name, tuple(entry["shape"]), DTYPES[entry["dtype"]], tuple(manifest.boxes(name)), files)
        for name, entry in manifest.sharded.items()
    }


def _attempt(action: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"kind": "", "value": action()}, None
    except HpcTrainerError as error:
        kind = type(error).__name__
        return {"kind": kind if kind in _KINDS else CheckpointError.__name__, "text": str(error)}, error
    except Exception as error:  # whatever it is: a rank that left here would leave its peers waiting
        text = f"{type(error).__name__}: {error}"
        return {"kind": CheckpointError.__name__, "text": text}, error


def _raise_any(outcomes: list[dict[str, Any]], cause: Exception | None) -> None:
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome["kind"]}
    if failed:
        kinds = {outcome["kind"] for outcome in failed.values()}
        kind = _KINDS[kinds.pop()] if len(kinds) == 1 else CheckpointError
        texts = dict.fromkeys(outcome["text"] for outcome in failed.values())
        if len(failed) < len(outcomes) or len(texts) > 1:
            texts = dict.fromkeys(f"rank {rank}: {outcome['text']}" for rank, outcome in failed.items())
        raise kind("; ".join(texts)) from cause
