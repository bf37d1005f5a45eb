"""Clocks of virtual nodes: the processes of their jobs see the host's time, some seconds ahead or behind (clock.c).

Slurm's daemons and munge keep the host's clock: what is played is a node whose clock is off for the programs that users
run there.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.slurm.testbed.spec import NODES, BedError, Spec

_SOURCE = Path(__file__).with_name("clock.c")
# slurmstepd runs it before each task, the batch script included, and sets in the task's environment what it prints as
# `export NAME=value` (slurm.conf(5), TaskProlog).
_PROLOG = """\
#!/bin/sh
case "$SLURMD_NODENAME" in
{cases}
esac
echo "export CLOCK_AHEAD_S=$ahead"
echo "export LD_PRELOAD={library}"
"""


def wanted(spec: Spec) -> bool:
    """Return True if the nodes of this cluster have clocks of their own."""
    return spec.share is not None and bool(spec.share.node_clocks_s)


def prolog(spec: Spec) -> Path:
    """Path of the task prolog that sets the clocks."""
    return spec.conf.parent / "task_prolog"


def ahead_s(spec: Spec, node: str) -> int:
    """Return how many seconds the clock of a node is ahead of the host's."""
    clocks = spec.share.node_clocks_s if spec.share else ()
    return clocks[NODES.index(node) % len(clocks)] if clocks else 0


def write(spec: Spec) -> None:
    """Build the library and write the task prolog."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise BedError("clocks of nodes need a C compiler: apt-get install gcc libc6-dev")
    library = spec.conf.parent / "clock.so"
    words = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BedError(f"{_SOURCE.name} does not compile: {done.stderr.strip()}")
    path = prolog(spec)
    cases = "\n".join(f"{node}) ahead={ahead_s(spec, node)} ;;" for node in NODES)
    path.write_text(_PROLOG.format(cases=cases, library=library))
    path.chmod(0o755)
