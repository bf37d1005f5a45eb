"""Commands that look at runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_trainer.cli.complete import complete_runs
from hpc_trainer.cli.given import one_sweep
from hpc_trainer.cli.options import (
    EveryRun,
    Json,
    Names,
    RunsDir,
    SweepArgument,
    SweepOption,
    Verb,
    renamed,
)

verbs = typer.Typer()


@verbs.command(cls=Verb)
def status(
    name: SweepArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show progress until all runs have ended.")] = False,
    every_run: EveryRun = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Show every run of a sweep: state, step, attempt, node, metrics."""
    from hpc_trainer.cli.run_verbs import run_status

    run_status(one_sweep(name, sweep), runs_dir, watch=watch, as_json=as_json, every_run=every_run)


@verbs.command(cls=Verb)
def logs(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's id, or its beginning or end.", autocompletion=complete_runs),
    ] = None,
    sweep: SweepOption = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="One rank's logs; else rank 0's.")] = None,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Every rank's logs.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print lines as they come.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", help="Only the last lines of each file.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Print what a run printed, over all its attempts."""
    from hpc_trainer.cli.run_verbs import run_logs

    chosen = None if all_ranks else (rank or 0)
    run_logs(run, sweep, runs_dir, rank=chosen, follow=follow, tail=tail, as_json=as_json)


@verbs.command(cls=Verb)
def sweeps(runs_dir: RunsDir = None, as_json: Json = False) -> None:
    """List the sweeps in the folder of runs, the newest first; asks no scheduler."""
    from hpc_trainer.cli.show_verbs import run_sweeps

    run_sweeps(runs_dir, as_json=as_json)


@verbs.command(cls=Verb)
def show(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, or its beginning or end.", autocompletion=complete_runs)
    ],
    every_key: Annotated[bool, typer.Option("--all", "-a", help="Keys at their default too.")] = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Show what a run was frozen with: its configuration, where each value came from, command and code."""
    from hpc_trainer.cli.show_verbs import run_show

    run_show(run, sweep, runs_dir, every_key=every_key, as_json=as_json)


@verbs.command(cls=Verb)
def diff(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN...", help="Runs, by their ids or parts of them.", autocompletion=complete_runs),
    ],
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Show the keys in which runs differ, and whether their frozen code does."""
    from hpc_trainer.cli.show_verbs import run_diff

    run_diff(names, sweep, runs_dir, as_json=as_json)


@verbs.command(cls=Verb)
def why(
    names: Names = None,
    sweep: SweepOption = None,
    page: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write all that is known of one run as one HTML page."),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Say in a sentence why a run is not done, what that rests on, and what to do."""
    from hpc_trainer.cli.verbs.why import run_why

    run_why(names or [], sweep, runs_dir, page=page, as_json=as_json)


@verbs.command(cls=Verb)
def results(
    name: SweepArgument = None,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort", metavar="COLUMN", help="Column to sort by, best first: losses ascending, all else descending."
        ),
    ] = None,
    every_run: EveryRun = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Print a table of results, one row a run."""
    from hpc_trainer.cli.run_verbs import run_results

    run_results(one_sweep(name, sweep), runs_dir, sort=sort, as_json=as_json, every_run=every_run)


@verbs.command(cls=Verb)
def report(
    name: SweepArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="The page's file; else report.html in the sweep's folder."),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option("--warmup-steps", metavar="N", help="Steps of each attempt left out of speeds; else 20."),
    ] = None,
    exports: Annotated[
        list[Path] | None,
        typer.Option(
            "--exports",
            metavar="PATH",
            help="Exports, or a folder of some: accuracy against size and latency; may be repeated.",
        ),
    ] = None,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page: runs, curves, and speed-up and efficiency of a sweep over hardware."""
    from hpc_trainer.cli.verbs.report import run_report

    run_report(
        one_sweep(name, sweep),
        runs_dir,
        output=output,
        warmup_steps=warmup_steps,
        exports=exports or (),
        as_json=as_json,
    )


@verbs.command(cls=Verb)
def sync(
    names: Names = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TRACKER", help="wandb or mlflow; else the tracker of each run.")
    ] = None,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Send W&B or MLflow what runs have logged; from a login node, as often as you like."""
    from hpc_trainer.cli.verbs.sync import run_sync

    run_sync(names or [], sweep, runs_dir, to=to, as_json=as_json)


@verbs.command("log-metrics", cls=Verb)
def log_metrics(
    words: Annotated[
        list[str], typer.Argument(metavar="step=N [METRIC=VALUE]...", help="The step that is done, and its metrics.")
    ],
) -> None:
    """Record a step and its metrics from inside a program that runs as a run."""
    from hpc_trainer.cli.verbs.log_metrics import run_log_metrics

    run_log_metrics(words)


verbs.command("log", cls=renamed("log-metrics"), hidden=True)(log_metrics)
