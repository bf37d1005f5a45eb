"""Check that compute nodes can see the folder of sweeps, before anything is written.

The type of a file system alone proves nothing: a small cluster's login node is often its file server and exports home
folders from its own disk. Therefore only places that no site exports are refused: memory, a container's own layer, and
folders for temporary files. Slurm must also say that its nodes are other machines.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_trainer.errors import SlurmError
from hpc_trainer.record.shared_folder import is_local, mount_of
from hpc_trainer.slurm.commands import node_hosts

# File systems that are never exported: tmpfs(5); a container's layers (kernel's overlayfs.rst).
_MEMORY = {"tmpfs": "memory of", "ramfs": "memory of", "overlay": "a container's own layer on"}
# hier(7): files in these folders belong to this machine and may be deleted at any time.
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108  (looked for, not used)
_BETTER = ("SCRATCH", "WORK", "PROJECT", "HOME")
_SHOWN = 3


def find_private_folder(
    folder: Path, *, ask: Callable[[], Mapping[str, str]] = node_hosts, exports: Path = Path("/etc/exports")
) -> str | None:
    """Return an error message if compute nodes cannot see `folder`; None if they may see it.

    Slurm is asked only about a folder that looks private.

    Args:
        folder: the folder of sweeps; it need not exist.
        ask: returns the host of each of the cluster's nodes, by node name.
        exports: list of the folders that this machine exports by NFS (exports(5)).
    """
    mount = mount_of(folder)
    if mount is None or not is_local(mount[1]):
        return None
    place = os.path.realpath(folder)
    is_temporary = any(place == temporary or place.startswith(f"{temporary}/") for temporary in _TEMPORARY)
    if not (mount[1] in _MEMORY or is_temporary) or _is_exported(place, exports):
        return None
    try:
        hosts = ask()
    except SlurmError:
        return None  # it is unknown whether the nodes are other machines
    here = socket.gethostname().partition(".")[0]
    others = sorted(name for name, host in hosts.items() if host.partition(".")[0] not in (here, "localhost"))
    if not others or len(others) < len(hosts):
        return None  # this machine is one of the nodes; the user may mean only this node
    what = f"{_MEMORY[mount[1]]} {here}" if mount[1] in _MEMORY else f"a folder for temporary files of {here}"
    shown = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
    better = next((shared for shared in map(_shared_folder_of, _BETTER) if shared is not None), "a shared file system")
    return (
        f"paths.runs_dir={folder} is {what} ({mount[1]} at {mount[0]}, by /proc/self/mountinfo), and Slurm's nodes "
        f"{shown} are other machines (scontrol show nodes): they do not see it. Use a folder on a shared file system: "
        f"paths.runs_dir={better}/runs, or once: export HPC_TRAINER_RUNS={better}/runs"
    )


def _shared_folder_of(variable: str) -> str | None:
    """Return the folder that the variable names if it is on a shared file system; else None."""
    folder = os.environ.get(variable)
    mount = mount_of(folder) if folder and Path(folder).is_dir() else None
    return folder if mount is not None and not is_local(mount[1]) else None


def _is_exported(place: str, exports: Path) -> bool:
    try:
        lines = exports.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    folders = [line.split()[0].strip('"') for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return any(place == exported or place.startswith(exported.rstrip("/") + "/") for exported in folders)
