"""One `submit` at a time for a sweep, without flock: O_EXCL works on every file system that clusters use."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from hpc_trainer.errors import SubmitError
from hpc_trainer.runs.files import read_json
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.local_process import is_alive, process_name

# A submit takes seconds; sbatch may block for minutes under load. On another host we cannot look, so we wait.
_EXPIRY_S = 900.0


@contextlib.contextmanager
def submit_lock(paths: SweepPaths) -> Iterator[None]:
    """Holds the sweep for this process; a lock whose holder died is taken over.

    Raises:
        SubmitError: another process holds it; says which.
    """
    paths.folder.mkdir(parents=True, exist_ok=True)
    name = process_name()
    for _ in range(2):
        try:
            descriptor = os.open(paths.lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            break
        except FileExistsError:
            _remove_if_dead(paths)
    else:
        raise SubmitError(f"another submit took {paths.lock} at the same moment. Try again.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f'{{"holder": "{name}", "time": {time.time()}}}\n')
        yield
    finally:
        if (read_json(paths.lock) or {}).get("holder", name) == name:  # else it was taken over from us
            paths.lock.unlink(missing_ok=True)


def _remove_if_dead(paths: SweepPaths) -> None:
    held = read_json(paths.lock) or {}
    holder = str(held.get("holder", ""))
    try:
        age = time.time() - float(held.get("time", paths.lock.stat().st_mtime))
    except FileNotFoundError:
        return  # released in this moment
    alive = is_alive(holder) if holder else (None if age < 5 else False)
    if alive or (alive is None and age < _EXPIRY_S):
        raise SubmitError(
            f"another submit works on {paths.name}: {holder or 'unknown'}, for {age:.0f} s. Wait for it, or, if you "
            f"know it is gone, remove {paths.lock}."
        )
    _remove_if_still(paths, held)


def _remove_if_still(paths: SweepPaths, held: dict[str, Any]) -> None:
    """Removes the lock if it is still the dead holder's: another submit may have taken it over a moment ago."""
    aside = paths.lock.with_name(f".{paths.lock.name}.{os.getpid()}")
    try:
        paths.lock.rename(aside)
    except FileNotFoundError:
        return
    is_still = (read_json(aside) or {}) == held
    if not is_still:
        with contextlib.suppress(FileExistsError):
            os.link(aside, paths.lock)  # give it back
    aside.unlink()
    if not is_still:
        raise SubmitError(f"another submit took {paths.lock} at the same moment. Try again.")
