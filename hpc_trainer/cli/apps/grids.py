"""Verbs that take a grid, or runs of one: they train, submit, and end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_trainer.cli.complete import complete_names
from hpc_trainer.cli.given import Chosen, Given
from hpc_trainer.cli.options import (
    App,
    Command,
    ConfigDir,
    Extend,
    Fresh,
    Json,
    Names,
    Overrides,
    RunsDir,
    SweepOption,
    Trust,
    Verb,
    WithApp,
)

verbs = typer.Typer()


@verbs.command(cls=WithApp)
def train(
    overrides: Overrides = None,
    command: Command = None,
    hydra_app: App = None,
    fresh: Fresh = False,
    extend: Extend = False,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Run one configuration here and now, on all ranks of its hardware; started again, it goes on."""
    from hpc_trainer.cli.grid_verbs import run_train

    given = Given.of_grid(overrides, command, hydra_app, config_dir, trust)
    run_train(given, fresh=fresh, extend=extend, as_json=as_json)


@verbs.command(cls=WithApp)
def plan(
    overrides: Overrides = None,
    command: Command = None,
    hydra_app: App = None,
    script: Annotated[bool, typer.Option("--script", help="Show the batch script of each array.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Estimate GPU memory and checkpoints, without a GPU.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Plan failed runs too.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Plan all runs, as if there were none.")] = False,
    extend: Extend = False,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Show what submit would do: runs, arrays, GPU-hours. Writes nothing."""
    from hpc_trainer.cli.grid_verbs import run_plan

    given = Given.of_grid(overrides, command, hydra_app, config_dir, trust)
    chosen = Chosen(retry_failed=retry_failed, fresh=fresh, extend=extend)
    run_plan(given, chosen, script=script, memory=memory, as_json=as_json)


@verbs.command(cls=WithApp)
def submit(
    overrides: Overrides = None,
    command: Command = None,
    hydra_app: App = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="The same as plan.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until all runs have ended.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Submit failed runs again.")] = False,
    fresh: Fresh = False,
    extend: Extend = False,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Submit the runs of a grid that are new or interrupted; returns at once and is safe to repeat."""
    from hpc_trainer.cli.grid_verbs import run_plan, run_submit

    given = Given.of_grid(overrides, command, hydra_app, config_dir, trust)
    chosen = Chosen(retry_failed=retry_failed, fresh=fresh, extend=extend)
    if dry_run:
        run_plan(given, chosen, as_json=as_json)
    else:
        run_submit(given, chosen, wait=wait, as_json=as_json)


@verbs.command(cls=Verb)
def retry(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP|RUN...] [KEY=VALUE...]",
            help="What to run again, and what to change: cluster.* and hardware.*, as hardware.time_limit_min=480.",
            autocompletion=complete_names,
        ),
    ] = None,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Submit failed runs again, as they were frozen but for changes; they go on from their newest checkpoint."""
    from hpc_trainer.cli.grid_verbs import run_retry

    run_retry(names or [], sweep, runs_dir, as_json=as_json)


@verbs.command("top-up", cls=Verb, hidden=True)
def top_up(folder: Annotated[Path, typer.Argument(metavar="SWEEP_FOLDER", help="runs/<sweep>")]) -> None:
    """What a top-up job runs: submit what waits in a sweep's own queue."""
    from hpc_trainer.cli.grid_verbs import run_top_up

    run_top_up(folder)


@verbs.command(cls=Verb)
def cancel(
    names: Names = None,
    save: Annotated[bool, typer.Option("--save", help="Let running ones save a checkpoint, however long.")] = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Cancel runs, or a whole sweep; a cancelled run never comes back by itself."""
    from hpc_trainer.cli.run_verbs import run_cancel

    run_cancel(names or [], sweep, runs_dir, save=save, as_json=as_json)
