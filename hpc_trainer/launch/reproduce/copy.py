"""Copy of a run: the same configuration and original code, logged at each step, in its own sweep."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import plain_value
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.tracker import TrackerConfig
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch.change import change_specs
from hpc_trainer.launch.freeze import grid_of_specs
from hpc_trainer.launch.frozen_code.archive import archive_of
from hpc_trainer.launch.frozen_code.frozen_worker import manifest_digest, read_archive
from hpc_trainer.launch.frozen_code.snapshot import Snapshot
from hpc_trainer.launch.frozen_code.unpacking import RefusedCodeError
from hpc_trainer.launch.plan import build_plan
from hpc_trainer.launch.submit import submit_plan
from hpc_trainer.runs.files import check_trusted
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.lock import submit_lock
from hpc_trainer.runs.modes import make_folder, set_umask
from hpc_trainer.runs.spec import RunSpec
from hpc_trainer.slurm.read_limits import read_limits

_EXECUTOR = "cluster.executor="


def copy_of(spec: RunSpec, sweep: SweepPaths, words: Sequence[str], *, may_differ: bool = False) -> RunSpec:
    """Return the spec of the copy; it has the run's identity unless `may_differ`.

    Args:
        words: overrides of `cluster.*` and `hardware.*`. With `cluster.executor=slurm` the copy runs on Slurm, without
            it on this machine.
        may_differ: allow hardware changes that affect results: other ranks, another kind of device.

    Raises:
        ConfigError: an override is wrong, or turns the run into another one.
    """
    executors = [word.partition("=")[2] for word in words if word.startswith(_EXECUTOR)] or [Executor.local.value]
    if executors[-1] not in [executor.value for executor in Executor]:
        raise ConfigError(
            f"{_EXECUTOR}{executors[-1]} must be one of {', '.join(executor.value for executor in Executor)}."
        )
    changes = [word for word in words if not word.startswith(_EXECUTOR)]
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
        raise RunStateError(f"the frozen code {source} is gone: without it this is another program. Restore the file.")
    check_trusted(source)
    try:
        manifest, _ = read_archive(source)
    except RefusedCodeError as error:
        raise RunStateError(f"{error}: nobody knows what the run imported. Restore the file.") from error
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
    numbers = (number for number in range(1, 10_000) if not Path(folder, f"{run_id}-{number}").exists())
    return SweepPaths(folder / f"{run_id}-{next(numbers)}")
