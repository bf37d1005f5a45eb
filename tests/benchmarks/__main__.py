"""`make bench`: runs every benchmark and prints one table each. Machine and versions stand on top."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import psutil

from hpc_trainer import __version__
from tests.benchmarks import (
    command_line,
    completion,
    frozen_code,
    grid,
    hydra_app,
    many_runs,
    reading,
    redaction,
    submission,
)

if __name__ == "__main__":
    print(
        f"hpc_trainer {__version__}, torch {version('torch')}, Python {platform.python_version()}, "
        f"{psutil.cpu_count()} CPUs, load {psutil.getloadavg()[0]:.1f} before the start"
    )
    command_line.run()
    completion.run()
    reading.run()
    many_runs.run()
    redaction.run()
    grid.run()
    frozen_code.run()
    rival = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else None
    submission.run(rival)
    hydra_app.run(rival)
    # Last, and imported here: a child's peak memory counts that of the process that started it, and torch is large.
    from tests.benchmarks import augment, checkpoint, images, logical, loop, pruned, records, resume, search, telemetry

    loop.run()
    augment.run()
    logical.run()
    checkpoint.run()
    resume.run()
    pruned.run()
    records.run()
    images.run()
    telemetry.run()
    search.run()
