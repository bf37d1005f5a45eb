"""Starting the daemons of one cluster: munged, mariadbd, slurmdbd, slurmctld and four slurmd."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.slurm.testbed import chroot, mounts
from tests.slurm.testbed.enter import inside
from tests.slurm.testbed.locks import locked
from tests.slurm.testbed.processes import is_alive, taken_ports, wait_for
from tests.slurm.testbed.spec import (
    ACCOUNT,
    NODES,
    BedError,
    PackagesMissingError,
    Spec,
    cache_folder,
)

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HOST_PROGRAMS = {
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
_SLURM_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sbatch": "slurm-client",
}
_SLOW_S = 30  # two cores that also run torch: generous, it is only ever waited out on failure


def require_packages(spec: Spec) -> None:
    """Refuse, naming the packages, when a program that would be started is missing."""
    needed = dict(_HOST_PROGRAMS)
    if spec.chrooted:
        if not (chroot.cached_root(spec) / chroot.MARKER).exists():
            needed["debootstrap"] = "debootstrap"
    else:
        needed.update(_SLURM_PROGRAMS)
    missing = sorted({pkg for prog, pkg in needed.items() if not shutil.which(prog, path=_SYSTEM_PATH)})
    if missing:
        raise PackagesMissingError(f"Slurm {spec.release} cannot start here: apt-get install {' '.join(missing)}")


def _environment(spec: Spec) -> dict[str, str]:
    """A bare one: what slurmd starts with is what jobs inherit.

    SLURM_CONF tells slurmdbd, which has no option for it, where its file lies, and marks every
    daemon as this cluster's. MYSQL_UNIX_PORT is the database client library's default socket.
    """
    return {
        "PATH": _SYSTEM_PATH,
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "SLURM_CONF": str(spec.conf),
        "MYSQL_UNIX_PORT": str(spec.database_socket),
    }


def _run(spec: Spec, *argv: str, log: str) -> None:
    """Run a program that ends by itself (a daemon that detaches does)."""
    with (spec.log / log).open("ab") as sink:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=_environment(spec),
            cwd="/",
            timeout=_SLOW_S,
            check=False,
        )
    if done.returncode != 0:
        tail = (spec.log / log).read_text(errors="replace").strip().splitlines()[-3:]
        raise BedError(f"{' '.join(argv)} ended with {done.returncode}: {' | '.join(tail)}")


def start_munged(spec: Spec) -> None:
    """Start a munged with a key and a socket of its own."""
    key = spec.run / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(128))
    _run(
        spec,
        "/usr/sbin/munged",
        "--force",  # else it refuses a state folder below a private one, such as XDG_RUNTIME_DIR
        f"--key-file={key}",
        f"--socket={spec.munge_socket}",
        f"--pid-file={spec.run}/munged.pid",
        f"--log-file={spec.log}/munged.log",
        f"--seed-file={spec.run}/munge.seed",
        log="start.log",
    )


def _empty_database(spec: Spec) -> Path:
    """An empty data folder, made once per version of the server (2 s) and copied (20 ms)."""
    shown = subprocess.run(["mariadbd", "--version"], capture_output=True, text=True, check=True)
    version = shown.stdout.split("Ver ")[-1].split()[0]
    template = cache_folder() / f"mariadb-{version}"
    with locked(cache_folder() / ".mariadb.lock"):
        if not template.exists():
            partial = template.with_name(f"{template.name}-building")
            shutil.rmtree(partial, ignore_errors=True)
            _install_database(spec, partial)
            partial.rename(template)
    return template


def _install_database(spec: Spec, target: Path) -> None:
    own_tmp = spec.run / "install"
    own_tmp.mkdir(exist_ok=True)
    _run(
        spec,
        "/usr/bin/mariadb-install-db",
        "--no-defaults",
        "--user=root",
        f"--datadir={target}",
        # root by password, and none set: the socket's folder is what keeps others out.
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
        "--innodb-log-file-size=4M",
        f"--tmpdir={own_tmp}",  # as start_mariadbd says
        log="mariadb-install.log",
    )


def start_mariadbd(spec: Spec) -> None:
    """Start a database server that only a socket leads to; it need not survive a power loss."""
    shutil.copytree(_empty_database(spec), spec.database / "data")
    # A server that starts removes all `#sql*` files of its tmpdir: in /tmp those of a cluster beside this one, which
    # then crashes (signal 11 in create_tmp_table, 10.11.19).
    own_tmp = spec.database / "tmp"
    own_tmp.mkdir()
    pid_file = spec.run / "mariadbd.pid"
    server = [
        "/usr/sbin/mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={spec.database}/data",
        f"--socket={spec.database_socket}",
        f"--pid-file={pid_file}",
        f"--tmpdir={own_tmp}",
        "--skip-networking",
        "--innodb-log-file-size=4M",
        "--innodb-buffer-pool-size=32M",
        "--innodb-flush-log-at-trx-commit=0",
        "--skip-innodb-doublewrite",
    ]
    # mariadbd does not detach by itself. It writes its pid file only once it serves, but "down"
    # must find it before that too.
    detach = 'setsid "$@" & echo $! >"$0"'
    _run(spec, "/bin/sh", "-c", detach, str(pid_file), *server, log="mariadbd.log")


def wait_for_mariadbd(spec: Spec) -> None:
    """Wait until the database answers."""
    pid = int((spec.run / "mariadbd.pid").read_text())
    wait_for(
        lambda: spec.database_socket.exists() or not is_alive(pid),
        _SLOW_S,
        "mariadbd's socket",
    )
    if not spec.database_socket.exists():
        raise BedError(f"mariadbd ended at once: see {spec.log}/mariadbd.log")


def _wait_for_port(spec: Spec, port: int, name: str) -> None:
    wait_for(lambda: bool(taken_ports([port])), _SLOW_S, f"{name} on port {port} ({spec.log}/{name}.log)")


def restart_slurmdbd(spec: Spec) -> None:
    """Start slurmdbd with what its database holds."""
    _run(spec, *inside(spec, "/usr/sbin/slurmdbd"), log="start.log")
    _wait_for_port(spec, spec.dbd_port, "slurmdbd")


def start_slurmdbd(spec: Spec) -> None:
    """Start slurmdbd and enter the cluster, the account and the users."""
    restart_slurmdbd(spec)
    users = ["root"]
    invoker = os.environ.get("SUDO_USER")
    if invoker and invoker != "root":
        users.append(invoker)
    for what in (
        f"cluster {spec.cluster_name}",
        f"account {ACCOUNT} Cluster={spec.cluster_name}",
        *(f"user {user} Account={ACCOUNT}" for user in users),
    ):
        _sacctmgr(spec, "add", what)
    for user in users:  # sacctmgr makes root a user of an account "root" first
        _sacctmgr(spec, "modify", f"user {user} set DefaultAccount={ACCOUNT}")
    if spec.variant == "smallarray":
        _sacctmgr(spec, "add", "qos limited MaxSubmitJobsPerUser=15")
        _sacctmgr(spec, "modify", f"account {ACCOUNT} set qos+=limited")


def _sacctmgr(spec: Spec, verb: str, what: str) -> None:
    _run(
        spec,
        *inside(spec, "/usr/bin/sacctmgr", "-i", verb, *what.split()),
        log="sacctmgr.log",
    )


def start_slurmctld(spec: Spec) -> None:
    """Start the controller."""
    argv = inside(spec, "/usr/sbin/slurmctld", "-f", str(spec.conf))
    _run(spec, *argv, log="start.log")
    _wait_for_port(spec, spec.ctld_port, "slurmctld")


def start_slurmd(spec: Spec, node: str) -> None:
    """Start the slurmd of one virtual node, where the node's mount of a shared folder is."""
    slurmd = inside(spec, "/usr/sbin/slurmd", "-f", str(spec.conf), "-N", node)
    _run(spec, *mounts.enter(spec, node, *slurmd), log="start.log")


def nodes_by_state(spec: Spec) -> dict[str, str]:
    """Each node's state as sinfo writes it (``idle``, ``mix``, ``down*``); empty if unknown."""
    done = subprocess.run(
        [str(spec.bin / "sinfo"), "-h", "-N", "-p", "main", "-o", "%N %t"],
        capture_output=True,
        text=True,
        cwd="/tmp",
        timeout=_SLOW_S,
        check=False,
    )
    pairs = (line.split() for line in done.stdout.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def wait_for_nodes(spec: Spec) -> None:
    """Wait until every node is idle."""
    wait_for(
        lambda: list(nodes_by_state(spec).values()) == ["idle"] * len(NODES),
        _SLOW_S,
        f"four idle nodes (see {spec.log})",
    )
