"""One `submit` at a time for a sweep, without flock: O_EXCL works on every file system that clusters use."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_trainer.errors import SubmitError
from hpc_trainer.runs.files import write_json
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.local_process import is_alive, process_name
from hpc_trainer.runs.modes import make_folder, set_file_mode
from hpc_trainer.runs.reading import Faults, read_json

# Renewed before each sbatch, which gives up after 90 s. On another host we cannot look, so we wait for this long.
_EXPIRY_S = 300.0
# A lock without a holder's name: its writer was killed between making the file and writing its name.
_NAMELESS_S = 5.0
# Looking again at a dead lock takes milliseconds: an older guard was left by a process that was killed.
_GUARD_S = 30.0


class SubmitLock:
    """A sweep that this process holds; `submit_lock` makes it."""

    def __init__(self, paths: SweepPaths) -> None:
        self._paths = paths
        self._name = process_name()

    def acquire(self) -> bool:
        """Takes the lock; False if another process took it in this moment.

        Raises:
            SubmitError: another process holds it; says which.
        """
        try:
            descriptor = os.open(self._paths.lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            _remove_if_dead(self._paths)
            return False
        with os.fdopen(descriptor, "w") as file:
            set_file_mode(descriptor)
            file.write(f'{{"holder": "{self._name}", "time": {time.time()}}}\n')
        return True

    def renew(self) -> None:
        """Says that the holder lives, before anything that takes long or cannot be undone.

        Raises:
            SubmitError: another process took the sweep over: whoever goes on now could submit twice.
        """
        if not self._is_ours():
            raise SubmitError(f"another submit took {self._paths.lock} over from this one, which had stopped for long.")
        write_json(self._paths.lock, {"holder": self._name, "time": time.time()}, sync=False)

    def release(self) -> None:
        """Gives the sweep free."""
        if self._is_ours():
            self._paths.lock.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        return bool((read_json(self._paths.lock) or {}).get("holder") == self._name)


@contextlib.contextmanager
def submit_lock(paths: SweepPaths, *, wait_s: float = 0.0) -> Iterator[SubmitLock]:
    """Holds the sweep for this process; a lock whose holder died is taken over.

    Args:
        wait_s: how long to wait for another holder before giving up.

    Raises:
        SubmitError: another process holds it; says which.
    """
    make_folder(paths.folder)
    lock, deadline = SubmitLock(paths), time.monotonic() + wait_s
    while True:
        is_late = time.monotonic() >= deadline
        try:
            if lock.acquire() or lock.acquire():  # twice: the first may have removed a dead holder's
                break
            raise _taken(paths)
        except SubmitError:
            if is_late:
                raise
        time.sleep(2.0)
    try:
        yield lock
    finally:
        lock.release()


def _taken(paths: SweepPaths) -> SubmitError:
    return SubmitError(f"another submit took {paths.lock} at the same moment. Try again.")


def _remove_if_dead(paths: SweepPaths) -> None:
    held = read_json(paths.lock, Faults())
    try:
        info, age = paths.lock.lstat(), age_on_disk(paths.lock)
    except FileNotFoundError:
        return  # released in this moment
    holder = (held or {}).get("holder")
    holder = holder if isinstance(holder, str) else ""
    # A lock without a text was made by a process that was killed in it; a damaged one may have a living holder.
    is_damaged = not holder and info.st_size > 0
    alive = is_alive(holder) if holder else (None if is_damaged or age < _NAMELESS_S else False)
    if not stat.S_ISREG(info.st_mode):
        raise SubmitError(f"{paths.lock} must be a file, and is something else. Remove it, then try again.")
    if alive or (alive is None and age < _EXPIRY_S):
        raise SubmitError(
            f"another submit works on {paths.name}: {holder or 'unknown'}, for {age:.0f} s. Wait for it, or, if you "
            f"know it is gone, remove {paths.lock}."
        )
    _remove_if_still(paths, held)


def age_on_disk(path: Path) -> float:
    """Seconds since a file was written, by the clock that stamps the files beside it.

    Whoever wrote it may be on another host, whose clock is minutes apart from ours.

    Raises:
        FileNotFoundError: it is gone.
    """
    probe = path.with_name(f".{path.name}.{process_name()}.now")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _remove_if_still(paths: SweepPaths, held: dict[str, Any] | None) -> None:
    """Removes the lock if it is still the dead holder's; of several that saw it dead, one at a time looks again."""
    guard = paths.lock.with_name(f"{paths.lock.name}.removing")
    with contextlib.suppress(FileNotFoundError):
        if time.time() - guard.stat().st_mtime > _GUARD_S:
            guard.unlink()
    try:
        os.close(os.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError as error:
        raise _taken(paths) from error
    try:
        # Nobody else removes it now, and while it lies there nobody can take it: what is read stays so.
        if read_json(paths.lock) == held:
            paths.lock.unlink(missing_ok=True)
    finally:
        guard.unlink(missing_ok=True)
