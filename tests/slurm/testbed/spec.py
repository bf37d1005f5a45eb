"""What a test bed is: its release, its variant, where its files lie, and which ports it takes."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

HOST_RELEASE = "22.05"
"""The release that means "whatever Slurm the host's own packages are" (22.05 on Debian 12)."""

SUITES = {"24.11": "trixie", "26.05": "forky"}
"""Debian suites that hold the other releases; each one runs from a folder of its own."""

RELEASES = (HOST_RELEASE, *SUITES)
VARIANTS = (
    "", "noaccounting", "norequeue", "cancel", "smallarray", "large", "usersignal", "requeueexit", "memorylimit",
    "cgroups", "affinity",
)  # fmt: skip
NODES = ("n1", "n2", "n3", "n4")
GPUS_PER_NODE = 4
CPUS_PER_NODE = 8
ACCOUNT = "research"
PROFILES = Path(__file__).parent / "conf"
"""Folder of `cluster=testbed` and `hardware=testbed_x1`, `testbed_x4`, as a site has one."""


class BedError(Exception):
    """A reason, in one line, why the test bed cannot do what was asked."""


class PackagesMissingError(BedError):
    """The host lacks programs that the test bed starts."""


def default_release() -> str:
    """The release asked for by the environment variable SLURM, else the host's own."""
    return os.environ.get("SLURM") or HOST_RELEASE


def base_folder() -> Path:
    """The folder under which each cluster has its state folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "hpc-trainer-slurm"
    return Path("/tmp") / f"hpc-trainer-slurm-{os.getuid()}"


def worker() -> str:
    """`gw0` of pytest-xdist, "" outside: each worker has clusters of its own, so that tests run side by side."""
    return os.environ.get("PYTEST_XDIST_WORKER", "")


def cache_folder() -> Path:
    """The folder that keeps what is slow to make: chroots and an empty database."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "hpc_trainer"


@dataclass(frozen=True)
class SharedFolder:
    """A folder that the login shell and each node see through a client of their own (tests/shared_folder)."""

    kind: str
    """Which file system is played: nfs3, lustre, …"""
    seed: int = 0
    cache_scale: float = 1.0
    """Factor on the ages of the clients' caches."""
    server_clock_s: int = 0
    """Seconds by which the server's clock is ahead."""
    node_clocks_s: tuple[int, ...] = ()
    """Seconds by which the clocks of n1, n2, … are ahead, for the processes of jobs; () for the host's own clock."""
    settings: tuple[str, ...] = ()
    """Fields of the kind to replace, each as FIELD=VALUE (tests/shared_folder/kinds.py)."""


@dataclass(frozen=True)
class Spec:
    """One cluster: everything else about it follows from these four values."""

    release: str = field(default_factory=default_release)
    variant: str = ""
    folder: Path = Path()
    share: SharedFolder | None = None

    def __post_init__(self) -> None:
        if self.release not in RELEASES:
            raise BedError(f"unknown release {self.release!r}: one of {', '.join(RELEASES)}")
        if self.variant not in VARIANTS:
            known = ", ".join(name for name in VARIANTS if name)
            raise BedError(f"unknown variant {self.variant!r}: one of {known}")
        folder = self.folder if self.folder != Path() else self.default_folder
        object.__setattr__(self, "folder", folder.absolute())

    @property
    def name(self) -> str:
        """``22.05``, ``22.05-cancel`` or ``22.05-on-nfs3``: how the cluster is called in messages."""
        words = [self.release, self.variant, f"on-{self.share.kind}" if self.share else ""]
        return "-".join(word for word in words if word)

    @property
    def default_folder(self) -> Path:
        """Where the state folder lies when none is named."""
        return base_folder() / worker() / self.name

    @property
    def cluster_name(self) -> str:
        """Slurm's ClusterName (letters and digits only: it becomes part of table names)."""
        return "bed" + "".join(c for c in self.name if c.isalnum())

    @property
    def accounting(self) -> bool:
        """Whether slurmdbd and its database run."""
        return self.variant != "noaccounting"

    @property
    def chrooted(self) -> bool:
        """Whether Slurm comes from a folder of its own instead of the host."""
        return self.release in SUITES

    @property
    def base_port(self) -> int:
        """The first of this cluster's 8 ports.

        All lie below the kernel's ephemeral range (32768), whose ports any client may be given.
        """
        if self.folder == self.default_folder.absolute():
            slot = RELEASES.index(self.release) * 16 + VARIANTS.index(self.variant)
            if self.share:  # of any kind: two kinds do not run at once
                slot += 16 * len(RELEASES)
            # One person's clusters never collide, nor those of their workers; those of another runtime folder seldom.
            block = (zlib.crc32(str(base_folder()).encode()) + int(worker()[2:] or -1) + 1) % 19
            return 17000 + 800 * block + 8 * slot
        return 17000 + 8 * (zlib.crc32(str(self.folder).encode()) % 1950)

    @property
    def ctld_port(self) -> int:
        """slurmctld's port."""
        return self.base_port

    @property
    def dbd_port(self) -> int:
        """slurmdbd's port."""
        return self.base_port + 1

    @property
    def node_ports(self) -> range:
        """The ports of the four slurmd."""
        return range(self.base_port + 2, self.base_port + 2 + len(NODES))

    @property
    def ports(self) -> list[int]:
        """Every port that a daemon of this cluster listens on (mariadbd has a socket only)."""
        dbd = [self.dbd_port] if self.accounting else []
        return [self.ctld_port, *dbd, *self.node_ports]

    @property
    def conf(self) -> Path:
        """slurm.conf; also the mark by which this cluster's processes are recognised."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def bin(self) -> Path:
        """The folder with this cluster's commands."""
        return self.folder / "bin"

    @property
    def run(self) -> Path:
        """Pid files and munge's socket."""
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """The daemons' logs."""
        return self.folder / "log"

    @property
    def spool(self) -> Path:
        """slurmctld's and the slurmd's state."""
        return self.folder / "spool"

    @property
    def database(self) -> Path:
        """mariadbd's data, and its socket: only root may enter."""
        return self.folder / "db"

    @property
    def root(self) -> Path:
        """Where the chroot is mounted (a plain empty folder for the host's own release)."""
        return self.folder / "root"

    @property
    def mountpoint(self) -> Path:
        """Where the login shell and the nodes see the shared folder; an empty folder without clients."""
        return self.folder / "shared"

    @property
    def backing(self) -> Path:
        """What the shared folder really holds: the server's disk, which only the tests' eyes see."""
        return self.folder / "server"

    @property
    def control(self) -> Path:
        """Where tests begin and end faults, and clients count what they do."""
        return self.folder / "control"

    @property
    def munge_socket(self) -> Path:
        """The socket of this cluster's own munged."""
        return self.run / "munge.socket"

    @property
    def database_socket(self) -> Path:
        """The only way into this cluster's own mariadbd."""
        return self.database / "socket"

    def environment(self) -> dict[str, str]:
        """Return the variables by which Slurm's commands reach this cluster and hpc_trainer finds its profiles."""
        # Under pytest PATH has no command of Slurm (tests/conftest.py).
        path = os.environ.get("HPC_TRAINER_TESTS_PATH") or os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
        rest = [part for part in path.split(":") if part and part != str(self.bin)]
        return {
            "PATH": ":".join([str(self.bin), *rest]),
            "SLURM_CONF": str(self.conf),
            "HPC_TRAINER_CONFIG_DIR": str(PROFILES),
        }
