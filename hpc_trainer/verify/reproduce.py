"""`hpc-trainer verify reproduce`: a copy of a run, started with the run's code, and the comparison of their metrics.

The copy has the same configuration, logs each step, and is in a sweep of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import plain_value
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.output import TrackerConfig
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch.extend import change_specs
from hpc_trainer.launch.freeze import grid_of_specs
from hpc_trainer.launch.frozen_code.archive import archive_of
from hpc_trainer.launch.frozen_code.frozen_worker import manifest_digest, read_archive
from hpc_trainer.launch.frozen_code.snapshot import Snapshot
from hpc_trainer.launch.frozen_code.unpacking import RefusedCodeError
from hpc_trainer.launch.plan import build_plan
from hpc_trainer.launch.submit import submit_plan
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.environment import Difference, differences, first_environment, nodes, read_environment
from hpc_trainer.record.files import make_folder, set_umask
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.processes import submit_lock
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.trust import check_trusted
from hpc_trainer.slurm.limits import read_limits
from hpc_trainer.verify.compare_metrics import Comparison, compare, last_step
from hpc_trainer.verify.own_runs import await_run, end_local, raise_failure

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
            "it is a program of its own that reported no metrics (docs/any_program.md says how: "
            "hpc_trainer.log_metrics)"
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


def _with_environment(reproduced: Reproduced, original: Original, copy: RunPaths) -> Reproduced:
    now = read_environment(copy, 0, Faults())
    if original.environment is None or now is None or original.attempt is None:
        reproduced.is_recorded = False
        return reproduced
    reproduced.differences = differences(original.environment, now)
    reproduced.gpus = (_gpus(original.paths, original.attempt), _gpus(copy, 0))
    return reproduced


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


_EXECUTOR = "cluster.executor="


def copy_of(spec: RunSpec, sweep: SweepPaths, overrides: Sequence[str], *, may_differ: bool = False) -> RunSpec:
    """Return the spec of the copy; it has the run's identity unless `may_differ`.

    Args:
        overrides: overrides of `cluster.*` and `hardware.*`. With `cluster.executor=slurm` the copy runs on Slurm,
            otherwise on this machine.
        may_differ: allow hardware changes that affect results: other ranks, another kind of device.

    Raises:
        ConfigError: an override is wrong, or turns the run into another one.
    """
    executors = [word.partition("=")[2] for word in overrides if word.startswith(_EXECUTOR)] or [Executor.local.value]
    if executors[-1] not in [executor.value for executor in Executor]:
        raise ConfigError(
            f"{_EXECUTOR}{executors[-1]} must be one of {', '.join(executor.value for executor in Executor)}."
        )
    changes = [word for word in overrides if not word.startswith(_EXECUTOR)]
    if changes:
        spec = change_specs([spec], changes, may_differ=may_differ)[0]
    config: dict[str, Any] = {
        **spec.config,
        "cluster": {**spec.config["cluster"], "executor": executors[-1]},
        "monitor": {**spec.config["monitor"], "log_every_steps": 1},
        "tracker": plain_value(TrackerConfig()),
        "paths": {**spec.config["paths"], "runs_dir": str(sweep.folder.parent)},
        "sweep_name": sweep.name,
    }
    return dataclasses.replace(spec, config=config, digest=config_digest(config))


def take_archive(digest: str, was: SweepPaths, now: SweepPaths) -> tuple[str, frozenset[str]]:
    """Copy the frozen code of a run into the sweep of its copy.

    Args:
        digest: at least the first 12 digits of the code's digest.

    Returns:
        The code's digest (64 hex digits), and the packages in the code.

    Raises:
        RunStateError: the code is gone or was changed.
        UntrustedFileError: others may have changed the code.
    """
    source = archive_of(was, digest)
    if not source.exists():
        raise RunStateError(
            f"the frozen code {source} is gone: without it the copy would be another program. Restore the file."
        )
    check_trusted(source)
    try:
        manifest, _ = read_archive(source)
    except RefusedCodeError as error:
        raise RunStateError(f"{error}: the imports of the run are unknown. Restore the file.") from error
    make_folder(now.folder)
    make_folder(now.code)
    shutil.copy(source, archive_of(now, digest))
    archive_of(now, digest).chmod(0o444)
    return manifest_digest(manifest), frozenset(name for root in manifest["roots"] for name in root["packages"])


def start_copy(
    spec: RunSpec, sweep: SweepPaths, *, digest: str | None, code: Snapshot | None, command_line: Sequence[str]
) -> list[str]:
    """Submit the copy and return the ids of its jobs.

    Args:
        digest: digest of the code that the copy starts from; None: the installed code.
        code: that code, if it is not in the sweep's folder yet.

    Raises:
        ConfigError, SubmitError, SlurmError: as in a submit.
    """
    grid = grid_of_specs(sweep, [spec])
    set_umask(grid.group_readable)
    with submit_lock(sweep) as lock:
        limits = read_limits(with_nodes=True) if grid.executor is Executor.slurm else None
        plan = dataclasses.replace(build_plan(grid, limits=limits), code=digest)
        return [array.job_id for array in submit_plan(plan, command_line=command_line, code=code, lock=lock).arrays]


def place_of(was: SweepPaths, run_id: str) -> SweepPaths:
    """Return an unused sweep folder for the copy, as an absolute path.

    The folder is inside the folder of the run's sweep, so that no command treats it as one of the user's own sweeps.
    """
    folder = was.folder.absolute() / "reproduced"
    numbers = (number for number in itertools.count(1) if not Path(folder, f"{run_id}-{number}").exists())
    return SweepPaths(folder / f"{run_id}-{next(numbers)}")
