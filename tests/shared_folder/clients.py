"""What tests use of a played shared folder: a share, its clients and its faults."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Client", "Share", "missing"]

ROOT = Path(__file__).resolve().parents[2]
LONG = {"acregmin": 600, "acregmax": 600, "acdirmin": 600, "acdirmax": 600}
"""Settings of a client that remembers for ten minutes: what a test sees then was asked for anew."""
CALM = {"lost_replies": 0, "late": 0, "very_late": 0}
"""Settings of a share on which nothing is lost or late but what a test begins."""


def missing() -> str:
    """Return why nothing can be played here, or nothing."""
    if not Path("/dev/fuse").exists():
        return "/dev/fuse is missing: the kernel has no FUSE"
    if os.geteuid() != 0:
        return "only root may mount"
    return ""


class Client:
    """One mount of a backing folder, in a process of its own."""

    def __init__(
        self,
        backing: Path,
        mountpoint: Path,
        kind: str = "nfs3",
        *,
        client: str = "client",
        seed: int = 0,
        control: Path,
        clock_s: float = 0.0,
        scale: float = 1.0,
        settings: Mapping[str, object] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        """Describe a client; `start` or `with` mounts it.

        Args:
            backing: The folder that plays the server's disk.
            mountpoint: Where this client sees it; it is made if it is missing.
            kind: A name of `kinds.KINDS`.
            client: The client's name.
            seed: Decides which requests are late or lost.
            control: The folder that all clients of `backing` share.
            clock_s: How far the server's clock is ahead, the same for all clients.
            scale: Factor on all times of caches and buffers.
            settings: Fields of the kind to replace.
            prefix: A command that starts the process, such as one that enters a mount namespace.
        """
        self.mountpoint = mountpoint
        self.control = control
        self.client = client
        self.process: subprocess.Popen[bytes] | None = None
        extra = [word for name, value in (settings or {}).items() for word in ("--set", f"{name}={value}")]
        self.command = [
            *prefix, sys.executable, "-m", "tests.shared_folder.mount", str(backing), str(mountpoint), "--kind", kind,
            "--client", client, "--seed", str(seed), "--control", str(control), "--server-clock-s", str(clock_s),
            "--cache-scale", str(scale), *extra,
        ]  # fmt: skip

    def start(self) -> Client:
        """Mount and wait until the mount is there."""
        self.launch()
        self.wait()
        return self

    def launch(self) -> None:
        """Start the process that mounts."""
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        self.control.mkdir(parents=True, exist_ok=True)
        log = (self.control / f"log.{self.client}").open("ab")
        with log:
            paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the mount is there.

        Raises:
            RuntimeError: The process ended, or did not mount within 30 s; the message has its log.
        """
        assert self.process is not None
        until = time.monotonic() + 30
        while not self._is_mounted():
            if self.process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise RuntimeError(f"no mount: {self.log()[-2000:]}")
            time.sleep(0.01)

    def _is_mounted(self) -> bool:
        """Return True if the process's own mount table has the mountpoint."""
        assert self.process is not None
        with contextlib.suppress(OSError):
            table = Path(f"/proc/{self.process.pid}/mountinfo").read_text()
            return any(line.split()[4] == str(self.mountpoint.resolve()) for line in table.splitlines())
        return False

    def stop(self) -> None:
        """Unmount and end the process."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            unmounted = self.process.wait(10) == 0
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            unmounted = False
        self.process = None
        if not unmounted:
            subprocess.run(["umount", "--lazy", str(self.mountpoint)], check=False, capture_output=True)

    def __enter__(self) -> Client:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def counts(self) -> dict[str, dict[str, int]]:
        """Return `requests` to the server, `calls` of the kernel and `bytes`, each by name, so far."""
        path = self.control / f"counts.{self.client}.json"
        if self.process is not None:
            asked = self.control / f"counts.{self.client}.asked"
            asked.touch()
            until = time.monotonic() + 10
            while asked.exists() and time.monotonic() < until:
                time.sleep(0.01)
        answer: dict[str, dict[str, int]] = json.loads(path.read_text())
        return answer

    def log(self) -> str:
        """Return what the process printed: nothing, unless it has a fault of its own."""
        return (self.control / f"log.{self.client}").read_text()

    def events(self) -> list[dict[str, Any]]:
        """Return what went wrong so far: time, operation, where and what of each fault."""
        path = self.control / f"events.{self.client}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Share:
    """A backing folder, its control folder and any number of clients, below one folder."""

    def __init__(
        self, folder: Path, kind: str = "nfs3", *, seed: int = 0, clock_s: float = 0.0, scale: float = 1.0,
        settings: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.backing = folder / "backing"
        self.control = folder / "control"
        self.backing.mkdir(parents=True, exist_ok=True)
        self.control.mkdir(parents=True, exist_ok=True)
        self.clients: list[Client] = []
        self._same: dict[str, Any] = {
            "kind": kind, "seed": seed, "clock_s": clock_s, "scale": scale, "settings": settings,
        }  # fmt: skip

    def client(self, name: str, mountpoint: Path | None = None, **changes: Any) -> Client:
        """Mount one more client, by default at a folder of its name."""
        client = self._client(name, mountpoint, **changes)
        client.start()
        return client

    def several(self, *names: str) -> list[Client]:
        """Mount more clients at once, each at a folder of its name."""
        clients = [self._client(name, None) for name in names]
        for client in clients:
            client.launch()
        for client in clients:
            client.wait()
        return clients

    def _client(self, name: str, mountpoint: Path | None, **changes: Any) -> Client:
        client = Client(
            self.backing, mountpoint or self.folder / name, client=name, control=self.control,
            **{**self._same, **changes},
        )  # fmt: skip
        self.clients.append(client)
        return client

    def stop(self) -> None:
        """Unmount all clients."""
        for client in self.clients:
            if client.process is not None:
                client.process.terminate()
        for client in self.clients:
            client.stop()

    def faults(self, only: str = "", **faults: Any) -> None:
        """Replace the faults of all clients, or of the one named by `only`; without faults all is well.

        See `server.Faults` for their names.
        """
        path = self.control / "faults.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"clients": {only: faults}} if only else faults))
        new.replace(path)
        time.sleep(0.02)  # clients look every 10 ms

    def __enter__(self) -> Share:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
