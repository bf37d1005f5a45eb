"""Running a cluster's programs: in its chroot, and under a host name that means loopback."""

from __future__ import annotations

import shlex
import socket

from tests.slurm.testbed.chroot import MARKER
from tests.slurm.testbed.spec import Spec

_LOCALHOST = "localhost"
# Slurm binds to what the host's name resolves to. Where that is a real interface (a container, a
# cloud machine) the daemons and srun see another name, in a UTS namespace of their own.
_RENAME = ["unshare", "--uts", "sh", "-c", f'hostname {_LOCALHOST} && exec "$@"', "sh"]

_TOOLS = (
    "sacct sacctmgr salloc sattach sbatch sbcast scancel scontrol sdiag sinfo sprio squeue "
    "sreport srun sshare sstat strigger"
)

_WRAPPER = """\
#!/bin/sh
export SLURM_CONF='{conf}'
{guard}exec {enter} "$@"
"""

# A job inherits PATH, so this same file is what "srun" finds in a job: it must not enter twice.
_CHROOT_GUARD = """\
[ -e /{marker} ] && exec /usr/bin/{tool} "$@"
if [ ! -d '{root}'"$PWD" ]; then
    echo "{tool}: $PWD is not visible in the test bed's chroot (HPC_TRAINER_SLURM_BIND)" >&2
    exit 1
fi
"""
_NAME_GUARD = '[ "$(uname -n)" = {name} ] && exec /usr/bin/{tool} "$@"\n'


def _resolves_to_loopback(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return False
    return all(str(item[4][0]).startswith("127.") for item in found)


def _own_name() -> str:
    return socket.gethostname().split(".")[0]


def daemon_host() -> str:
    """The host name under which the daemons run."""
    return _own_name() if _resolves_to_loopback(_own_name()) else _LOCALHOST


def _rename() -> list[str]:
    return [] if daemon_host() == _own_name() else _RENAME


def inside(spec: Spec, *argv: str) -> list[str]:
    """The command line that runs a program of this cluster's release."""
    enter = ["chroot", str(spec.root)] if spec.chrooted else []
    return [*_rename(), *enter, *argv]


def _wrapper(spec: Spec, tool: str) -> str:
    enter = shlex.join(_rename())
    guard = ""
    if spec.chrooted:
        guard = _CHROOT_GUARD.format(marker=MARKER, tool=tool, root=spec.root)
        enter += f' chroot {shlex.quote(str(spec.root))} /usr/bin/env -C "$PWD"'
    elif enter:
        guard = _NAME_GUARD.format(name=_LOCALHOST, tool=tool)
    return _WRAPPER.format(conf=spec.conf, guard=guard, enter=f"{enter} /usr/bin/{tool}".strip())


def write_wrappers(spec: Spec) -> None:
    """Fill the cluster's bin/ folder."""
    for tool in _TOOLS.split():
        path = spec.bin / tool
        path.write_text(_wrapper(spec, tool))
        path.chmod(0o755)
