"""Bringing one cluster up, asking for it, and taking it down again without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

from tests.slurm.testbed import chroot, config, daemons, enter, mounts
from tests.slurm.testbed.locks import locked
from tests.slurm.testbed.processes import daemons as living_daemons
from tests.slurm.testbed.processes import end, job_processes, kill, taken_ports
from tests.slurm.testbed.spec import GPUS_PER_NODE, NODES, BedError, Spec

Say = Callable[[str], None]


@contextlib.contextmanager
def _locked(spec: Spec) -> Iterator[None]:
    """One ``up`` or ``down`` of a cluster at a time; the lock lies beside the state folder."""
    parent = spec.folder.parent
    parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    if parent.stat().st_uid not in {0, os.getuid()}:
        raise BedError(f"{parent} belongs to another user")
    with locked(parent / f".{spec.folder.name}.lock"):
        yield


def _expected_daemons(spec: Spec) -> set[str]:
    names = {"munged", "slurmctld", *(f"slurmd-{node}" for node in NODES)}
    names |= {mounts.name_of(client) for client in mounts.clients(spec)}
    return names | {"mariadbd", "slurmdbd"} if spec.accounting else names


def missing_daemons(spec: Spec) -> set[str]:
    """The daemons that do not run: all of them when the cluster is down."""
    return _expected_daemons(spec) - set(living_daemons(spec))


def is_up(spec: Spec) -> bool:
    """Whether ``up`` ended well and every daemon still runs."""
    return (spec.folder / "bed.json").exists() and not missing_daemons(spec)


def _prepare(spec: Spec) -> None:
    for folder in (spec.conf.parent, spec.bin, spec.run, spec.log, spec.root):
        folder.mkdir(parents=True, mode=0o755)
    for name in ("ctld", *NODES):
        (spec.spool / name).mkdir(parents=True, mode=0o755)
    spec.database.mkdir(mode=0o700)
    devices = spec.folder / "dev"
    devices.mkdir(mode=0o755)
    for index in range(GPUS_PER_NODE):
        # slurmd asks for a device file and never opens it.
        (devices / f"gpu{index}").symlink_to("/dev/null")
    mounts.prepare(spec)
    config.write_all(spec)
    enter.write_wrappers(spec)


def _refuse_if_impossible(spec: Spec) -> None:
    daemons.require_packages(spec)
    if os.getuid() != 0:
        raise BedError("the test bed's daemons need root: run this as root or with sudo")
    taken = taken_ports(spec.ports)
    if taken:
        raise BedError(f"ports {', '.join(map(str, taken))} are taken (see: ss -ltnp): use another --dir")


def _start(spec: Spec, say: Say) -> None:
    if spec.chrooted:
        chroot.ensure_built(spec, say)
    _prepare(spec)
    if spec.chrooted:
        chroot.mount(spec)
    for client in mounts.clients(spec):
        mounts.start(spec, client)
    if spec.accounting:
        daemons.start_mariadbd(spec)
    daemons.start_munged(spec)
    if spec.accounting:
        say("starting the database and slurmdbd")
        daemons.wait_for_mariadbd(spec)
        daemons.start_slurmdbd(spec)
    say("starting slurmctld and four slurmd")
    daemons.start_slurmctld(spec)
    for node in NODES:
        daemons.start_slurmd(spec, node)
    daemons.wait_for_nodes(spec)


def up(spec: Spec, say: Say) -> bool:
    """Bring the cluster up; False when it was up already."""
    with _locked(spec):
        if is_up(spec):
            return False
        if spec.folder.exists():
            say("clearing what an earlier cluster left")
            _remove(spec)
        _refuse_if_impossible(spec)
        started = time.monotonic()
        try:
            _start(spec, say)
        except BaseException:
            # Stopped half-way (Ctrl-C too): keep the logs, nothing else.
            kept = spec.folder.with_name(f"{spec.folder.name}.failed-logs")
            shutil.rmtree(kept, ignore_errors=True)
            if spec.log.exists():
                shutil.copytree(spec.log, kept)
                say(f"the daemons' logs are kept in {kept}")
            _remove(spec)
            raise
        record = {"release": spec.release, "variant": spec.variant, "version": version(spec)}
        (spec.folder / "bed.json").write_text(json.dumps(record))
        say(f"Slurm {record['version']} is up after {time.monotonic() - started:.1f} s")
        return True


def version(spec: Spec) -> str:
    """The release that really runs, such as 22.05.8."""
    done = subprocess.run(
        [str(spec.bin / "sinfo"), "--version"],
        capture_output=True,
        text=True,
        cwd="/tmp",
        check=False,
    )
    return done.stdout.split()[-1] if done.stdout.split() else "unknown"


def down(spec: Spec) -> bool:
    """Stop everything this cluster started and remove its state; False when nothing was there."""
    with _locked(spec):
        if not spec.folder.exists():
            return False
        _remove(spec)
        return True


def _remove(spec: Spec) -> None:
    alive = living_daemons(spec)
    # The controller first: it would start another job as soon as one ends. Then the jobs, which
    # slurmd leaves running when it ends.
    end([pid for name, pid in alive.items() if name == "slurmctld"], 3)
    kill([pid for name, pid in alive.items() if name.startswith("slurmd-")])
    mounts.kill_nodes(spec)
    for _ in range(3):  # a process may have started another one while it was looked at
        left = job_processes(spec)
        if not left:
            break
        kill(left)
    end([pid for name, pid in alive.items() if name == "slurmdbd"], 3)
    end(living_daemons(spec).values(), 5)
    chroot.unmount(spec)
    shutil.rmtree(spec.folder)
