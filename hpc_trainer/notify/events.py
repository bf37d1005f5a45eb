"""Events of a sweep at the end of one of its runs. Each is claimed by a file that can be created only once.

SWEEP/notify/ended/RUN_ID     one for each run that has ended: its state
SWEEP/notify/failed, stalled, done-DIGEST, best-RUN_ID     claims
SWEEP/notify/best.json        the best value so far
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.output import NotifyConfig, compared_by, is_best_small
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.domains import contributions
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.record.files import claim, make_folder, write_atomic, write_json
from hpc_trainer.record.journal import Journal, first_line, read_result
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import is_finite, is_number, is_there, names_in, read_json
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.states import CANCEL, DONE, RunState
from hpc_trainer.runtime.start import start_words

_SENDER = "hpc_trainer.notify.send"
_START_S = 10.0
"""Seconds for a child process to start, besides its waits: Python may be on a shared file system."""
_STALLED = ("stuck", "no_progress", "low_goodput")
_MOST_LOOKED_AT = 100
Event = dict[str, Any]


def at_end(config: TrainConfig, paths: RunPaths, state: RunState, cause: str | None, error: Mapping[str, Any]) -> None:
    """Send the events that follow from the end of this run. Never raises, and takes a bounded time.

    Args:
        config: configuration of the run.
        paths: the run's folder.
        state: the recorded state; nothing restarts the run by itself.
        cause: the recorded cause.
        error: the recorded error; {} without one.
    """
    notify = config.notify
    if notify.command is None and notify.webhook_env is None:
        return
    try:
        events = [event for event in _events(config, paths, state, cause, error) if event["event"] in notify.events]
        for event in events:
            _send(notify, event)
    except (OSError, HpcTrainerError, ValueError) as failure:
        print(f"nobody was notified: {type(failure).__name__}: {failure}", flush=True)


def forget_ends(sweep: SweepPaths, run_ids: Sequence[str]) -> None:
    """Forget events of a sweep and ends of runs that are submitted again, so that the next ones are reported."""
    for name in names_in(sweep.notify) or ():
        if name in ("failed", "stalled") or name.startswith("done-"):
            (sweep.notify / name).unlink(missing_ok=True)
    ended = sweep.notify / "ended"
    for run_id in {*run_ids}.intersection(names_in(ended) or ()):
        (ended / run_id).unlink(missing_ok=True)


def _events(
    config: TrainConfig, paths: RunPaths, state: RunState, cause: str | None, error: Mapping[str, Any]
) -> list[Event]:
    """Return the events that this end claims, the most important last."""
    sweep = SweepPaths(paths.folder.parent)
    folder = sweep.notify
    make_folder(folder / "ended")
    if state is not RunState.PAUSED:
        write_atomic(folder / "ended" / paths.run_id, f"{state.value}\n", sync=False)
    event = {"sweep": sweep.name, "run_id": paths.run_id, "state": state.value, "cause": cause, "time": time.time()}
    message = first_line(error)[:500]
    events: list[Event] = []
    if state.has_failed and cause in _STALLED and "stalled" in config.notify.events and claim(folder / "stalled"):
        events.append(event | {"event": "stalled", "text": f"{paths.run_id} stalled ({cause}). {message}".strip()})
    if state.has_failed and "failed" in config.notify.events and claim(folder / "failed"):
        text = f"the first run failed: {paths.run_id} ({cause}). {message}".strip()
        events.append(event | {"event": "failed", "text": text})
    if state is RunState.COMPLETED and "best" in config.notify.events and (best := _best(config, paths, folder)):
        events.append(event | {"event": "best", **best})
    if "done" in config.notify.events and (counts := _done(sweep, folder)) is not None:
        told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        events.append(event | {"event": "done", "counts": counts, "text": f"the sweep is done: {told}"})
    return events


def _best(config: TrainConfig, paths: RunPaths, folder: Path) -> Event | None:
    """Return the text and the value if this run is better than all runs completed before; else None."""
    metrics = read_result(paths.result).get("metrics") or {}
    own = config.notify.metric
    name = own if own in metrics else compared_by(config.checkpoint, metrics)
    if name is None or not is_finite(metrics[name]):
        return None
    value, before = float(metrics[name]), read_json(folder / "best.json") or {}
    best_before = before.get("value") if before.get("metric") == name and is_number(before.get("value")) else None
    if best_before is not None and not (
        value < best_before if is_best_small(config.checkpoint, name) else value > best_before
    ):
        return None
    write_json(folder / "best.json", {"metric": name, "value": value, "run_id": paths.run_id})
    if best_before is None or not claim(folder / f"best-{paths.run_id}"):  # the first to complete is no news
        return None
    text = f"a new best: {name}={value:.6g} ({paths.run_id}), before {best_before:.6g}"
    return {"metric": name, "value": value, "before": best_before, "text": text}


def _done(sweep: SweepPaths, folder: Path) -> dict[str, int] | None:
    """Return state -> number of runs if the newest grid or search has ended and this call is the first to see it."""
    for states_of in contributions("search_ends"):
        at_end = states_of(sweep)
        if at_end is not None:
            return dict(at_end) if at_end and claim(folder / "done-search") else None
    run_ids = (read_json(sweep.sweep) or {}).get("run_ids")
    wanted = {run_id for run_id in run_ids if isinstance(run_id, str)} if isinstance(run_ids, list) else set[str]()
    look_anew(folder / "ended")
    ended = names_in(folder / "ended") or []
    missing = wanted.difference(ended)
    if not wanted or len(missing) > _MOST_LOOKED_AT:
        return None
    states = {run_id: _state_of(sweep.run(run_id)) for run_id in sorted(missing)}
    if None in states.values():
        return None
    digest = hashlib.sha256("\n".join(sorted(wanted)).encode()).hexdigest()[:12]
    if not claim(folder / f"done-{digest}"):
        return None
    counts = Counter(state for state in states.values() if state is not None)
    for run_id in wanted.intersection(ended):
        counts[(folder / "ended" / run_id).read_text(errors="replace").strip()[:20] or "UNKNOWN"] += 1
    return dict(counts)


def _state_of(paths: RunPaths) -> str | None:
    """Return the state of a run without a file here: complete, cancelled or failed before; None if it has not ended."""
    for marker, state in ((DONE, RunState.COMPLETED), (CANCEL, RunState.CANCELLED)):
        if is_there(paths.marker(marker)):
            return state.value
    attempts = Journal(paths).read()
    newest = attempts[-1] if attempts else None
    is_over = newest is not None and newest.has_ended and newest.state is not None and newest.state.has_failed
    return newest.state.value if is_over and newest is not None and newest.state is not None else None


def _send(notify: NotifyConfig, event: Event) -> None:
    """Send an event by every channel in a child process, which is killed with all that it started if it takes long."""
    order = {
        "event": event, "command": notify.command, "webhook_env": notify.webhook_env, "shape": notify.shape.value,
        "timeout_s": notify.timeout_s,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *start_words(_SENDER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    limit_s = notify.timeout_s * (2 if notify.command is not None and notify.webhook_env is not None else 1)
    try:
        said, _ = process.communicate(json.dumps(order).encode(), timeout=limit_s + _START_S)
    except subprocess.TimeoutExpired:
        said = b"it took too long and was ended"
    finally:
        _end(process)
    text = said.decode(errors="replace").strip()
    print(f"notified of {event['event']}{': ' + text if text else ''}.", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the processes that it started, if any are left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    process.wait()
