"""Steps at which a run of a search pauses: its first rung, and a file for each later step that it may train until.

The files are claimed (`files.claim`), so that of several processes that promote a run to a step exactly one does it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence

from hpc_trainer.record.files import claim, make_folder, to_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import seal

_UNTIL = re.compile(r"until-([0-9]{9,})\.json")


def promote(paths: RunPaths, step: int, number: int) -> bool:
    """Let a run train until `step`; return False if another process did so before.

    Args:
        paths: the run.
        step: the next rung, or the run's last step.
        number: number of results at the run's rung when it was chosen.
    """
    make_folder(paths.folder)
    record = {"until": step, "results": number, "time": time.time()}
    return claim(paths.until(step), f"{seal(to_json(record))}\n".encode())


def promotions(names: Collection[str]) -> list[int]:
    """Return the steps until which a run was let train, ascending, by the names in its folder."""
    return sorted(int(match[1]) for match in map(_UNTIL.fullmatch, names) if match is not None)


def pause_step(rungs: Sequence[int], names: Collection[str]) -> int | None:
    """Return the step at which a run must pause; None if it trains to its end.

    Args:
        rungs: the steps at which the run's trial pauses, ascending; empty for a run that never pauses. Each is less
            than the run's last step, to which a run is promoted from its last rung.
        names: the names in the run's folder.
    """
    step = max([*rungs[:1], *promotions(names)], default=None)
    return step if step in rungs else None
