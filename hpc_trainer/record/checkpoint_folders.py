"""Names in the checkpoints folder, and renames of its folders: a kill leaves either the old name or the new one.

    step-00001200            a checkpoint, complete since it has this name
    step-00001200.pin        a user's request to keep it: any file of this name, made with touch
    step-00001200.tmp-3      attempt 3 is writing it, or died while writing it
    step-00001200.bad-1      a damaged checkpoint, kept for inspection
    .trash-step-00001100     is being deleted

All functions run on rank 0, some in its writing thread.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.errors import CheckpointError
from hpc_trainer.record.files import fsync_folder, rename
from hpc_trainer.record.reading import is_there, names_in

_COMMITTED = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-(\d+)")
_BAD = re.compile(r"step-\d{8,}\.bad-(\d+)")
_TRASH = ".trash-"

# Evidence is kept, but a bad disk must not fill up with it.
_MAX_BAD = 2


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint folder, such as `step-00001200`."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step of a folder that has the name of a finished checkpoint; None for any other folder."""
    match = _COMMITTED.fullmatch(path.name)
    return int(match[1]) if match else None


def temporary_path(folder: Path, step: int, attempt: int) -> Path:
    """Return the path at which this attempt writes a checkpoint before the rename."""
    return folder / f"{step_name(step)}.tmp-{attempt}"


def committed(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all folders with the name of a finished checkpoint, valid or not, newest step first."""
    matches = [(match, name) for name in names_in(folder) or () if (match := _COMMITTED.fullmatch(name))]
    return sorted(((int(match[1]), folder / name) for match, name in matches), reverse=True)


def is_pinned(path: Path) -> bool:
    """Return True if a file `step-00001200.pin` is beside the checkpoint, with any content and owner."""
    return os.path.lexists(path.with_name(f"{path.name}.pin"))


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint out of the way and return the new path; raise OSError if the file system refused."""
    number = 1
    present = names_in(path.parent) or ()
    while (target := path.with_name(f"{path.name}.bad-{number}")).name in present:
        number += 1
    rename(path, target)
    fsync_folder(path.parent)
    return target


def discard(path: Path) -> None:
    """Delete a folder: rename it at once, then delete its files; raise OSError if the rename fails."""
    trash = path.with_name(_TRASH + path.name)
    if is_there(trash, parents=0):
        shutil.rmtree(trash, ignore_errors=True)
    rename(path, trash)
    # On NFS a file that is still open leaves a .nfs file, which the next attempt deletes.
    shutil.rmtree(trash, ignore_errors=True)


def discard_old_bad(folder: Path) -> None:
    """Delete all damaged checkpoints except the two youngest; raise OSError if the file system refused."""
    bad = [folder / name for name in names_in(folder) or () if _BAD.fullmatch(name)]
    for path in sorted(bad, key=lambda path: path.lstat().st_ctime_ns)[:-_MAX_BAD]:
        discard(path)


def discard_unfinished(folder: Path, attempt: int) -> list[str]:
    """Delete temporary folders that dead attempts left behind, and trash; return the names.

    Attempts of a run have rising numbers and do not overlap. At the start of `attempt`, temporary folders of its number
    or a lower one are dead. A higher number means that this process is the late one, so that folder stays.
    """
    swept = []
    for name in names_in(folder) or ():
        temporary = _TEMPORARY.fullmatch(name)
        if name.startswith(_TRASH) or (temporary and int(temporary[1]) <= attempt):
            shutil.rmtree(folder / name, ignore_errors=True)
            swept.append(name)
    return swept


MANIFEST = "manifest.json"
"""List of a checkpoint's files, written last (training/checkpoint/manifest.py)."""


def manifest_tail(body: bytes) -> bytes:
    """Return the end of a manifest, with the checksum of the JSON before it, and its closing brace."""
    return f',"checksum":"{zlib.crc32(body):08x}"}}\n'.encode()


# Rules for keeping checkpoints: the last ones, every n-th, the best by a metric, and those that a user pinned.


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rules for keeping checkpoints; a checkpoint stays if any rule names it.

    `keep_last`: number of newest valid checkpoints to keep, ≥ 1. `keep_every_steps`: keep all steps that it divides;
    0: none. `best_is_max`: the largest score is the best, else the smallest. `newest_of_every_steps`: keep the newest
    step that it divides, or the oldest checkpoint if there is none, for a rollback; 0: none.
    """

    keep_last: int = 2
    keep_every_steps: int = 0
    best_is_max: bool = False
    newest_of_every_steps: int = 0

    def __post_init__(self) -> None:
        for key, least in (("keep_last", 1), ("keep_every_steps", 0)):
            if getattr(self, key) < least:
                raise CheckpointError(
                    f"checkpoint.{key}={getattr(self, key)!r} must be ≥ {least}; nearest legal: {least}."
                )

    def best(self, scores: Mapping[int, float]) -> int | None:
        """Return the step with the best score, the newest of equal ones; None if no score is a number."""
        sign = 1 if self.best_is_max else -1
        ranked = [(sign * score, step) for step, score in scores.items() if not math.isnan(score)]
        return max(ranked)[1] if ranked else None

    def apply(
        self, folder: Path, *, saved: Path, scores: Mapping[int, float], is_valid: Callable[[Path], bool]
    ) -> list[Path]:
        """Delete the checkpoints that no rule names, and return them.

        Goes from the newest to the oldest and deletes nothing before it has seen `keep_last` valid ones: the newest
        valid checkpoint survives a kill at any time. A deletion is one rename: after a kill the name is there or gone.

        Args:
            folder: the checkpoints of one run.
            saved: a checkpoint to keep, of any step: newer ones may be unreadable now.
            scores: scores of the steps that were evaluated.
            is_valid: reads all of a checkpoint, unless that was done before; quarantines a damaged one.

        Raises:
            OSError: a rename failed; no checkpoint is half deleted under its name.
        """
        checkpoints = committed(folder)
        best = self.best({step: scores[step] for step, _ in checkpoints if step in scores})
        regular = self._newest_regular([step for step, _ in checkpoints])
        num_valid, deleted = 0, []
        for step, path in checkpoints:
            if num_valid < self.keep_last:
                num_valid += is_valid(path)
            elif not (path == saved or step in (best, regular) or self.is_nth(step) or is_pinned(path)):
                discard(path)
                deleted.append(path)
        discard_old_bad(folder)
        return deleted

    def _newest_regular(self, steps: list[int]) -> int | None:
        if not self.newest_of_every_steps or not steps:
            return None
        return next((step for step in steps if step % self.newest_of_every_steps == 0), steps[-1])

    def is_nth(self, step: int) -> bool:
        """Return True if `keep_every_steps` keeps the checkpoint of this step for good."""
        return self.keep_every_steps > 0 and step % self.keep_every_steps == 0
