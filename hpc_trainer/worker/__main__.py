"""Program of every task of a job: `python -m hpc_trainer.worker`."""

from __future__ import annotations

import os
import sys

from hpc_trainer.runtime.start import put_current_folder_last
from hpc_trainer.runtime.stop import StopFlag


def main(argv: list[str] | None = None) -> int:
    """Run this rank to its end, and return the exit code."""
    stop = StopFlag()
    stop.install()
    # Slow imports come only now: until the handlers are installed, a stop signal kills this process.
    from hpc_trainer.worker.rank import run

    return run(argv, stop)


if __name__ == "__main__":
    put_current_folder_last()
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: everything is saved and closed by now, and a thread of torch or gloo that is still alive while
    # the interpreter shuts down can abort the process, which Slurm would call FAILED.
    os._exit(exit_code)
