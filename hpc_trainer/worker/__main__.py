"""`python -m hpc_trainer.worker`: what every task of a job runs."""

from __future__ import annotations

import os
import sys

from hpc_trainer.runtime.start import put_current_folder_last
from hpc_trainer.runtime.stop import StopFlag


def main(argv: list[str] | None = None) -> int:
    """Runs this rank to its end and returns the exit code."""
    stop = StopFlag()
    stop.install()
    # Only now what takes time to import: until the handlers stand, a stop signal kills this process.
    from hpc_trainer.worker.rank import run

    return run(argv, stop)


if __name__ == "__main__":
    put_current_folder_last()
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: everything is saved and closed by now, and a thread of torch or gloo that is still alive while
    # the interpreter is taken apart can abort the process, which Slurm would call FAILED.
    os._exit(exit_code)
