"""telemetry/attempt-000.move.json: why an attempt is to come back without one of its nodes. No torch.

Written by the rank whose device it is, before it asks for the stop: the file has one name, so that rank 0 finds it on a
shared file system by opening it. Of several ranks the last one's counts; the others' nodes have their turn later.
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
"""Of an attempt that ended so that its run leaves a node."""
MAX_MOVES = 3
"""Of a run, since a person submitted it: of four nodes in a row that are too hot the nodes are not the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One attempt's."""

    node: str
    """That Slurm must not give to the run again, by its name in Slurm."""
    cause: str
    """One of `CAUSES`."""
    why: str
    """A line for a person: `the GPU of rank 3 on n7 lowers its clocks (..)`."""
    time: float
    """When it was asked for, seconds since the epoch."""

    @classmethod
    def of(cls, warning: DeviceWarning) -> Move:
        """The move that a warning is the reason of."""
        cause = OVERHEATED if warning.trouble.is_heat else DEVICE_FAILED
        return cls(node=warning.node, cause=cause, why=warning.text, time=time.time())

    @property
    def text(self) -> str:
        """A line for a person."""
        return f"{self.cause}, it leaves {self.node}: {self.why}"


def write_move(paths: RunPaths, attempt: int, move: Move) -> None:
    """Replaces the file. Raises OSError."""
    write_json(paths.move(attempt), dataclasses.asdict(move), sync=False)


def read_move(paths: RunPaths, attempt: int, faults: Faults | None = None) -> Move | None:
    """That of an attempt; None if there is none, or it cannot be read."""
    return parsed_file(paths.move(attempt), lambda found: Move(**typed(found, _KINDS)), faults)


_KINDS: Kinds = {"node": as_text, "cause": as_text, "why": as_text, "time": as_time}
