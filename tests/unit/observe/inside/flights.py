"""Flight records by hand: a rank's collectives as numbers, the last of them open or not."""

from __future__ import annotations

from typing import Any

from hpc_trainer.observe.flight import Collective, Flight, FlightSpan

END = 1_700_000_000.0
GROUP = "default_pg (0)"


def entered(seq: int, *, is_open: bool = False, group: str = GROUP, **more: Any) -> Collective:
    """An all-reduce of 4.2 MB, half a second before or after the others."""
    values: dict[str, Any] = {
        "name": "all_reduce", "shape": "float[1048576]", "num_bytes": 4_194_304, "step": 41, "during": "step",
        "begin": END - 312 - 0.5 * (812 - seq), **more,
    }  # fmt: skip
    return Collective(group=group, seq=seq, is_open=is_open, **values)


def flight(rank: int, last: int, *, is_open: bool = False, kind: str = "step", world: int = 4, **more: Any) -> Flight:
    """A rank that has entered `last` collectives, and is in the last one if it is open."""
    spans = (
        FlightSpan(kind="start_up", begin=END - 900, end=END - 600),
        FlightSpan(kind=kind, begin=END - 312, end=None, step=40),
    )
    made = tuple(entered(seq, is_open=is_open and seq == last) for seq in range(max(1, last - 5), last + 1))
    values: dict[str, Any] = {
        "node": f"node0{rank}", "attempt": 0, "time": END, "why": "no sign of life for 312 s", "step": 40,
        "spans": spans, "collectives": made, "world_size": world, **more,
    }  # fmt: skip
    return Flight(rank=rank, **values)
