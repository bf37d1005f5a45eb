"""Details of one run beyond `why`: its flight records, the end of its logs, its telemetry and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from hpc_trainer.operate.inside.hang import join
from hpc_trainer.operate.inside.page import Log, RunPage
from hpc_trainer.operate.logs import log_files
from hpc_trainer.operate.report.data import curves_of
from hpc_trainer.operate.report.telemetry import charts_of
from hpc_trainer.operate.why import Why, explain
from hpc_trainer.runs.beat import read_heartbeat
from hpc_trainer.runs.metrics_log import read_metrics
from hpc_trainer.runs.monitoring.flight import Flight, read_flights
from hpc_trainer.runs.reading import Faults, read_ends
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.status import RunStatus, SweepStatus

# States without anything to explain: the run ended as it should.
_AT_PEACE = (RunState.COMPLETED, RunState.CANCELLED)
# Seconds by which the clocks of two nodes may differ.
_CLOCKS_S = 30.0
_LOGS, _LOG_LINES, _LOG_BYTES = 16, 40, 64_000


def flights_of(status: SweepStatus, run: RunStatus) -> dict[int, Flight]:
    """Return the flight records of the newest attempt's end, by rank; {} if there are none or the run is well."""
    newest = run.attempts[-1] if run.attempts else None
    if newest is None or run.state in _AT_PEACE or (run.state.is_active and not newest.has_ended):
        return {}
    paths = status.sweep.run(run.run_id)
    flights = read_flights(paths, newest.attempt, status.faults_of(run.run_id))
    # A rank that was silent for long and then continued has left a record that does not describe the end.
    beat = float(read_heartbeat(paths.heartbeat, Faults()).get("time", 0.0))
    return {rank: flight for rank, flight in flights.items() if flight.time > beat - _CLOCKS_S}


def explain_hang(status: SweepStatus, run: RunStatus, flights: Mapping[int, Flight]) -> Why:
    """Return the explanation of `explain`, led by the joint reading of the flight records, with that rank's log."""
    joined = join(flights)
    why = explain(status, run, rank=joined.rank)
    return why if joined.says is None else dataclasses.replace(why, evidence=[joined.says, *why.evidence])


def gather_page(status: SweepStatus, run: RunStatus, why: Why, flights: Mapping[int, Flight]) -> RunPage:
    """Return the content of the run's page; files that cannot be read become notes on the page."""
    paths, faults = status.sweep.run(run.run_id), status.faults_of(run.run_id)
    newest = run.attempts[-1].attempt if run.attempts else 0
    files = [path for path in log_files(status, run, None) if path.name.startswith(f"attempt-{newest:03d}.")]
    return RunPage(
        why=why,
        flights=flights,
        logs=[Log(name=path.name, lines=_last_lines(path, faults)) for path in files[:_LOGS]],
        curves=curves_of(read_metrics(paths.metrics, faults)),
        telemetry=charts_of(status, run, of_attempt=newest, always_hosts=True),
        notes=[*status.faults],
    )


def _last_lines(path: Path, faults: Faults) -> list[str]:
    return read_ends(path, faults, last=_LOG_BYTES)[1].decode(errors="replace").splitlines()[-_LOG_LINES:]
