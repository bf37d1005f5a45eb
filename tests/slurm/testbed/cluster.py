"""What a test holds in its hands: a running cluster and the few things tests do with it."""

from __future__ import annotations

import json
import os
import subprocess
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.shared_folder.kinds import kind_of
from tests.slurm.testbed import bed, daemons, mounts
from tests.slurm.testbed.processes import daemons as living_daemons
from tests.slurm.testbed.processes import end, is_alive, job_processes, kill, listeners, node_processes, without_daemons
from tests.slurm.testbed.spec import NODES, Spec

POLL_S = 0.2
# An answer of a node that is on its way when the node dies.
_LATE_ANSWER_S = 1.5
_TIDY_S = 60  # the longest that a job may take to end: its grace, and KillWait, and a margin


def _clean_environment(spec: Spec) -> dict[str, str]:
    """The caller's environment without what another Slurm, or a job around it, left there."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_"))
    }
    return {**kept, **spec.environment()}


def _tag(folder: Path) -> str:
    """A test's name on the shared folder of its cluster."""
    return f"{folder.name}-{zlib.crc32(str(folder).encode()):08x}"


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster that is up. ``env`` is what a child process needs to reach it."""

    spec: Spec
    release: str
    version: tuple[int, ...]
    env: dict[str, str] = field(repr=False)

    @classmethod
    def attach(cls, spec: Spec) -> SlurmCluster:
        """The cluster that runs already for this spec."""
        numbers = tuple(int(part) for part in bed.version(spec).split(".") if part.isdigit())
        return cls(spec, spec.release, numbers, _clean_environment(spec))

    def run(
        self,
        *argv: str | Path,
        timeout: float = 60,
        check: bool = True,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program against this cluster; with ``check`` a failure shows what it wrote."""
        words = [str(word) for word in argv]
        # The kernel looks the program up in *our* PATH, not in the one that the child gets.
        if "/" not in words[0] and (self.spec.bin / words[0]).exists():
            words[0] = str(self.spec.bin / words[0])
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=timeout,
            cwd=cwd,
            env={**self.env, **(env or {})},
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def run_on(self, client: str, *argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program where it sees the shared folder as a node (or `login`) does."""
        # The nodes of a chroot have their mounts in it.
        inside = ["chroot", str(self.spec.root)] if self.spec.chrooted and client != mounts.LOGIN else []
        return self.run(*mounts.enter(self.spec, client, *inside, *map(str, argv)), **options)

    @property
    def cache_age_s(self) -> float:
        """For how long a client of the shared folder may take what it knows for true; 0 without clients."""
        if self.spec.share is None:
            return 0.0
        kind = kind_of(self.spec.share.kind, self.spec.share.cache_scale, list(self.spec.share.settings))
        return 0.0 if kind.strong else max(kind.acregmax, kind.acdirmax)

    def runs_folder(self, folder: Path) -> Path:
        """Where commands keep the runs of a test in `folder`: on the shared folder, if there is one."""
        return (self.spec.mountpoint / _tag(folder) if self.spec.share else folder) / "runs"

    def true_folder(self, folder: Path) -> Path:
        """The same folder as the server has it, for the test's eyes: late for nobody."""
        return (self.spec.backing / _tag(folder) if self.spec.share else folder) / "runs"

    def set_faults(self, **faults: object) -> None:
        """Replace the faults of the shared folder (tests/shared_folder/server.py); without any, all is well."""
        new = self.spec.control / "faults.new"
        new.write_text(json.dumps(faults))
        new.replace(self.spec.control / "faults.json")

    def submit(self, script: str, *options: str, cwd: Path, job_name: str = "test") -> int:
        """Submit the text of a bash script, its output going to ``cwd``/slurm-<id>.out."""
        path = cwd / f"{job_name}.sbatch"
        path.write_text(f"#!/bin/bash\n{script}\n")
        done = self.run("sbatch", "--parsable", f"--job-name={job_name}", *options, str(path), cwd=cwd)
        return int(done.stdout.strip().split(";")[0])

    def job_state(self, job_id: int | str) -> str:
        """A job's state in capitals; "" when neither the controller nor accounting knows it."""
        queue = self.run("squeue", "-h", "-t", "all", "-j", str(job_id), "-o", "%T", check=False)
        states = queue.stdout.split()
        if states:
            return states[0]
        if not self.spec.accounting:
            return ""
        past = self.run("sacct", "-X", "-n", "-P", "-j", str(job_id), "-o", "State", check=False)
        lines = past.stdout.strip().splitlines()
        return lines[-1].split()[0] if lines else ""  # "CANCELLED by 0"

    def job(self, job_id: int | str) -> dict[str, str]:
        """What ``scontrol show job`` tells, by field: Restarts, Reason, NodeList, ExitCode, …."""
        text = self.run("scontrol", "show", "job", "-o", str(job_id)).stdout
        pairs = (word.partition("=") for word in text.split())
        return {key: value for key, _, value in pairs if key}

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Poll until the predicate holds; on time-out say what was waited for, and the queue."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            if time.monotonic() > deadline:
                queue = self.run("squeue", "-t", "all", "-l", check=False).stdout
                raise AssertionError(f"waited {timeout_s:g} s in vain for {what}\n{queue}")
            time.sleep(POLL_S)

    def wait_for_state(self, job_id: int | str, *states: str, timeout_s: float = 30) -> str:
        """Wait until a job is in one of the states; say which."""
        self.wait_for(lambda: self.job_state(job_id) in states, timeout_s, f"job {job_id}: {'/'.join(states)}")
        return self.job_state(job_id)

    def start_now(self, job_id: int | str) -> None:
        """Let a requeued job start in two seconds instead of after Slurm's two minutes.

        Not at once: a start within the second of the requeue fails for good, since slurmd still
        holds the job's credentials of that second for revoked ("Killing non-startable batch").
        """
        self.wait_for_state(job_id, "PENDING")
        self.run("scontrol", "update", f"jobid={job_id}", "starttime=now+2seconds")

    def preempt(self, nodes: Sequence[str] = NODES, seconds: int = 600) -> int:
        """Submit a job of high priority that takes these nodes whole; its id."""
        done = self.run(
            "sbatch",
            "--parsable",
            "--partition=high",
            "--job-name=preemptor",
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            "--exclusive",
            "--output=/dev/null",
            f"--wrap=sleep {seconds}",
        )
        return int(done.stdout.strip().split(";")[0])

    def _queued(self) -> list[str]:
        return self.run("squeue", "-h", "-a", "-o", "%A").stdout.split()

    def cancel_all(self) -> None:
        """End every job, without the patience that Slurm shows, and wait until they are gone."""

        def gone() -> bool:
            ids = sorted(set(self._queued()))
            if ids:
                self.run("scancel", "--signal=KILL", "--full", *ids, check=False)
                self.run("scancel", *ids, check=False)
            return not ids

        self.wait_for(gone, _TIDY_S, "an empty queue")

    def stop_daemon(self, name: str) -> None:
        """End slurmctld, slurmdbd or `slurmd-n1` as an administrator does, and wait until it is gone."""
        end([self.daemons()[name]], 20)

    def start_missing(self) -> None:
        """Start the daemons that a test ended."""
        missing = bed.missing_daemons(self.spec)
        if "slurmdbd" in missing:
            daemons.restart_slurmdbd(self.spec)
        if "slurmctld" in missing:
            daemons.start_slurmctld(self.spec)
        for client in mounts.clients(self.spec):
            if mounts.name_of(client) in missing:
                self._mount_again(client)
        for name in sorted(bed.missing_daemons(self.spec)):
            if name.startswith("slurmd-"):
                daemons.start_slurmd(self.spec, name.removeprefix("slurmd-"))

    def _mount_again(self, client: str) -> None:
        """Start a client whose process ended; what works on its node has lost the folder, and ends first."""
        if client != mounts.LOGIN:
            self.cut_power(client)
        mounts.start(self.spec, client)

    def cut_power(self, node: str) -> None:
        """Kill a node's slurmd and all that runs on the node; Slurm finds out by itself, or is told."""
        for _ in range(3):  # a process may have started another one while it was looked at
            kill(node_processes(self.spec, node))

    def set_node(self, node: str, state: str) -> None:
        """`scontrol update` of a node: down or resume (which Slurm refuses if the node is back already)."""
        check = state != "resume"
        self.run("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test", check=check)

    def give_up(self, node: str) -> None:
        """Set a node down whose slurmd was killed, and see that it stays down.

        An answer that it had sent before may arrive after that and bring it back (ReturnToService=2), seen 0.2 s later
        on a busy machine; Slurm would start jobs on it, which fail.
        """
        since = time.monotonic()
        self.set_node(node, "down")

        def stays_down() -> bool:
            nonlocal since
            if not daemons.nodes_by_state(self.spec).get(node, "").startswith("down"):
                since = time.monotonic()
                self.set_node(node, "down")
            return time.monotonic() - since > _LATE_ANSWER_S

        self.wait_for(stays_down, 30, f"{node} to stay down")

    def job_processes(self) -> list[int]:
        """Every process of the jobs on this cluster."""
        return [pid for pid in without_daemons(job_processes(self.spec)) if is_alive(pid)]

    def restore_nodes(self) -> None:
        """Bring back nodes that a test drained, set down, or whose slurmd it ended."""

        def all_idle() -> bool:
            states = daemons.nodes_by_state(self.spec)
            for node in NODES:
                if states.get(node, "").startswith(("down", "drain", "drng", "fail")):
                    self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
            return all(states.get(node) == "idle" for node in NODES)

        self.wait_for(all_idle, _TIDY_S, "idle nodes")

    def tidy(self) -> None:
        """Make the cluster what it was before the test."""
        if self.spec.share:
            self.set_faults()
        self.start_missing()
        self.cancel_all()
        self.restore_nodes()

    def daemons(self) -> dict[str, int]:
        """The pids of the cluster's daemons by name: slurmctld, slurmd-n1, …."""
        return living_daemons(self.spec)

    def listening(self) -> set[tuple[str, str, int]]:
        """(daemon, address, port) of everything on which the daemons listen."""
        names = {pid: name for name, pid in self.daemons().items()}
        return {(names[pid], host, port) for pid, host, port in listeners(names)}
