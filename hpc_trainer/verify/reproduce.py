"""`hpc-trainer verify reproduce`: follow the copy of a run, end it after the last compared step, and compare both.

The lines of the two metrics.jsonl are compared side by side: the first step at which they differ, and in what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.errors import RunStateError
from hpc_trainer.operate.cancel import cancel_runs
from hpc_trainer.record.environment import Difference, differences, first_environment, nodes, read_environment
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.metrics import SPEED, read_metrics
from hpc_trainer.record.reading import Faults, check_trusted
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import RunStatus, read_status
from hpc_trainer.verify.own_runs import await_run, end_local, raise_failure

# Measured metrics, not computed ones: they never repeat exactly.
_MEASURED_ENDINGS = ("_s", "_gb", "_bytes", "_share", "_per_s", "_ms")
_MEASURED = frozenset(("step", "time", *SPEED))


@dataclass(frozen=True, slots=True)
class Deviation:
    """A metric that two runs logged with different values at a step."""

    step: int
    name: str
    was: float | None
    now: float | None

    @property
    def relative(self) -> float | None:
        """|now - was| / |was|; None if this is not a finite number."""
        if self.was is None or self.now is None or not self.was:
            return None
        change = abs(self.now - self.was) / abs(self.was)
        return change if math.isfinite(change) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Metrics of two runs at the steps that both logged."""

    steps: tuple[int, ...]
    """Steps that were compared, in order."""
    names: tuple[str, ...]
    """Metrics that were compared."""
    deviations: tuple[Deviation, ...]
    """Deviations in the order of steps; the loss comes before other metrics."""
    missing: tuple[int, ...]
    """Steps that the first run logged and the second run did not."""

    @property
    def is_identical(self) -> bool:
        """True if something was compared, and all of it is the same."""
        return bool(self.steps) and not self.deviations and not self.missing


def lines_by_step(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float | None]]:
    """Return the computed metrics of each step; if a step was logged again, its last value counts."""
    by_step: dict[int, dict[str, float | None]] = {}
    for record in records:
        kept = {name: value for name, value in record.items() if not is_measured(name)}
        by_step.setdefault(record["step"], {}).update(kept)
    return {step: values for step, values in sorted(by_step.items()) if values}


def is_measured(name: str) -> bool:
    """Return True for a measured metric (speed, memory, time), False for a computed one."""
    return name in _MEASURED or name.endswith(_MEASURED_ENDINGS) or name.startswith(("memory", "gpu_", "step_time"))


def last_step(records: Sequence[Mapping[str, Any]], wanted: int) -> int | None:
    """Return the last logged step up to `wanted`, else the first logged step after it; None if no step was logged."""
    steps = list(lines_by_step(records))
    within = [step for step in steps if step <= wanted]
    return within[-1] if within else next(iter(steps), None)


def compare(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], last: int) -> Comparison:
    """Compare the steps up to `last` that the first run logged, bit for bit.

    A metric that only one of the two runs logged at a step is not a deviation: the second run logs every step, and
    evaluates by the same rule.
    """
    before, after = lines_by_step(was), lines_by_step(now)
    wanted = [step for step in before if step <= last]
    steps = [step for step in wanted if step in after]
    names: dict[str, None] = {}
    deviations = []
    for step in steps:
        shared = [name for name in before[step] if name in after[step]]
        names |= dict.fromkeys(shared)
        unlike = [name for name in shared if not _same(before[step][name], after[step][name])]
        deviations += [
            Deviation(step, name, before[step][name], after[step][name])
            for name in sorted(unlike, key=lambda name: (name != "loss", name))
        ]
    return Comparison(
        steps=tuple(step for step in steps if before[step].keys() & after[step].keys()), names=tuple(names),
        deviations=tuple(deviations), missing=tuple(step for step in wanted if step not in after),
    )  # fmt: skip


