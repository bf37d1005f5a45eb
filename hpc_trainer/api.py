"""What the command line does, for notebooks and scripts: `hpc_trainer.plan(...)`, `submit(...)` and `sync(...)`.

They take the words that the command line takes, and return typed objects. `plan` writes nothing; `submit`
submits what is new or interrupted, once, however often it is called; `sync` sends trackers what they do not have.
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
from hpc_trainer.operate.sync.sync import SyncResult, sync_named, tracker_named


def plan(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False, extend: bool = False, app: str | None = None,
) -> SweepPlan:  # fmt: skip
    """What `submit` with the same arguments would do. Writes nothing. `changed`: runs whose code has changed since.

    Args:
        overrides: as on the command line: `"experiment=digits"`, `"optim.lr=1e-3,3e-3"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: plan failed runs too.
        fresh: plan all runs, as if there were none.
        extend: begin where runs of fewer train.num_steps have ended; without it, `twins` has those that could.
        app: a Hydra app and its words, as after `--app`: `"train.py model=a,b lr=1e-3"`.

    Raises:
        ConfigError: a point of the grid cannot be. What the cluster would refuse is in `problems`; that it does not
            answer is in `notes`.
    """
    grid = _frozen(overrides, config_dirs, trust, app, extend=extend)
    return plan_grid(grid, retry_failed=retry_failed, fresh=fresh)


def submit(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False, extend: bool = False, app: str | None = None,
) -> Submitted:  # fmt: skip
    """Submits the runs of a grid that are new or interrupted; returns at once and is safe to repeat.

    Args:
        overrides: as on the command line: `"experiment=digits"`, `"optim.lr=1e-3,3e-3"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: submit failed runs again; they go on from their newest checkpoint.
        fresh: begin all runs anew; what there is of them is set aside.
        extend: begin where runs of fewer train.num_steps have ended.
        app: a Hydra app and its words, as after `--app`: `"train.py model=a,b lr=1e-3"`.

    Raises:
        ConfigError: a point of the grid cannot be, or the cluster would refuse it; nothing was written.
        RunStateError: `fresh`, and one of the runs works or waits.
        SubmitError: the scheduler refused an array, or another submit is at work on this sweep.
        SlurmError: Slurm does not answer.
    """
    grid = _frozen(overrides, config_dirs, trust, app, extend=extend)
    words = ["hpc_trainer.submit", *overrides, *(() if app is None else (f"app={app}",))]
    return submit_grid(grid, retry_failed=retry_failed, fresh=fresh, command_line=words)


def sync(*names: str, sweep: str | None = None, to: str | None = None, runs_dir: Path | None = None) -> SyncResult:
    """Sends W&B or MLflow what runs have logged and they do not have; safe to repeat, while runs train and afterwards.

    Args:
        names: a sweep, or runs by their ids; none: the newest sweep.
        sweep: the sweep to look in; None: the newest one.
        to: `"wandb"` or `"mlflow"`, also for runs that have none; None: the tracker of each run.
        runs_dir: folder of sweeps; None: the one that is configured.

    Raises:
        ConfigError: no run has a tracker for this, its package is not installed, or it has no key.
        RunStateError: a name fits nothing, or another sync works on this sweep. What a tracker did not take of a run is
            in `failed`.
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
