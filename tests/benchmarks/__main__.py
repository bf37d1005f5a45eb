"""`make bench`: runs every benchmark and prints one table each. Machine and versions stand on top."""

from __future__ import annotations

import platform

import psutil
import torch

from hpc_trainer import __version__
from tests.benchmarks import command_line, loop

if __name__ == "__main__":
    print(
        f"hpc_trainer {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{psutil.cpu_count()} CPUs, load {psutil.getloadavg()[0]:.1f} before the start"
    )
    command_line.run()
    loop.run()
