"""Python API for notebooks and scripts: `hpc_trainer.plan(...)`, `submit(...)` and `sync(...)`.

The functions take the overrides of the command line and return typed objects. `plan` writes nothing. `submit` submits
new and interrupted runs; calling it again submits no run twice. `sync` sends trackers the records that they lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.launch.extend import extend_grid
from hpc_trainer.launch.freeze import Grid, freeze_grid
from hpc_trainer.launch.grids import Submitted, plan_grid, submit_grid
from hpc_trainer.launch.hydra_app import freeze_app, read_app
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.operate.find import configured_runs_dir
from hpc_trainer.operate.sync import SyncResult, sync_named, tracker_named


def plan(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False, extend: bool = False, app: str | None = None,
) -> SweepPlan:  # fmt: skip
    """Return what `submit` with the same arguments would do, and write nothing. `changed` lists runs with changed code.

    Args:
        overrides: overrides as on the command line: `"experiment=digits"`, `"optim.lr=1e-3,3e-3"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: plan failed runs too.
        fresh: plan all runs, as if none existed yet.
        extend: start from the ends of runs with fewer train.num_steps. Otherwise `twins` lists runs that could do so.
        app: a Hydra app and its overrides, as after `--app`: `"train.py model=a,b lr=1e-3"`.

    Raises:
        ConfigError: a point of the grid is not valid. `problems` lists what the cluster would refuse; `notes` says
            if the cluster does not answer.
    """
    grid = _frozen(overrides, config_dirs, trust, app, extend=extend)
    return plan_grid(grid, retry_failed=retry_failed, fresh=fresh)


def submit(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False, extend: bool = False, app: str | None = None,
) -> Submitted:  # fmt: skip
    """Submit the new and interrupted runs of a grid; return at once. A repeated call is safe.

    Args:
        overrides: overrides as on the command line: `"experiment=digits"`, `"optim.lr=1e-3,3e-3"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: submit failed runs again; they resume from their newest checkpoint.
        fresh: start all runs from the beginning; their present folders are set aside.
        extend: start from the ends of runs with fewer train.num_steps.
        app: a Hydra app and its overrides, as after `--app`: `"train.py model=a,b lr=1e-3"`.

    Raises:
        ConfigError: a point of the grid is not valid, or the cluster would refuse it; nothing was written.
        RunStateError: `fresh` is set and one of the runs is running or pending.
        SubmitError: the scheduler refused an array, or another submit is working on this sweep.
        SlurmError: Slurm does not answer.
    """
    grid = _frozen(overrides, config_dirs, trust, app, extend=extend)
    command_line = ["hpc_trainer.submit", *overrides, *(() if app is None else (f"app={app}",))]
    return submit_grid(grid, retry_failed=retry_failed, fresh=fresh, command_line=command_line)


def sync(*names: str, sweep: str | None = None, to: str | None = None, runs_dir: Path | None = None) -> SyncResult:
    """Send W&B or MLflow the logged records that they lack; a repeated call is safe, during and after training.

    Args:
        names: a sweep, or ids of runs; without names, the newest sweep.
        sweep: the sweep to look in; None: the newest one.
        to: `"wandb"` or `"mlflow"`, also for runs without a tracker; None: the tracker of each run.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        ConfigError: no run has a tracker, the tracker's package is not installed, or the tracker has no key.
        RunStateError: a name matches nothing, or another sync is working on this sweep. `failed` of the result lists
            what a tracker did not accept.
    """
    tracker = None if to is None else tracker_named(to, "to=")
    return sync_named(runs_dir or configured_runs_dir(), names, sweep, tracker)[1]


def _frozen(
    overrides: Sequence[str], config_dirs: Sequence[Path], trust: Sequence[str], app: str | None, *, extend: bool
) -> Grid:
    if app is None:
        grid = freeze_grid(overrides, config_dirs=config_dirs, trust=trust)
    else:
        grid = freeze_app(read_app(app), overrides, config_dirs=config_dirs, trust=trust)
    return extend_grid(grid) if extend else grid
