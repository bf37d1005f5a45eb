"""`hpc-trainer`: the verbs and their options. Imports nothing heavy: each verb brings what it needs."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from hpc_trainer.cli.complete import complete_names, complete_runs
from hpc_trainer.cli.data.app import data
from hpc_trainer.cli.given import Chosen, Given
from hpc_trainer.cli.options import (
    App,
    Best,
    Command,
    ConfigDir,
    DataOverrides,
    EveryRun,
    Extend,
    Fresh,
    Json,
    ModelTarget,
    Names,
    Overrides,
    Raw,
    RunsDir,
    StepOption,
    SweepArgument,
    SweepOption,
    Trust,
    Verb,
    WithApp,
)
from hpc_trainer.cli.terminal import as_typed, visible_output
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.operate.drill.kinds import Drill

app = typer.Typer(
    name="hpc-trainer",
    help="Submit grids of training runs to Slurm, or to this machine; they come back by themselves.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Start with: hpc-trainer train experiment=digits debug=smoke",
)


@app.command(cls=WithApp)
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


@app.command(cls=WithApp)
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


@app.command(cls=WithApp)
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


@app.command(cls=Verb)
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


@app.command("top-up", cls=Verb, hidden=True)
def top_up(folder: Annotated[Path, typer.Argument(metavar="SWEEP_FOLDER", help="runs/<sweep>")]) -> None:
    """What a top-up job runs: submit what waits in a sweep's own queue."""
    from hpc_trainer.cli.grid_verbs import run_top_up

    run_top_up(folder)


