"""What is known of one run besides `why`: its flight records, the end of its logs, its telemetry and metrics."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_trainer.operate.inside.hang import join
from hpc_trainer.operate.inside.page import Log, RunPage
from hpc_trainer.operate.logs import log_files
from hpc_trainer.operate.report.data import curves_of
from hpc_trainer.operate.why import Why
from hpc_trainer.runs.beat import read_heartbeat
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.metrics_log import read_metrics
from hpc_trainer.runs.monitoring.flight import Flight, read_flights
from hpc_trainer.runs.reading import Faults, is_number, list_folder, read_lines
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.status import RunStatus, SweepStatus

# After these attempts there is nothing to find: they ended as they should.
_AT_PEACE = (RunState.COMPLETED, RunState.CANCELLED)
# Clocks of two nodes may differ by so much.
_CLOCKS_S = 30.0
_LOGS, _LOG_LINES, _LOG_BYTES = 16, 40, 64_000
_POINTS = 200
# Title -> where it stands in a line of telemetry, its unit, and the factor to it.
_SERIES = {
    "GPU utilisation": ("device", "utilisation", "%", 100.0),
    "GPU memory": ("device", "memory_used", "GB", 1e-9),
    "GPU temperature": ("device", "temperature_c", "°C", 1.0),
    "GPU power": ("device", "power_w", "W", 1.0),
    "Busy cores": ("host", "cpus", "cores", 1.0),
    "Resident memory": ("host", "rss_bytes", "GB", 1e-9),
}  # fmt: skip


def flights_of(status: SweepStatus, run: RunStatus) -> dict[int, Flight]:
    """The records of how the newest attempt ended, by rank; {} where none was written, or where all goes well."""
    newest = run.attempts[-1] if run.attempts else None
    if newest is None or run.state in _AT_PEACE or (run.state.is_active and not newest.has_ended):
        return {}
    paths = status.sweep.run(run.run_id)
    found = read_flights(paths, newest.attempt, status.faults_of(run.run_id))
    # A rank that was silent for long, and went on after all, has left a record that is none of the end.
    beat = float(read_heartbeat(paths.heartbeat, Faults()).get("time", 0.0))
    return {rank: flight for rank, flight in found.items() if flight.time > beat - _CLOCKS_S}


def with_flights(why: Why, flights: Mapping[int, Flight]) -> Why:
    """The answer, with what the ranks did last before all else that it rests on."""
    joined = join(flights)
    if joined.says is None:
        return why
    return dataclasses.replace(why, evidence=[joined.says, *why.evidence])


def gather_page(status: SweepStatus, run: RunStatus, why: Why, flights: Mapping[int, Flight]) -> RunPage:
    """All of it, for the page. What cannot be read is a note on it."""
    paths, faults = status.sweep.run(run.run_id), status.faults_of(run.run_id)
    newest = run.attempts[-1].attempt if run.attempts else 0
    files = [each for each in log_files(status, run, None) if each.name.startswith(f"attempt-{newest:03d}.")]
    return RunPage(
        why=why,
        flights=flights,
        logs=[Log(name=each.name, lines=_last_lines(each)) for each in files[:_LOGS]],
        curves=curves_of(read_metrics(paths.metrics, faults)),
        telemetry=_telemetry(paths, newest, faults),
        notes=[*status.faults],
    )


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror or error}"]


def _telemetry(
    paths: RunPaths, attempt: int, faults: Faults
) -> dict[str, tuple[str, dict[int, list[tuple[float, float]]]]]:
    """What the newest attempt's files in telemetry/ say."""
    folder = paths.folder / "telemetry"
    name = re.compile(rf"attempt-{attempt:03d}\.rank-(\d{{1,6}})\.jsonl")
    found: dict[str, tuple[str, dict[int, list[tuple[float, float]]]]] = {}
    matches = (match for each in list_folder(folder, faults) or () if (match := name.fullmatch(each)))
    for rank, file in sorted((int(match[1]), match.string) for match in matches):
        for title, point in _points(folder / file, faults):
            ranks = found.setdefault(title, (_SERIES[title][2], {}))[1]
            ranks.setdefault(rank, []).append(point)
    first = min((points[0][0] for _, ranks in found.values() for points in ranks.values()), default=0.0)
    return {
        title: (unit, {rank: _thinned(points, first) for rank, points in ranks.items()})
        for title, (unit, ranks) in sorted(found.items(), key=lambda item: [*_SERIES].index(item[0]))
    }


def _points(path: Path, faults: Faults) -> Iterator[tuple[str, tuple[float, float]]]:
    for record in read_lines(path, faults):
        for title, (part, key, _, factor) in _SERIES.items():
            values = record.get(part)
            value = values.get(key) if isinstance(values, dict) else None
            if is_number(record.get("time")) and is_number(value):
                yield title, (float(record["time"]), factor * float(value))  # type: ignore[arg-type]


def _thinned(points: list[tuple[float, float]], first: float) -> list[tuple[float, float]]:
    step = -(-len(points) // _POINTS)
    return [((time - first) / 60, value) for time, value in points[::step]]
