"""Checks of the cluster by two requests to its controller: Slurm's commands, release, clock, nodes' architectures."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.own_files import own_defaults
from hpc_trainer.doctor.findings import Finding, broken, ok, warning
from hpc_trainer.doctor.machine import torch_build
from hpc_trainer.errors import HpcTrainerError, SlurmError
from hpc_trainer.slurm.commands import Controller, Node, read_controller, read_nodes

_NEEDED = {
    "sbatch": "submits runs",
    "squeue": "shows the states of jobs",
    "scontrol": "requeues runs and reads the site's limits",
    "scancel": "ends runs",
    "sinfo": "shows the resources of nodes",
}
_USEFUL = {
    "sacct": "how jobs ended that have left the queue",
    "sacctmgr": "the limits of your accounts",
}
_OLDEST = (22, 5)
"""Oldest release that the tests run."""
_TIMEOUT_S = 4.0
_CLOCKS_S = 90.0


class Cluster:
    """Findings from Slurm's answers; without any Slurm command, runs can only use this machine."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._nodes: list[Node] = []

    def findings(self) -> Iterator[Finding]:
        """Yield the findings about commands, controller and nodes."""
        missing = [name for name in _NEEDED if shutil.which(name) is None]
        if len(missing) == len(_NEEDED):
            yield ok("slurm", "no Slurm commands on PATH: runs start on this machine (cluster=local)")
            return
        yield from _variables()
        if missing:
            yield broken(
                "slurm", f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not on PATH, but other commands "
                "of Slurm are",
                why="; ".join(f"{name} {_NEEDED[name]}" for name in missing),
                fix=f"find the folder of Slurm's commands (module avail slurm, ls {_folder_of_slurm()}), and add it to "
                "PATH",
            )  # fmt: skip
        absent = [name for name in _USEFUL if shutil.which(name) is None]
        if absent:
            yield warning(
                "slurm", f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not on PATH",
                why=f"without it hpc-trainer does not know {' and '.join(_USEFUL[name] for name in absent)}",
                fix="add the folder of Slurm's commands to PATH, if the site has accounting",
            )  # fmt: skip
        if "scontrol" in missing:
            return
        try:
            self.num_calls += 1
            before = time.time()
            controller = read_controller(_TIMEOUT_S)
            if controller.version is None and controller.cluster is None:
                yield _of_garbage(controller)
                return
            yield from _of_controller(controller, before, time.time())
            self.num_calls += 1
            self._nodes = read_nodes(_TIMEOUT_S)
        except SlurmError as error:
            yield broken(
                "slurm", str(error), why="submit, status and the requeue of runs ask it",
                fix="try: scontrol ping. If this machine belongs to no cluster, say cluster=local",
            )  # fmt: skip
            return
        yield from _architectures(self._nodes)
        yield from _devices(self._nodes)

    def more_findings(self, runs_dir: Path) -> Iterator[Finding]:
        """Yield the findings on whether the folder of sweeps is mounted, and whether Slurm's nodes can see it."""
        from hpc_trainer.launch.grids import find_private_folder, find_unmounted  # late: it imports Hydra

        if (unmounted := find_unmounted(runs_dir)) is not None:
            yield broken(
                "runs folder", unmounted, why="new runs would be on another disk than the earlier ones",
                fix="do what the line above says",
            )  # fmt: skip
        if self._nodes:
            hidden = find_private_folder(runs_dir, ask=lambda: {node.name: node.host for node in self._nodes})
            if hidden is not None:
                yield broken(
                    "shared folder", hidden, why="a job would not find its run", fix="do what the line above says"
                )
            else:
                yield ok("shared folder", "nothing indicates that nodes cannot see the folder of sweeps")


def _folder_of_slurm() -> str:
    command = next(filter(None, map(shutil.which, (*_NEEDED, *_USEFUL))), None)
    return str(Path(command).parent) if command else "/usr/bin"


