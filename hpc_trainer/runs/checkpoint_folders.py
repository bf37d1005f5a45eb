"""Names in the checkpoints folder, and moving them: by one rename, so a kill leaves the old name or the new.

    step-00001200            a checkpoint, complete since it has this name
    step-00001200.pin        a person's wish that it stays: any file of this name, made with touch
    step-00001200.tmp-3      attempt 3 is writing it, or died doing so
    step-00001200.bad-1      was damaged; kept for a look
    .trash-step-00001100     is being deleted

Everything here runs on rank 0, also in its writing thread.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hpc_trainer.runs.files import fsync_folder
from hpc_trainer.runs.shared_folder import is_there, names_in, rename

_COMMITTED = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-(\d+)")
_BAD = re.compile(r"step-\d{8,}\.bad-(\d+)")
_TRASH = ".trash-"
# Evidence is kept, but a bad disk must not fill it up.
_MAX_BAD = 2


def step_name(step: int) -> str:
    """`step-00001200`."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a folder that bears a finished checkpoint's name; None of any other."""
    match = _COMMITTED.fullmatch(path.name)
    return int(match[1]) if match else None


def temporary_path(folder: Path, step: int, attempt: int) -> Path:
    """Where this attempt writes before the rename."""
    return folder / f"{step_name(step)}.tmp-{attempt}"


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all folders that bear a finished name, newest step first; valid or not."""
    found = [(match, name) for name in names_in(folder) or () if (match := _COMMITTED.fullmatch(name))]
    return sorted(((int(match[1]), folder / name) for match, name in found), reverse=True)


def is_pinned(path: Path) -> bool:
    """True if a file `step-00001200.pin` lies beside the checkpoint, whatever is in it and whoever made it."""
    return os.path.lexists(path.with_name(f"{path.name}.pin"))


def quarantine(path: Path) -> Path:
    """Renames a damaged checkpoint out of the way; returns the new path. Raises OSError."""
    number = 1
    present = names_in(path.parent) or ()
    while (target := path.with_name(f"{path.name}.bad-{number}")).name in present:
        number += 1
    rename(path, target)
    fsync_folder(path.parent)
    return target


def discard(path: Path) -> None:
    """Deletes a folder: first by name, at once, then its files. Raises OSError if the rename fails."""
    trash = path.with_name(_TRASH + path.name)
    if is_there(trash, parents=0):
        shutil.rmtree(trash, ignore_errors=True)
    rename(path, trash)
    # On NFS a file that is still open leaves a .nfs file: the next attempt sweeps.
    shutil.rmtree(trash, ignore_errors=True)


def discard_old_bad(folder: Path) -> None:
    """Deletes all but the two youngest damaged checkpoints. Raises OSError."""
    bad = [folder / name for name in names_in(folder) or () if _BAD.fullmatch(name)]
    for path in sorted(bad, key=lambda path: path.lstat().st_ctime_ns)[:-_MAX_BAD]:
        discard(path)


def discard_unfinished(folder: Path, attempt: int) -> list[str]:
    """Deletes what dead attempts left behind; returns the names.

    Attempts of a run have rising numbers and do not overlap: at the start of `attempt`, temporary folders of
    its number or a lower one are dead. A higher number means that we are the late one: left alone.
    """
    swept = []
    for name in names_in(folder) or ():
        temporary = _TEMPORARY.fullmatch(name)
        if name.startswith(_TRASH) or (temporary and int(temporary[1]) <= attempt):
            shutil.rmtree(folder / name, ignore_errors=True)
            swept.append(name)
    return swept
