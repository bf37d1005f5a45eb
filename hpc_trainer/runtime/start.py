"""Start of Python by hpc_trainer: like `python -m MODULE`, but without the current folder first on the path.

A team may be able to write the folder in which a user submits: a numpy.py or json.py in it must not run as that user.
`-P` would do, but Python 3.10 has no such option, and only the site knows which Python a job starts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# os and sys are loaded before the path is used. Python 3.11 restarts itself with -P, which children of multiprocessing
# inherit (13 ms of a core). Then the current folder, also if PYTHONPATH names it by an empty entry, is moved to the end
# of the path. So are folders that others may write and that belong to no environment: hpc_trainer itself may be there.
# Then launch/frozen_code/frozen_worker.py is found where it is installed; it does the rest, with the original path.
START = (
    "import os, sys; sys.version_info < (3, 11) or sys.flags.safe_path or not sys.executable or "
    'os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]]); path = sys.path[:]; sys.path.append(""); '
    'sys.path.sort(key=lambda p: not p or os.path.isdir(p) and (os.path.samefile(p, ".") or '
    'os.stat(p).st_mode & 18 > 0 and "-packages" not in p and not p.startswith(sys.base_prefix))); '
    "from hpc_trainer.launch.frozen_code.frozen_worker import start; start(path)"
)
FROZEN_CODE = "HPC_TRAINER_FROZEN_CODE"
"""Variable that this start sets if code is frozen: a JSON object, folder of the sources -> folder of the copy."""


def start_words(module: str) -> tuple[str, ...]:
    """Return the arguments of Python that run a module of hpc_trainer; the module's own arguments come after them."""
    return ("-u", "-c", START, module)


def put_current_folder_last() -> None:
    """Move the current folder to the end of the path, in a process that was started by `python -m`."""
    sys.path.sort(key=_is_current_folder)


def _is_current_folder(entry: str) -> bool:
    try:
        return not entry or Path(entry).samefile(os.curdir)
    except OSError:  # missing or not readable: Python skips it, too
        return False
