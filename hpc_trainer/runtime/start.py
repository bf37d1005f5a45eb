"""How hpc_trainer starts Python: as `python -m MODULE`, but for the current folder, which `-m` puts first on the path.

A team may write the folder in which one submits: its numpy.py, or json.py, must not run as the person who did. `-P`
would do, but Python 3.10 has no such option, and which Python a job starts is known to the site alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# os and sys are loaded before the path is used. Python 3.11 starts anew with -P, which children of multiprocessing get
# handed on (13 ms of a core). Last come the current folder, also where PYTHONPATH names it by an
# empty entry, and folders of no environment that others may write: hpc_trainer itself may lie there. By then
# launch/frozen_code/frozen_worker.py is found where it is installed; it does the rest, with the path as it was.
START = (
    "import os, sys; sys.version_info < (3, 11) or sys.flags.safe_path or not sys.executable or "
    'os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]]); path = sys.path[:]; sys.path.append(""); '
    'sys.path.sort(key=lambda p: not p or os.path.isdir(p) and (os.path.samefile(p, ".") or '
    'os.stat(p).st_mode & 18 > 0 and "-packages" not in p and not p.startswith(sys.base_prefix))); '
    "from hpc_trainer.launch.frozen_code.frozen_worker import start; start(path)"
)
FROZEN_CODE = "HPC_TRAINER_FROZEN_CODE"
"""Set by that start where code is frozen: a JSON object, folder of the sources -> folder of the copy."""


def start_words(module: str) -> tuple[str, ...]:
    """What follows the name of a Python to run a module of ours; its arguments come after."""
    return ("-u", "-c", START, module)


def put_current_folder_last() -> None:
    """For a process that was begun by `python -m`: what it imports from now on is not the current folder's."""
    sys.path.sort(key=_is_current_folder)


def _is_current_folder(entry: str) -> bool:
    try:
        return not entry or Path(entry).samefile(os.curdir)
    except OSError:  # there is none, or nobody lets us look: Python passes over it, too
        return False