@app.command(cls=Verb)
def status(
    sweep: SweepArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show progress until all runs have ended.")] = False,
    every_run: EveryRun = False,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Show every run of a sweep: state, step, attempt, node, metrics."""
    from hpc_trainer.cli.run_verbs import run_status

    run_status(sweep, runs_dir, watch=watch, as_json=as_json, every_run=every_run)


@app.command(cls=Verb)
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


@app.command(cls=Verb)
def sweeps(runs_dir: RunsDir = None, as_json: Json = False) -> None:
    """List the sweeps in the folder of runs, the newest first; asks no scheduler."""
    from hpc_trainer.cli.show_verbs import run_sweeps

    run_sweeps(runs_dir, as_json=as_json)


@app.command(cls=Verb)
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


@app.command(cls=Verb)
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


@app.command(cls=Verb)
def log(
    words: Annotated[list[str], typer.Argument(metavar="step=N [METRIC=VALUE]...", help="What to tell.")],
) -> None:
    """Tell, from inside a program that runs as a run, which step it has done and its metrics."""
    from hpc_trainer.cli.log_verb import run_log

    run_log(words)


@app.command(cls=Verb)
def why(
    names: Names = None,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Say in a sentence why a run is not done, what that rests on, and what to do."""
    from hpc_trainer.cli.why_verb import run_why

    run_why(names or [], sweep, runs_dir, as_json=as_json)


@app.command(cls=Verb)
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


@app.command(cls=Verb)
def drill(
    what: Annotated[Drill, typer.Argument(metavar="|".join(Drill), help="What is done to the run.")],
    names: Annotated[
        list[str],
        typer.Argument(metavar="SWEEP|RUN", help="A run that trains, or its sweep.", autocompletion=complete_names),
    ],
    sweep: SweepOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Seconds to stop, and again to come back.")
    ] = 300.0,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Interrupt a run that trains, as Slurm would, and check that it goes on where it must."""
    from hpc_trainer.cli.drill_verb import run_drill_verb

    run_drill_verb(what, names, sweep, runs_dir, timeout_s=timeout, as_json=as_json)


@app.command("certify", cls=Verb)
def certify_(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps of each of the three runs.")] = 40,
    interruptions: Annotated[
        int, typer.Option("--interruptions", metavar="N", help="Signals and kills, at random steps.")
    ] = 4,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="SEED", help="Of the random steps; else drawn, and printed.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Seconds that an attempt may take.")
    ] = 600.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the runs also if they are identical.")] = False,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Interrupt this training at random, here, and show that it ends with the same bits, or what differs and why."""
    from hpc_trainer.cli.certify_verb import run_certify_verb

    given = Given(overrides, config_dir, trust)
    run_certify_verb(
        given, steps=steps, interruptions=interruptions, seed=seed, timeout_s=timeout, keep=keep, as_json=as_json
    )


@app.command("find-lr", cls=Verb)
def find_lr_(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps of the test, at least 10.")] = 100,
    first: Annotated[float, typer.Option("--from", metavar="LR", help="The first learning rate.")] = 1e-7,
    last: Annotated[
        float, typer.Option("--to", metavar="LR", help="The last one, if the loss does not diverge before.")
    ] = 10.0,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Seconds that the test may take.")
    ] = 3600.0,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Try ever larger learning rates on this training, here, and suggest one; writes a plot, leaves no run behind."""
    from hpc_trainer.cli.find_lr_verb import run_find_lr_verb

    given = Given(overrides, config_dir, trust)
    run_find_lr_verb(given, steps=steps, first=first, last=last, timeout_s=timeout, as_json=as_json)


@app.command(cls=Verb)
def results(
    sweep: SweepArgument = None,
    sort: Annotated[str | None, typer.Option("--sort", metavar="COLUMN", help="Column to sort by, best first.")] = None,
    every_run: EveryRun = False,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Print a table of results, one row a run."""
    from hpc_trainer.cli.run_verbs import run_results

    run_results(sweep, runs_dir, sort=sort, as_json=as_json, every_run=every_run)


@app.command(cls=Verb)
def report(
    sweep: SweepArgument = None,
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
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page: runs, curves, and speed-up and efficiency of a sweep over hardware."""
    from hpc_trainer.cli.report_verb import run_report

    run_report(sweep, runs_dir, output=output, warmup_steps=warmup_steps, exports=exports or (), as_json=as_json)


@app.command(cls=Verb)
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
    from hpc_trainer.cli.sync_verb import run_sync

    run_sync(names or [], sweep, runs_dir, to=to, as_json=as_json)


@app.command(cls=Verb)
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, or its beginning or end.", autocompletion=complete_runs)
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="safetensors, torch (weights alone), torch_export, onnx (they run by themselves).",
        ),
    ] = "safetensors",
    quantize: Annotated[
        str | None,
        typer.Option("--quantize", metavar="NAME", help="dynamic_int8, int8 or int4: smaller, and mostly faster."),
    ] = None,
    best: Best = False,
    step: StepOption = None,
    raw: Raw = False,
    name: Annotated[
        str, typer.Option("--object", metavar="NAME", help="Of your own loop: what run.save calls the model.")
    ] = "model",
    all_ways: Annotated[
        bool, typer.Option("--all", help="Every format and quantization that the model can have, in one folder.")
    ] = False,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Without latency and metrics, which take the validation set.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="SHARE", help="How far outputs of --quantize may be off, as a share of the largest."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="The folder; else RUN-step-N here.")
    ] = None,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write a run's model into one file that loads in ten lines, and its size, latency and metrics beside it."""
    from hpc_trainer.cli.export_verb import run_export
    from hpc_trainer.operate.deploy.checkpoint import Which
    from hpc_trainer.operate.deploy.export import Wanted

    wanted = Wanted(
        which=Which(best=best, step=step, raw=raw, name=name), to=to, quantize=quantize, measure=not no_measure,
        tolerance=tolerance, output=output,
    )  # fmt: skip
    run_export(run, sweep, runs_dir, wanted, all_ways=all_ways, as_json=as_json)


@app.command(name="eval", cls=Verb)
def evaluate(
    target: ModelTarget,
    overrides: DataOverrides = None,
    best: Best = False,
    step: StepOption = None,
    raw: Raw = False,
    sweep: SweepOption = None,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Print the metrics of a run's checkpoint, or of an export, on its validation set or on other data; here."""
    from hpc_trainer.cli.eval_verb import run_eval
    from hpc_trainer.cli.given import resolve_runs_dir
    from hpc_trainer.operate.deploy.ask_model import Target
    from hpc_trainer.operate.deploy.checkpoint import Which

    which = Which(best=best, step=step, raw=raw)
    given = Target(
        name=target, runs_dir=resolve_runs_dir(runs_dir), sweep=sweep, which=which, overrides=overrides or (),
        config_dirs=config_dir or (), trust=trust or (),
    )  # fmt: skip
    run_eval(given, as_json=as_json)


@app.command(cls=Verb)
def predict(
    target: ModelTarget,
    overrides: DataOverrides = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="FILE.jsonl, a line a sample, or FILE.npz, arrays of numpy."
        ),
    ] = Path("predictions.jsonl"),
    best: Best = False,
    step: StepOption = None,
    raw: Raw = False,
    sweep: SweepOption = None,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write what a run's model, or an export, predicts for each sample of its validation set or of other data; here."""
    from hpc_trainer.cli.eval_verb import run_predict
    from hpc_trainer.cli.given import resolve_runs_dir
    from hpc_trainer.operate.deploy.ask_model import Target
    from hpc_trainer.operate.deploy.checkpoint import Which

    which = Which(best=best, step=step, raw=raw)
    given = Target(
        name=target, runs_dir=resolve_runs_dir(runs_dir), sweep=sweep, which=which, overrides=overrides or (),
        config_dirs=config_dir or (), trust=trust or (),
    )  # fmt: skip
    run_predict(given, output, as_json=as_json)


app.add_typer(data)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Submit grids of training runs to Slurm, or to this machine; they come back by themselves."""
    if version:
        from hpc_trainer import __version__

        print(f"hpc-trainer {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: errors become one clear message and an exit code (0 success, 2 usage, 1 otherwise)."""
    # What 10,000 runs are made of stays to the end: to look for rubbish in it all the time took a sixth of submit.
    gc.set_threshold(100_000)
    with visible_output():
        _main()


def _main() -> None:
    try:
        app()
    except HpcTrainerError as error:
        _complain(error)
        sys.exit(2 if error.exit_code == 2 else 1)
    except KeyboardInterrupt:
        sys.exit(1)
    except BrokenPipeError:
        # `hpc-trainer logs | head`: the reader has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except OSError as error:  # a full disk, a read-only folder: the system's words say which and where
        _complain(error)
        sys.exit(1)
    except Exception:  # a fault of ours; what it says may hold anything
        traceback.print_exc()
        sys.exit(1)


def _complain(error: Exception) -> None:
    if "--json" in sys.argv:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return
    for line in str(error).splitlines():
        print(f"error: {as_typed(line)}", file=sys.stderr)


if __name__ == "__main__":
    main()
