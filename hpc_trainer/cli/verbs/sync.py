"""`hpc-trainer sync`: transfer of the runs' metrics to W&B and MLflow."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from hpc_trainer.cli.common import print_json, print_table, say, warn
from hpc_trainer.cli.given import resolve_runs_dir
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.operate.sync import sync_named, tracker_named


def run_sync(names: list[str], sweep: str | None, runs_dir: Path | None, *, to: str | None, as_json: bool) -> None:
    """Send new steps to the trackers, and exit with 1 if a tracker did not accept a run.

    Raises:
        ConfigError: `to` is not a tracker that can be synced.
    """
    tracker = None if to is None else tracker_named(to, "--to ")
    status, result = sync_named(resolve_runs_dir(runs_dir), names, sweep, tracker)
    warn(status)
    if as_json:
        print_json({
            "sweep": status.sweep.name,
            "runs": [{**dataclasses.asdict(run), "state": run.state.value} for run in result.synced],
            "failed": result.failed,
            "not_begun": result.num_not_begun,
        })  # fmt: skip
    else:
        print_table(
            ["RUN", "STATE", "STEP", "NEW", "WHERE"],
            [
                [run.run_id, run.state, "-" if run.step is None else str(run.step), str(run.num_new), run.where]
                for run in result.synced
            ],
        )
        if result.num_not_begun:
            say(f"{result.num_not_begun} more have not begun.")
        for run_id, message in result.failed.items():
            say(as_typed(f"{run_id}: {message}"))
        if result.failed:
            rest = " The rest was not tried." if result.has_given_up else ""
            say(f"{len(result.failed)} could not be synced.{rest} The same command goes on from there.")
    if result.failed:
        sys.exit(1)
