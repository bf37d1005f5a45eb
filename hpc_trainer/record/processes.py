"""Names of processes, and locks that one process at a time holds on any machine.

By the name a later command, perhaps after a reboot, can check whether the process is still the same one. A lock is a
file that can be created only once, not flock, which file systems may keep local to a client (docs/shared_folder.md).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_trainer.errors import SubmitError
from hpc_trainer.record.files import age_on_server_s, claim, make_folder, remove, write_json
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import Faults, read_json
from hpc_trainer.record.shared_folder import look_anew

# psutil is imported in the functions: commands about runs on Slurm avoid its 20 ms.


def process_name(pid: int | None = None) -> str:
    """Return `<host>:<pid>:<start time>` of a process; a reused process id has another start time."""
    import psutil

    pid = os.getpid() if pid is None else pid
    try:
        started = psutil.Process(pid).create_time()
    except psutil.Error:
        started = 0.0
    return f"{socket.gethostname()}:{pid}:{started:.2f}"


def is_alive(name: str) -> bool | None:
    """Return True if the process is alive; None if it is (or was) on another host, where this one cannot look."""
    host, pid, started = name.rsplit(":", 2) if name.count(":") >= 2 else ("", "", "")
    if host != socket.gethostname():
        return None
    import psutil

    try:
        process = psutil.Process(int(pid))
        # psutil derives start times from the boot time, which moves when the clock is set: accept a difference.
        same = abs(process.create_time() - float(started)) < 30.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return False


def open_pidfd(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended; -1 if the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # Linux before 5.3, or not Linux
        return -1


def find_process(argument: str) -> str | None:
    """Return the name of a living process on this host that has this argument; None if there is none."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if argument in (process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):
                return process_name(process.pid)
    return None


def pid_of(name: str) -> int:
    """Return the process id in a process name."""
    return int(name.rsplit(":", 2)[1])


# The holder renews its lock before each sbatch, which gives up after 90 s. This process cannot see whether a holder on
# another host is alive, so it waits for this long.
_EXPIRY_S = 300.0
# A lock without a holder's name: its writer was killed between creating the file and writing its name. This happens
# only on file systems without hard links.
_NAMELESS_S = 5.0
# The second check of a dead lock takes milliseconds: an older guard file was left by a process that was killed.
_GUARD_S = 30.0


class FileLock:
    """Lock file of this process, made by `file_lock` and `submit_lock`.

    Args:
        path: the file.
        who: the command that holds it, in messages.
    """

    def __init__(self, path: Path, who: str) -> None:
        self._path, self._who = path, who
        self._name = process_name()

    def acquire(self) -> bool:
        """Take the lock; return False if it existed but its holder has released it meanwhile, or was dead.

        Raises:
            SubmitError: another process holds the lock; the message names it.
        """
        text = f'{{"holder": "{self._name}", "time": {time.time()}}}\n'
        if not claim(self._path, text.encode()):
            self._remove_if_dead()
            return False
        return True

    def renew(self) -> None:
        """Record that the holder is alive, before an action that takes long or cannot be undone.

        Raises:
            SubmitError: another process took the lock over: a command that continued now could submit twice.
        """
        if not self._is_ours():
            raise SubmitError(f"another {self._who} took over {self._path}, because this one had stopped for too long.")
        write_json(self._path, {"holder": self._name, "time": time.time()}, sync=False)

    def release(self) -> None:
        """Remove the file if this process still holds the lock."""
        if self._is_ours():
            remove(self._path)

    def taken(self) -> SubmitError:
        """Return the error for a lock that another process took at the same moment."""
        return SubmitError(f"another {self._who} took {self._path} at the same moment. Try again.")

    def _is_ours(self) -> bool:
        return bool((read_json(self._path) or {}).get("holder") == self._name)

    def _remove_if_dead(self) -> None:
        held = read_json(self._path, Faults())
        try:
            info = self._path.lstat()
            age = age_on_server_s(self._path) if stat.S_ISREG(info.st_mode) else 0.0
        except FileNotFoundError:
            return  # its holder has just released it
        holder = (held or {}).get("holder")
        holder = holder if isinstance(holder, str) else ""
        # An empty lock was made by a process that was killed while making it; a damaged one may have a living holder.
        is_damaged = not holder and info.st_size > 0
        alive = is_alive(holder) if holder else (None if is_damaged or age < _NAMELESS_S else False)
        if not stat.S_ISREG(info.st_mode):
            raise SubmitError(f"{self._path} must be a file, but is something else. Remove it, then try again.")
        if alive or (alive is None and age < _EXPIRY_S):
            raise SubmitError(
                f"another {self._who} works on {self._path.parent.name}: {holder or 'unknown'}, for {age:.0f} s. Wait "
                f"for it, or, if you know it is gone, remove {self._path}."
            )
        self._remove_if_still(held)

    def _remove_if_still(self, held: dict[str, Any] | None) -> None:
        """Remove the lock if it is still the dead holder's; a guard file lets one process at a time check this."""
        guard = self._path.with_name(f"{self._path.name}.removing")
        with contextlib.suppress(FileNotFoundError):
            if age_on_server_s(guard) > _GUARD_S:
                remove(guard)
        if not claim(guard):
            raise self.taken()
        try:
            # No other process removes the lock now, and nobody can take it while it exists: its content cannot change.
            if read_json(self._path) == held:
                remove(self._path)
        finally:
            remove(guard)


@contextlib.contextmanager
def file_lock(path: Path, who: str, *, wait_s: float = 0.0) -> Iterator[FileLock]:
    """Hold a lock file for this process; a lock whose holder died is taken over.

    Args:
        path: the file; its folder must exist.
        who: the command that wants the lock, in messages.
        wait_s: how many seconds to wait for another holder before giving up.

    Raises:
        SubmitError: another process holds the lock; the message names it.
    """
    lock, deadline = FileLock(path, who), time.monotonic() + wait_s
    while True:
        is_late = time.monotonic() >= deadline
        try:
            if lock.acquire() or lock.acquire():  # twice: the first call may have removed a dead holder's lock
                break
            raise lock.taken()
        except SubmitError:
            if is_late:
                raise
        time.sleep(2.0)
    try:
        # From here on this process must read what the previous holder wrote, not what this machine has cached.
        look_anew(path.parent)
        yield lock
    finally:
        lock.release()


@contextlib.contextmanager
def submit_lock(paths: SweepPaths, *, wait_s: float = 0.0) -> Iterator[FileLock]:
    """Hold the lock of a sweep for one `submit`; create the sweep's folder if it is missing. Like `file_lock`."""
    make_folder(paths.folder)
    with file_lock(paths.lock, "submit", wait_s=wait_s) as lock:
        yield lock
