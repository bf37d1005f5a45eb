"""What `why` says of one run from its flight records."""

from __future__ import annotations

import dataclasses

from hpc_trainer.operate.inside.hang import join
from hpc_trainer.operate.why import Why
from hpc_trainer.runs.monitoring.flight import Flight, read_flights
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.status import RunStatus, SweepStatus

# After these attempts there is nothing to find: they ended as they should.
_AT_PEACE = (RunState.COMPLETED, RunState.CANCELLED)


def flights_of(status: SweepStatus, run: RunStatus) -> dict[int, Flight]:
    """The records of the newest attempt, by rank; {} where none was written, or another attempt is at work."""
    if not run.attempts or run.state in _AT_PEACE:
        return {}
    return read_flights(status.sweep.run(run.run_id), run.attempts[-1].attempt, status.faults)


def with_flights(why: Why, flights: dict[int, Flight]) -> Why:
    """The answer, with what the ranks did last before all else that it rests on."""
    joined = join(flights)
    if joined.says is None:
        return why
    return dataclasses.replace(why, evidence=[joined.says, *why.evidence])
