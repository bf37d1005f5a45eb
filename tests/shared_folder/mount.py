"""Mounts a backing folder as one client of a played shared folder sees it, until SIGTERM or SIGINT.

`python -m tests.shared_folder.mount BACKING MOUNTPOINT --kind nfs3 --client login --control FOLDER`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import threading
from pathlib import Path

from tests.shared_folder.filesystem import FileSystem
from tests.shared_folder.kinds import KINDS, kind_of
from tests.shared_folder.protocol import Device, mount, unmount

__all__ = ["main"]


def _more_descriptors() -> None:
    """Let this process hold a descriptor for each node that it knows."""
    wanted = 200_000
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, most), max(wanted, most)))


def main() -> int:
    """Mount, serve, unmount."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backing", type=Path, help="the folder that plays the server's disk")
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--kind", choices=sorted(KINDS), default="nfs3")
    parser.add_argument("--client", default="client", help="the client's name, in faults, counts and events")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", type=Path, required=True, help="a folder that all clients of BACKING share")
    parser.add_argument("--server-clock-s", type=float, default=0.0, help="how far the server's clock is ahead")
    parser.add_argument("--cache-scale", type=float, default=1.0, help="factor on all times of caches and buffers")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="replace a field of the kind")
    given = parser.parse_args()
    _more_descriptors()
    os.umask(0)
    kind = kind_of(given.kind, given.cache_scale, given.set)
    system = FileSystem(given.backing, given.control, kind, given.client, given.seed, given.server_clock_s)
    descriptor = mount(given.mountpoint.resolve(), given.kind)
    device = Device(descriptor, system.handle, locks=True)
    system.device = device
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=system.tend, args=(device.ended,), daemon=True).start()
    threading.Thread(target=device.serve, daemon=True).start()
    while not stop.is_set() and not device.ended.is_set():
        stop.wait(0.2)
    if not device.ended.is_set():
        with contextlib.suppress(OSError):
            unmount(given.mountpoint.resolve())
        system.files.send_all()
        device.ended.wait(0.5)
    system.server.write_counts()
    sys.stdout.flush()
    os._exit(0)  # threads may still read from a device that others hold


if __name__ == "__main__":
    sys.exit(main())