def _same(one: float | None, other: float | None) -> bool:
    """Return True if two values are equal; NaN equals NaN, because a run may diverge the same way twice."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


_POLL_S, _SLURM_POLL_S = 0.2, 10.0


@dataclass(slots=True, kw_only=True)
class Original:
    """Run that is to be reproduced."""

    paths: RunPaths
    attempt: int | None
    """Attempt whose environment was recorded; None if no attempt has a record."""
    environment: dict[str, Any] | None
    last: int
    """Last step that is compared."""


@dataclass(slots=True, kw_only=True)
class Reproduced:
    """Result of a reproduction."""

    run_id: str
    comparison: Comparison
    differences: list[Difference] = field(default_factory=list)
    is_recorded: bool = True
    """False if the environment of a run is not known: then only metrics were compared."""
    gpus: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    """UUIDs of the devices of the original and of the copy, in the order of nodes."""


def original_of(paths: RunPaths, steps: int, *, is_program: bool) -> Original:
    """Return the last step to compare and the recorded environment of a run.

    Args:
        paths: the run.
        steps: number of first steps to compare.
        is_program: True if the run is a program of the user.

    Raises:
        RunStateError: the run logged nothing, or its record is damaged.
    """
    records = read_metrics(paths.metrics)
    last = last_step(records, steps)
    if last is None:
        reason = (
            "it is a program of its own that told no metrics (docs/any_program.md says how: hpc_trainer.log_metrics)"
            if is_program
            else "it has logged no step"
        )
        raise RunStateError(f"{paths.run_id} has nothing to compare with: {reason}.")
    recorded = first_environment(paths, len(Journal(paths).read()))
    attempt, environment = recorded if recorded is not None else (None, None)
    return Original(paths=paths, attempt=attempt, environment=environment, last=last)


def check_record(original: Original) -> None:
    """Refuse a record that others may have changed: hpc-trainer restores code from the record and runs it.

    Raises:
        UntrustedFileError: others may have changed the record.
    """
    if original.attempt is not None:
        for path in (original.paths.folder, original.paths.logs, original.paths.environment(original.attempt)):
            check_trusted(path)


def follow(
    original: Original, sweep: SweepPaths, start: Callable[[], object], *, is_local: bool, timeout_s: float,
    say: Callable[[str], None] = lambda _: None,
) -> Reproduced:  # fmt: skip
    """Start the copy, wait for its step `original.last`, end it, and compare. No process is left.

    Raises:
        ConfigError, RunStateError: the copy failed, or did not reach the step in `timeout_s` seconds.
    """
    run_id = original.paths.run_id
    copy = sweep.run(run_id)
    try:
        start()
        _await_step(original, sweep, timeout_s, _POLL_S if is_local else _SLURM_POLL_S)
    except RunStateError as error:
        now = read_environment(copy, 0, Faults())
        unlike = differences(original.environment, now) if original.environment and now else []
        if not unlike:
            raise
        raise RunStateError(f"{error} It ran with: {'; '.join(map(str, unlike[:5]))}.") from error
    finally:
        _end(sweep, run_id, is_local=is_local)
    say(f"step {original.last} is done")
    comparison = compare(read_metrics(original.paths.metrics), read_metrics(copy.metrics), original.last)
    return _with_environment(Reproduced(run_id=run_id, comparison=comparison), original, copy)


def _with_environment(found: Reproduced, original: Original, copy: RunPaths) -> Reproduced:
    now = read_environment(copy, 0, Faults())
    if original.environment is None or now is None or original.attempt is None:
        found.is_recorded = False
        return found
    found.differences = differences(original.environment, now)
    found.gpus = (_gpus(original.paths, original.attempt), _gpus(copy, 0))
    return found


def _gpus(paths: RunPaths, attempt: int) -> list[str]:
    return [str(device.get("uuid")) for node in nodes(paths, attempt) for device in node.get("devices") or ()]


def _await_step(original: Original, sweep: SweepPaths, timeout_s: float, poll_s: float) -> None:
    run_id, last = original.paths.run_id, original.last
    metrics = sweep.run(run_id).metrics

    def is_past(_: RunStatus) -> bool:
        records = read_metrics(metrics)
        return bool(records) and records[-1]["step"] > last

    run = await_run(sweep, run_id, timeout_s, is_past, what=f"the copy had not done step {last}", poll_s=poll_s)
    is_over = not run.state.is_active and run.state is not RunState.COMPLETED
    if is_over and not is_past(run) and last_step(read_metrics(metrics), last) != last:
        raise_failure(sweep, run)


def _end(sweep: SweepPaths, run_id: str, *, is_local: bool) -> None:
    if is_local:
        end_local([sweep])
        return
    if not sweep.exists:
        return
    status = read_status(sweep)
    if status.run(run_id).state.is_active:
        cancel_runs(status, [status.run(run_id)])
