"""A folder that only this machine sees cannot hold the runs of a cluster: recognised before anything is written.

A type of file system alone proves nothing: a small cluster's login node is often its file server, and has the home
folders on a disk of its own, which it exports. So only what no site exports is refused: memory, a container's own
layer, and the folders for temporary files. Slurm must also say that its nodes are other machines.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_trainer.errors import SlurmError
from hpc_trainer.runs.shared_folder import is_local, mount_of
from hpc_trainer.slurm.cluster import node_hosts

# Of file systems that are never exported: tmpfs(5); a container's layers (kernel's overlayfs.rst).
_MEMORY = {"tmpfs": "memory of", "ramfs": "memory of", "overlay": "a container's own layer on"}
# hier(7): what is in these may go at any time, and is of this machine.
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108  (looked for, not used)
_BETTER = ("SCRATCH", "WORK", "PROJECT", "HOME")
_SHOWN = 3


def find_private_folder(
    folder: Path, *, ask: Callable[[], Mapping[str, str]] = node_hosts, exports: Path = Path("/etc/exports")
) -> str | None:
    """Return why compute nodes cannot see `folder`, with what to do; None if they may.

    Slurm is asked only about a folder that looks private.

    Args:
        folder: where sweeps are kept; it need not exist.
        ask: node name -> host, of the cluster's nodes.
        exports: what this machine exports by NFS (exports(5)).
    """
    mount = mount_of(folder)
    if mount is None or not is_local(mount[1]):
        return None
    place = os.path.realpath(folder)
    is_temporary = any(place == each or place.startswith(f"{each}/") for each in _TEMPORARY)
    if not (mount[1] in _MEMORY or is_temporary) or _is_exported(place, exports):
        return None
    try:
        hosts = ask()
    except SlurmError:
        return None  # nobody says that the nodes are other machines
    here = socket.gethostname().partition(".")[0]
    others = sorted(name for name, host in hosts.items() if host.partition(".")[0] not in (here, "localhost"))
    if not others or len(others) < len(hosts):
        return None  # this machine is one of the nodes: it may be the only one that is meant
    what = f"{_MEMORY[mount[1]]} {here}" if mount[1] in _MEMORY else f"a folder for temporary files of {here}"
    shown = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
    better = next((each for each in map(_shared_folder_of, _BETTER) if each is not None), "a shared file system")
    return (
        f"paths.runs_dir={folder} is {what} ({mount[1]} at {mount[0]}, by /proc/self/mountinfo), and Slurm's nodes "
        f"{shown} are other machines (scontrol show nodes): they do not see it. Use a folder on a shared file system: "
        f"paths.runs_dir={better}/runs, or once: export HPC_TRAINER_RUNS={better}/runs"
    )


def _shared_folder_of(variable: str) -> str | None:
    """Return what the variable names, if that is on a file system of several machines."""
    folder = os.environ.get(variable)
    mount = mount_of(folder) if folder and Path(folder).is_dir() else None
    return folder if mount is not None and not is_local(mount[1]) else None


def _is_exported(place: str, exports: Path) -> bool:
    try:
        lines = exports.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    folders = [line.split()[0].strip('"') for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return any(place == each or place.startswith(each.rstrip("/") + "/") for each in folders)
