"""What the command line does, for notebooks and scripts: `hpc_trainer.plan(...)` and `hpc_trainer.submit(...)`.

Both take the overrides that the command line takes, and return typed objects. `plan` writes nothing; `submit`
submits what is new or interrupted, once, however often it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.launch.extend import extend_grid
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.grids import Submitted, plan_grid, submit_grid
from hpc_trainer.launch.plan import SweepPlan


def plan(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False, extend: bool = False,
) -> SweepPlan:  # fmt: skip
    """What `submit` with the same arguments would do. Writes nothing. `changed`: runs whose code has changed since.

    Args:
        overrides: as on the command line: `"experiment=digits"`, `"optim.lr=1e-3,3e-3"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: plan failed runs too.
        fresh: plan all runs, as if there were none.
        extend: begin where runs of fewer train.num_steps have ended; without it, `twins` has those that could.

    Raises:
        ConfigError: a point of the grid cannot be. What the cluster would refuse is in `problems`; that it does not
            answer is in `notes`.
    """
    grid = freeze_grid(overrides, config_dirs=config_dirs, trust=trust)
    grid = extend_grid(grid) if extend else grid
    return plan_grid(grid, retry_failed=retry_failed, fresh=fresh)


def submit(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False, extend: bool = False,
) -> Submitted:  # fmt: skip
    """Submits the runs of a grid that are new or interrupted; returns at once and is safe to repeat.

    Args:
        overrides: as on the command line: `"experiment=digits"`, `"optim.lr=1e-3,3e-3"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: submit failed runs again; they go on from their newest checkpoint.
        fresh: begin all runs anew; what there is of them is set aside.
        extend: begin where runs of fewer train.num_steps have ended.

    Raises:
        ConfigError: a point of the grid cannot be, or the cluster would refuse it; nothing was written.
        RunStateError: `fresh`, and one of the runs works or waits.
        SubmitError: the scheduler refused an array, or another submit is at work on this sweep.
        SlurmError: Slurm does not answer.
    """
    grid = freeze_grid(overrides, config_dirs=config_dirs, trust=trust)
    grid = extend_grid(grid) if extend else grid
    return submit_grid(grid, retry_failed=retry_failed, fresh=fresh, command_line=["hpc_trainer.submit", *overrides])
