"""telemetry/attempt-000.move.json: why a run must restart without one of its attempt's nodes. No torch.

The rank with the faulty device writes the file before it asks for the stop. All ranks use one file name, so that rank 0
finds it on a shared file system by opening it. If several ranks write, the last file counts; the other nodes are left
at later restarts.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from hpc_trainer.runs.files import write_json
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.monitoring.warnings import DeviceWarning
from hpc_trainer.runs.reading import Faults, parsed_file
from hpc_trainer.runs.record_values import Kinds, as_text, as_time, typed

OVERHEATED, DEVICE_FAILED = "overheated", "device_failed"
CAUSES = frozenset((OVERHEATED, DEVICE_FAILED))
"""Causes of attempts that ended so that the run leaves a node."""
MAX_MOVES = 3
"""Largest number of moves since a user submitted the run: if four nodes in a row fail, the nodes are not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Move of a run away from one node, which one attempt asked for."""

    node: str
    """Slurm's name of the node that the run must not get again."""
    cause: str
    """One of `CAUSES`."""
    why: str
    """Line for the user, such as `the GPU of rank 3 on n7 lowers its clocks (..)`."""
    time: float
    """Time of the request, in seconds since the epoch."""

    @classmethod
    def of(cls, warning: DeviceWarning) -> Move:
        """Return the move that a warning causes."""
        cause = OVERHEATED if warning.trouble.is_heat else DEVICE_FAILED
        return cls(node=warning.node, cause=cause, why=warning.text, time=time.time())

    @property
    def text(self) -> str:
        """Line for the user: the cause, the node and the reason."""
        return f"{self.cause}, it leaves {self.node}: {self.why}"


def write_move(paths: RunPaths, attempt: int, move: Move) -> None:
    """Replace the file; raise OSError if the file system refused."""
    write_json(paths.move(attempt), dataclasses.asdict(move), sync=False)


def read_move(paths: RunPaths, attempt: int, faults: Faults | None = None) -> Move | None:
    """Return the move of an attempt; None if there is none, or it cannot be read."""
    return parsed_file(paths.move(attempt), lambda record: Move(**typed(record, _KINDS)), faults)


_KINDS: Kinds = {"node": as_text, "cause": as_text, "why": as_text, "time": as_time}
