"""Names in the checkpoints folder, and renames of its folders: a kill leaves either the old name or the new one.

    step-00001200            a checkpoint, complete since it has this name
    step-00001200.pin        a user's request to keep it: any file of this name, made with touch
    step-00001200.tmp-3      attempt 3 is writing it, or died while writing it
    step-00001200.bad-1      a damaged checkpoint, kept for inspection
    .trash-step-00001100     is being deleted

All functions run on rank 0, some in its writing thread.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hpc_trainer.record.files import fsync_folder
from hpc_trainer.record.shared_folder import is_there, names_in, rename

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
