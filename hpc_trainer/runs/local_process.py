"""Names of processes by which a later command can tell whether a process is still the same, even after a reboot."""

from __future__ import annotations

import contextlib
import os
import socket

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
