"""How a rank that a test started ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """Ends this process well, as `hpc_trainer.worker` does.

    A thread of gloo that still holds something of Python while the interpreter is taken apart can abort the process
    ("terminate called without an active exception", exit -6: seen once, on a busy machine).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
