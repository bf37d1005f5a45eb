"""Processes of one cluster, found in /proc: who they are, what they listen on, how they end.

Nothing here ends a process by its name: another Slurm, munge or database on this host is never
touched. A process is this cluster's when its command line or its environment at start names the
cluster's state folder.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.slurm.testbed.spec import BedError, Spec

_LISTEN = "0A"  # the state's code in /proc/net/tcp


def wait_for(predicate: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until the predicate holds; say what was waited for when it does not."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise BedError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.05)


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # it ended meanwhile


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process started with."""
    pairs = (item.partition("=") for item in _read(pid, "environ").split("\0"))
    return {key: value for key, _, value in pairs if key}


def _parent_and_state(pid: int) -> tuple[int, str]:
    # The name in parentheses may itself hold spaces and parentheses.
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return (int(fields[1]), fields[0]) if len(fields) > 1 else (0, "X")


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    return _parent_and_state(pid)[1] not in "XZ"


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _own_line() -> set[int]:
    """This process and its ancestors, which must survive even inside a job."""
    line, pid = set(), os.getpid()
    while pid > 0:
        line.add(pid)
        pid = _parent_and_state(pid)[0]
    return line


def belongs_to(pid: int, spec: Spec) -> bool:
    """Whether a process was started for this cluster's daemons."""
    if f"{spec.folder}/" in _read(pid, "cmdline"):
        return True
    return environment_of(pid).get("SLURM_CONF") == str(spec.conf)


def daemons(spec: Spec) -> dict[str, int]:
    """The living daemons of this cluster by their pid files' names."""
    found = {}
    for path in sorted(spec.run.glob("*.pid")):
        try:
            pid = int(path.read_text().strip())
        except (OSError, ValueError):
            continue
        if is_alive(pid) and belongs_to(pid, spec):
            found[path.stem] = pid
    return found


def _links(pid: int) -> Iterator[str]:
    """What a process has as its root folder and holds open."""
    try:
        yield str(Path(f"/proc/{pid}/root").readlink())
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(entry.readlink())
    except OSError:
        return  # it ended meanwhile


def _is_step(pid: int, spec: Spec) -> bool:
    """Whether this is a process of one of the cluster's jobs.

    A user's shell also has SLURM_CONF; what only a job's process has too is the node's name.
    slurmstepd overwrites its environment with its title, but keeps the node's log open; and
    whatever runs in the cluster's chroot is the cluster's.
    """
    env = environment_of(pid)
    if env.get("SLURM_CONF") == str(spec.conf) and "SLURMD_NODENAME" in env:
        return True
    links = _links(pid)
    if next(links, "").startswith(str(spec.root)):
        return True
    if not _read(pid, "comm").startswith(("slurmstepd", "slurm_script")):
        return False
    return any(link.startswith(f"{spec.folder}/") for link in links)


def job_processes(spec: Spec) -> list[int]:
    """slurmstepd and everything below, even where a job has emptied its environment."""
    pids = _all_pids()
    parents = {pid: _parent_and_state(pid)[0] for pid in pids}
    found = {pid for pid in pids if _is_step(pid, spec)}
    while True:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        if not children:
            break
        found |= children
    return sorted(pid for pid in found - _own_line() if is_alive(pid))


def node_processes(spec: Spec, node: str) -> list[int]:
    """What a power cut of this virtual node would end: its slurmd, its mount, and the jobs' processes on it."""
    own = [pid for name, pid in daemons(spec).items() if name in (f"slurmd-{node}", f"mount-{node}")]
    log = f"/slurmd-{node}.log"
    steps = [
        pid
        for pid in job_processes(spec)
        if environment_of(pid).get("SLURMD_NODENAME") == node or any(link.endswith(log) for link in _links(pid))
    ]
    return own + steps


def without_daemons(pids: Iterable[int]) -> list[int]:
    """Those that are no slurmctld, slurmd or helper of theirs: in a chroot `job_processes` has these too."""
    return [pid for pid in pids if not _read(pid, "comm").startswith(("slurmctld", "slurmd", "slurmscriptd"))]


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end(pids: Iterable[int], patience_s: float) -> None:
    """SIGTERM, then SIGKILL for those that still run after the patience."""
    alive = [pid for pid in pids if is_alive(pid)]
    _send(alive, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(is_alive(pid) for pid in alive):
        time.sleep(0.02)
    kill([pid for pid in alive if is_alive(pid)])


def kill(pids: Iterable[int]) -> None:
    """SIGKILL, and wait until they are gone."""
    targets = list(pids)
    _send(targets, signal.SIGKILL)
    with contextlib.suppress(BedError):  # one in an uninterruptible wait ends when it can
        wait_for(lambda: not any(is_alive(pid) for pid in targets), 5, "killed processes to end")


def _socket_inodes(pid: int) -> set[str]:
    return {link[len("socket:[") : -1] for link in _links(pid) if link.startswith("socket:[")}


def _address(text: str) -> tuple[str, int]:
    """Decode /proc/net/tcp's address: 32-bit words in the host's (little-endian) byte order."""
    host, port = text.split(":")
    raw = bytes.fromhex(host)
    words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _listening() -> Iterator[tuple[str, int, str]]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    yield (*_address(fields[1]), fields[9])


def listeners(pids: Iterable[int]) -> set[tuple[int, str, int]]:
    """(pid, address, port) of every TCP socket on which these processes listen."""
    inodes = {inode: pid for pid in pids for inode in _socket_inodes(pid)}
    return {(inodes[i], host, port) for host, port, i in _listening() if i in inodes}


def taken_ports(ports: Iterable[int]) -> list[int]:
    """Those of the ports on which something listens already."""
    listening = {port for _, port, _ in _listening()}
    return sorted(set(ports) & listening)