def _of_controller(controller: Controller, before: float, after: float) -> Iterator[Finding]:
    version = ".".join(f"{part:02d}" for part in controller.version) if controller.version else "of unknown release"
    if controller.version is not None and controller.version < _OLDEST:
        yield warning(
            "slurm", f"Slurm {version} is older than {_OLDEST[0]}.{_OLDEST[1]:02d}, the oldest that hpc_trainer is "
            "tested with",
            why="its output and options may differ",
            fix="try one run first: hpc-trainer submit experiment=digits debug=smoke --wait",
        )  # fmt: skip
    else:
        yield ok("slurm", f"Slurm {version}, cluster {controller.cluster or 'without a name'}")
    clusters, here = os.environ.get("SLURM_CLUSTERS", ""), controller.cluster or ""
    if clusters and clusters.lower() != here.lower():
        yield warning(
            "slurm", f"this shell has SLURM_CLUSTERS={clusters}, and {here or 'another cluster'} answered",
            why="sbatch may give a run to another cluster than the one whose limits plan checks and whose jobs status "
            "shows, or refuse it",
            fix=f"unset SLURM_CLUSTERS, or export SLURM_CLUSTERS={here or 'NAME'} before each command",
        )  # fmt: skip
    if controller.clock is not None:
        # Whole seconds, taken between the two times.
        skew = min(controller.clock + 1 - before, 0.0) + max(controller.clock - after, 0.0)
        if abs(skew) > _CLOCKS_S:
            yield broken(
                "clock", f"the controller's clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'} of this "
                "machine's",
                why="jobs may seem to end before they start, and time limits may seem to come at other times",
                fix="ask the site to set the clocks by NTP (timedatectl shows this machine's)",
            )  # fmt: skip
    limit = resource.getrlimit(resource.RLIMIT_CPU)[0]
    is_given = bool(controller.propagated_limits & {"ALL", "CPU"}) and "CPU" not in controller.kept_limits
    if is_given and limit != resource.RLIM_INFINITY:
        yield warning(
            "limits", f"this shell may use {limit:,} s of CPU, and Slurm gives jobs the same limit "
            "(PropagateResourceLimits)",
            why=f"the kernel kills a rank after {limit:,} s of CPU time of all its threads (SIGXCPU)",
            fix="ulimit -S -t unlimited before submit, or +cluster.sbatch.propagate=NONE",
        )  # fmt: skip


def _of_garbage(controller: Controller) -> Finding:
    shown = " ".join("".join(filter(str.isprintable, controller.said)).split())[:80]
    return broken(
        "slurm", "scontrol show config succeeded, but names neither ClusterName nor SLURM_VERSION: "
        f"{shown or 'it prints nothing'}",
        why="submit, status and the requeue of runs read its answers",
        fix="check which program it is, and what it prints: type -a scontrol; scontrol show config",
    )  # fmt: skip


# sbatch's variables that sites or users need for all their jobs -> the key that says the same.
_KEYS = {
    "SBATCH_ACCOUNT": "cluster.account",
    "SBATCH_RESERVATION": "cluster.sbatch.reservation",
    "SBATCH_WCKEY": "cluster.sbatch.wckey",
}


def _variables() -> Iterator[Finding]:
    """Yield a finding if the shell has options for sbatch: no run gets them."""
    if "SLURM_JOB_ID" in os.environ:  # they are those of the surrounding job
        return
    own = _own_defaults()
    given = {name: os.environ[name] for name, key in _KEYS.items() if os.environ.get(name) and key not in own}
    if given:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        lines = "; ".join(f"{_KEYS[name]}: {value}" for name, value in given.items())
        yield warning(
            "sbatch", f"this shell has {shown}, and hpc-trainer passes no such variable on",
            why="a run asks Slurm only for what its configuration says, so that it can be repeated; without an account "
            "sbatch may refuse it",
            fix=f"write into ~/.config/hpc_trainer/config.yaml: {lines}",
        )  # fmt: skip


def _architectures(nodes: list[Node]) -> Iterator[Finding]:
    here = platform.machine()
    if not nodes:
        yield ok("architecture", "Slurm shows this user no nodes, so theirs is unknown")
        return
    others = sorted({node.architecture for node in nodes if node.architecture not in (None, here)} - {None}, key=str)
    if not others:
        yield ok("architecture", f"this machine and all nodes are {here}")
        return
    count = sum(node.architecture in others for node in nodes)
    python = _own_python()
    if python is not None:
        yield ok("architecture", f"{count} nodes are {', '.join(map(str, others))}; runs use cluster.python={python}")
        return
    report = broken if count == len(nodes) else warning
    yield report(
        "architecture", f"this machine is {here}, and {count} of {len(nodes)} nodes are {', '.join(map(str, others))}",
        why="the Python that submits cannot start there: Exec format error",
        fix="make an environment on such a node (srun --pty bash), and name it: cluster.python=FOLDER/bin/python",
    )  # fmt: skip


def _own_python() -> str | None:
    value = _own_defaults().get("cluster.python")
    return str(value) if value else None


def _own_defaults() -> dict[str, Any]:
    try:
        return own_defaults()
    except HpcTrainerError:  # plan tells what is wrong with the file
        return {}


def _devices(nodes: list[Node]) -> Iterator[Finding]:
    build = torch_build()
    count = sum(node.has_gpus for node in nodes)
    if count and build is not None and build.cuda is None and build.hip is None and _own_python() is None:
        yield warning(
            "torch", f"torch {build.version} is built for {build.kind}, and {count} nodes have GPUs",
            why="runs on GPUs fail at their start",
            fix="install the build for the nodes' GPUs: https://pytorch.org/get-started/locally",
        )  # fmt: skip
