"""Clients of the shared folder: one mount for the login shell, and one in the mount namespace of each virtual node.

The process that serves a node's mount was started in a mount namespace of its own, and keeps it; the node's slurmd
enters that namespace, and jobs inherit it. So all clients see the folder at one path, each through its own caches.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.slurm.testbed.processes import daemons, is_alive, kill, wait_for
from tests.slurm.testbed.spec import NODES, BedError, SharedFolder, Spec

LOGIN = "login"
CLIENTS = (LOGIN, *NODES)
_PROJECT = Path(__file__).resolve().parents[3]
_READY_S = 30
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The copy of the login shell's mount that a new namespace begins with is taken away first.
_OWN_NAMESPACE = 'mountpoint -q "$0" && umount --lazy "$0"; exec "$@"'


def name_of(client: str) -> str:
    """Name of a client's process among the cluster's daemons."""
    return f"mount-{client}"


def clients(spec: Spec) -> tuple[str, ...]:
    """Return the clients of this cluster; () if it has no shared folder."""
    return CLIENTS if spec.share else ()


def prepare(spec: Spec) -> None:
    """Make the folders of the server and of its clients."""
    if spec.share:
        for folder in (spec.mountpoint, spec.backing, spec.control):
            folder.mkdir(mode=0o755)


def place(spec: Spec, client: str) -> Path:
    """Where a client's mount is, in the host's tree: jobs of a chroot see the host's tree from elsewhere."""
    if spec.chrooted and client != LOGIN:
        return spec.root / spec.mountpoint.relative_to("/")
    return spec.mountpoint


def _command(spec: Spec, share: SharedFolder, client: str) -> list[str]:
    words = [sys.executable, "-m", "tests.shared_folder.mount", str(spec.backing), str(place(spec, client))]
    words += ["--kind", share.kind, "--client", client, "--seed", str(share.seed), "--control", str(spec.control)]
    if share.cache_scale != 1:
        words += ["--cache-scale", str(share.cache_scale)]
    if share.server_clock_s:
        words += ["--server-clock-s", str(share.server_clock_s)]
    for setting in share.settings:
        words += ["--set", setting]
    return words


def _device(pid: int, point: Path) -> str:
    """Return the device number of what is mounted at a path for this process; "" if nothing is."""
    try:
        lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    found = [line.split()[2] for line in lines if line.split()[4] == str(point)]
    return found[-1] if found else ""


def _detach(point: Path) -> None:
    """Take away what is mounted at a path for this process, dead mounts included."""
    while _device(os.getpid(), point):
        subprocess.run(["umount", "--lazy", str(point)], capture_output=True, check=True)


def start(spec: Spec, client: str) -> None:
    """Start a client and wait until its mount is there."""
    if spec.share is None:
        raise BedError(f"{spec.name} has no shared folder")
    point, command = place(spec, client), _command(spec, spec.share, client)
    if client == LOGIN:
        _detach(point)
    else:
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _OWN_NAMESPACE, str(point), *command]
    others = _device(os.getpid(), point)
    pid_file, log = spec.run / f"{name_of(client)}.pid", spec.log / f"{name_of(client)}.log"
    with log.open("ab") as sink:
        subprocess.run(
            ["sh", "-c", 'setsid "$@" & echo $! >"$0"', str(pid_file), *command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd=_PROJECT,
            env={"PATH": _SYSTEM_PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(spec.conf)},
            check=True,
        )
    pid = int(pid_file.read_text())
    wait_for(
        lambda: _device(pid, point) not in ("", others) or not is_alive(pid), _READY_S, f"the mount of {client} ({log})"
    )
    if not is_alive(pid):
        raise BedError(f"the mount of {client} ended at once: see {log}")
    if client == LOGIN and spec.chrooted:  # its commands run in the chroot
        inside = spec.root / spec.mountpoint.relative_to("/")
        _detach(inside)
        subprocess.run(["mount", "--bind", str(spec.mountpoint), str(inside)], check=True)


def enter(spec: Spec, client: str, *argv: str) -> list[str]:
    """Return the command line that runs a program where it sees the shared folder as this client does."""
    if spec.share is None or client == LOGIN:
        return list(argv)
    pid = daemons(spec).get(name_of(client))
    if pid is None:
        raise BedError(f"{client} has no mount of the shared folder")
    return ["nsenter", "--mount", f"--target={pid}", *argv]


def kill_nodes(spec: Spec) -> None:
    """End the clients of all nodes at once, with what they have not sent: whoever waits for an answer gets an error."""
    alive = daemons(spec)
    kill([alive[name_of(node)] for node in NODES if name_of(node) in alive])
