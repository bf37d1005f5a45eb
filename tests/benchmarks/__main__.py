"""`make bench`: runs every benchmark and prints one table each. Machine and versions stand on top."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import psutil
import torch

from hpc_trainer import __version__
from tests.benchmarks import command_line, frozen_code, grid, loop, submission

if __name__ == "__main__":
    print(
        f"hpc_trainer {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{psutil.cpu_count()} CPUs, load {psutil.getloadavg()[0]:.1f} before the start"
    )
    command_line.run()
    grid.run()
    frozen_code.run()
    submission.run(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else None)
    loop.run()
