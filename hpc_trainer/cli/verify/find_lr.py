"""`hpc-trainer find-lr`: a learning-rate range test of a user's own configuration, and its plot."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import ended_by_signals, print_json, print_next, print_table, say
from hpc_trainer.cli.given import Given, at_defaults, only_point
from hpc_trainer.cli.grid_verbs import freeze_given, freeze_here, stop_queues
from hpc_trainer.config.schema.features.early_stop import EarlyStopConfig
from hpc_trainer.config.schema.optim import ScheduleConfig, lr_factor
from hpc_trainer.config.schema.output import TrackerConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.grids import submit_grid
from hpc_trainer.operate.find import prepare_to_write
from hpc_trainer.record.files import make_folder, set_umask, write_atomic
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.runtime.rank_env import PROBE_VARIABLE
from hpc_trainer.verify.find_lr import PROBE, VARIABLE, Curve, LrRange, draw, find_lr

_FEWEST_STEPS = 10
_ROWS = 12
_OWN = ("sweep_name=", "paths.runs_dir=")


def run_find_lr(given: Given, *, steps: int, first: float, last: float, timeout_s: float, as_json: bool) -> None:
    """Run the test; exit with 0 for a suggestion, 1 if the loss fell nowhere, 2 if the configuration is wrong."""
    if steps < _FEWEST_STEPS or not 0 < first < last < float("inf"):
        raise ConfigError(
            f"--steps={steps} must be at least {_FEWEST_STEPS}, and --from={first:g} greater than 0 and less than "
            f"--to={last:g}. Use --steps 100 --from 1e-7 --to 10."
        )
    grid = freeze_here(given.here("find-lr"))
    spec = only_point(grid, "find-lr takes", "Choose one point.")
    if spec.is_own_loop:
        raise ConfigError("find-lr takes steps of the shared loop, and train.main or train.command is your own.")
    if grid.sweep.folder.exists():
        prepare_to_write(grid.sweep, [spec.run_id])
    if not as_json:
        print(f"{spec.run_id}: {steps} steps on {spec.shape.world_size} rank(s), lr from {first:g} to {last:g} ..")
    plan = LrRange(first=first, last=last, num_steps=steps)
    with ended_by_signals():
        curve = _test(given.here("find-lr", without=(*_OWN, "schedule")), plan, timeout_s)
    set_umask(grid.group_readable)
    plot = grid.sweep.run(spec.run_id).lr_range
    make_folder(plot.parent)
    write_atomic(plot, draw(curve, f"{spec.run_id}: loss over learning rate"))
    value = _optim_lr(curve, spec)
    if as_json:
        print_json(_json(curve, spec, value, plot))
    else:
        _show(curve, value, plot, given.overrides or ())
    if value is None:
        sys.exit(1)


def _test(here: Given, plan: LrRange, timeout_s: float) -> Curve:
    """Run the test in a temporary folder and return its curve."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-trainer-find-lr-"))
    job_ids: list[str] = []
    try:
        grid = freeze_given(
            here,
            f"train.num_steps={plan.num_steps}", "train.eval_every_steps=0",
            "schedule=constant", *at_defaults("schedule", ScheduleConfig()),
            *at_defaults("tracker", TrackerConfig()),
            *at_defaults("train.early_stop", EarlyStopConfig()), "checkpoint.resume_from=null",
            "checkpoint.keep_best=null", "checkpoint.best_mode=auto", "sweep_name=find-lr",
            f"paths.runs_dir='{folder}'",
            f"++cluster.env.{PROBE_VARIABLE}={PROBE}", f"++cluster.env.{VARIABLE}='{plan.to_text()}'",
        )  # fmt: skip

        def start() -> None:
            job_ids.extend(array.job_id for array in submit_grid(grid, command_line=sys.argv).arrays)

        return find_lr(grid.sweep, grid.specs[0].run_id, start, timeout_s=timeout_s)
    finally:
        stop_queues(job_ids)  # also after Ctrl-C or a time-out: no process is left
        shutil.rmtree(folder, ignore_errors=True)


def _optim_lr(curve: Curve, spec: RunSpec) -> float | None:
    """Return the `optim.lr` that gives the suggested rate if a rule scales it to this batch; None without a rate."""
    config = spec.typed()
    factor = lr_factor(config.optim.lr_scaling, config.optim.lr_base_batch, config.train.global_batch_size)
    return None if curve.suggested_lr is None else float(f"{curve.suggested_lr / factor:.2g}")


def _json(curve: Curve, spec: RunSpec, value: float | None, plot: Path) -> dict[str, Any]:
    rates = ("steepest_lr", "divergence_lr", "tenth_lr", "suggested_lr")
    return {
        "run_id": spec.run_id,
        "points": [dataclasses.asdict(point) for point in curve.points],
        **{name: getattr(curve, name) for name in rates},
        "optim_lr": value,
        "plot": str(plot),
    }


def _show(curve: Curve, value: float | None, plot: Path, given: Sequence[str]) -> None:
    points = curve.points
    shown = sorted({round(index * (len(points) - 1) / (_ROWS - 1)) for index in range(_ROWS)})
    rows = [points[index] for index in shown]
    print_table(
        ["STEP", "LR", "LOSS", "SMOOTHED"],
        [[str(row.step), f"{row.lr:.2g}", f"{row.loss:.4g}", f"{row.smoothed:.4g}"] for row in rows],
    )
    if curve.divergence_lr is None:
        print(f"The loss did not diverge up to lr={points[-1].lr:.2g}; --to takes a larger one.")
    else:
        print(f"The loss diverged at lr={curve.divergence_lr:.2g}; a tenth of it is {curve.tenth_lr:.2g}.")
    if value is None:
        print("The loss fell nowhere: no rate is suggested.")
    else:
        print(f"It fell the fastest at lr={curve.steepest_lr:.2g}. Suggested: optim.lr={value:g}")
    say(f"Plot: {plot}")
    if value is not None:
        words = [word for word in given if not word.startswith("optim.lr=")]
        print_next(f"train {shlex.join([*words, f'optim.lr={value:g}'])}")
