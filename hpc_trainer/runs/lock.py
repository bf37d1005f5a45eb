"""One process at a time, on whatever machine: a file that can be made only once, not flock.

Locks of the kernel may be local to a client, refused or hang on a shared file system (flock(2); Lustre's mount
options). A lock file names its holder. A holder on this machine that died is seen at once; one on another machine
counts as dead when it has not renewed the file for five minutes, by the file server's clock.
"""

from __future__ import annotations

import contextlib
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_trainer.errors import SubmitError
from hpc_trainer.runs.files import write_json
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.local_process import is_alive, process_name
from hpc_trainer.runs.modes import make_folder
from hpc_trainer.runs.reading import Faults, read_json
from hpc_trainer.runs.shared_folder import age_on_server_s, claim, look_anew, remove

# Renewed before each sbatch, which gives up after 90 s. On another host we cannot look, so we wait for this long.
_EXPIRY_S = 300.0
# A lock without a holder's name: its writer was killed between making the file and writing its name. That is so on file
# systems without hard links alone.
_NAMELESS_S = 5.0
# Looking again at a dead lock takes milliseconds: an older guard was left by a process that was killed.
_GUARD_S = 30.0


class FileLock:
    """A lock file that this process holds; `file_lock` and `submit_lock` make it.

    Args:
        path: the file.
        who: the command that holds it, in messages.
    """

    def __init__(self, path: Path, who: str) -> None:
        self._path, self._who = path, who
        self._name = process_name()

    def acquire(self) -> bool:
        """Take the lock; return False if another process took it in this moment.

        Raises:
            SubmitError: another process holds it; says which.
        """
        text = f'{{"holder": "{self._name}", "time": {time.time()}}}\n'
        if not claim(self._path, text.encode()):
            self._remove_if_dead()
            return False
        return True

    def renew(self) -> None:
        """Record that the holder lives, before anything that takes long or cannot be undone.

        Raises:
            SubmitError: another process took the lock over: whoever goes on now could submit twice.
        """
        if not self._is_ours():
            raise SubmitError(f"another {self._who} took {self._path} over from this one, which had stopped for long.")
        write_json(self._path, {"holder": self._name, "time": time.time()}, sync=False)

    def release(self) -> None:
        """Remove the file, if it is still this process's."""
        if self._is_ours():
            remove(self._path)

    def taken(self) -> SubmitError:
        """Return the error of a lock that another process took at the same moment."""
        return SubmitError(f"another {self._who} took {self._path} at the same moment. Try again.")

    def _is_ours(self) -> bool:
        return bool((read_json(self._path) or {}).get("holder") == self._name)

    def _remove_if_dead(self) -> None:
        held = read_json(self._path, Faults())
        try:
            info = self._path.lstat()
            age = age_on_server_s(self._path) if stat.S_ISREG(info.st_mode) else 0.0
        except FileNotFoundError:
            return  # released in this moment
        holder = (held or {}).get("holder")
        holder = holder if isinstance(holder, str) else ""
        # A lock without a text was made by a process that was killed in it; a damaged one may have a living holder.
        is_damaged = not holder and info.st_size > 0
        alive = is_alive(holder) if holder else (None if is_damaged or age < _NAMELESS_S else False)
        if not stat.S_ISREG(info.st_mode):
            raise SubmitError(f"{self._path} must be a file, and is something else. Remove it, then try again.")
        if alive or (alive is None and age < _EXPIRY_S):
            raise SubmitError(
                f"another {self._who} works on {self._path.parent.name}: {holder or 'unknown'}, for {age:.0f} s. Wait "
                f"for it, or, if you know it is gone, remove {self._path}."
            )
        self._remove_if_still(held)

    def _remove_if_still(self, held: dict[str, Any] | None) -> None:
        """Remove the lock if it is still the dead holder's; of several that saw it dead, one at a time looks again."""
        guard = self._path.with_name(f"{self._path.name}.removing")
        with contextlib.suppress(FileNotFoundError):
            if age_on_server_s(guard) > _GUARD_S:
                remove(guard)
        if not claim(guard):
            raise self.taken()
        try:
            # Nobody else removes it now, and while it lies there nobody can take it: what is read stays so.
            if read_json(self._path) == held:
                remove(self._path)
        finally:
            remove(guard)


@contextlib.contextmanager
def file_lock(path: Path, who: str, *, wait_s: float = 0.0) -> Iterator[FileLock]:
    """Hold a lock file for this process; a lock whose holder died is taken over.

    Args:
        path: the file; its folder is there.
        who: the command that wants it, in messages.
        wait_s: how long to wait for another holder before giving up.

    Raises:
        SubmitError: another process holds it; says which.
    """
    lock, deadline = FileLock(path, who), time.monotonic() + wait_s
    while True:
        is_late = time.monotonic() >= deadline
        try:
            if lock.acquire() or lock.acquire():  # twice: the first may have removed a dead holder's
                break
            raise lock.taken()
        except SubmitError:
            if is_late:
                raise
        time.sleep(2.0)
    try:
        # What the holder before wrote is read from here on: nothing that this machine remembers of a time before.
        look_anew(path.parent)
        yield lock
    finally:
        lock.release()


@contextlib.contextmanager
def submit_lock(paths: SweepPaths, *, wait_s: float = 0.0) -> Iterator[FileLock]:
    """Hold a sweep for the one `submit` at work; its folder is made if it is missing. As `file_lock`."""
    make_folder(paths.folder)
    with file_lock(paths.lock, "submit", wait_s=wait_s) as lock:
        yield lock
