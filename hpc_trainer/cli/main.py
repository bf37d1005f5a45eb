"""The command line `hpc-trainer`: its verbs with their options, and the message and exit code of an error.

Each verb imports what it needs when it runs, so that `--help` and completion stay fast. The hook `verbs` adds the verbs
of domains (hpc_trainer/domains.py).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import gc
import json
import os
import pwd
import stat
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from hpc_trainer.cli.common import allow_any_encoding, as_typed, visible_output
from hpc_trainer.cli.options import (
    App,
    Chosen,
    ColumnsOption,
    Command,
    ConfigDir,
    EveryRun,
    Extend,
    Fresh,
    Given,
    Json,
    Names,
    Overrides,
    Program,
    RunsDir,
    SweepArgument,
    SweepOption,
    Trust,
    Verb,
    WhereOption,
    WithApp,
    complete_names,
    complete_runs,
    complete_sweeps,
    one_sweep,
    renamed,
    words_of,
)
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError

app = typer.Typer(
    name="hpc-trainer",
    cls=Program,
    help="Submit grids of training runs to Slurm, or to this machine; interrupted runs resume by themselves.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Start with: hpc-trainer train experiment=digits debug=smoke",
    context_settings={"help_option_names": ["-h", "--help"]},
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
    """Run one configuration here and now, on all ranks of its hardware; a repeated command continues it."""
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
        bool, typer.Option("--memory", help="Estimate GPU memory and checkpoint sizes; needs no GPU.")
    ] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="Show on which hardware profile the runs would end soonest.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Plan failed runs too.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Plan every run of the grid, as if none existed yet.")] = False,
    extend: Extend = False,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Show what submit would do: runs, arrays, GPU-hours. Writes nothing."""
    from hpc_trainer.cli.grid_verbs import run_plan

    given = Given.of_grid(overrides, command, hydra_app, config_dir, trust)
    chosen = Chosen(retry_failed=retry_failed, fresh=fresh, extend=extend)
    run_plan(given, chosen, script=script, memory=memory, fit=fit, as_json=as_json)


@app.command(cls=WithApp)
def submit(
    overrides: Overrides = None,
    command: Command = None,
    hydra_app: App = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="The same as plan.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until all runs have ended.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Submit failed runs again.")] = False,
    canary: Annotated[
        int | None,
        typer.Option(
            "--canary", metavar="N", help="Start only N runs of each shape; the others wait until these have saved."
        ),
    ] = None,
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
        run_submit(given, chosen, wait=wait, as_json=as_json, canary=canary)


@app.command(cls=Verb)
def retry(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP|RUN...] [KEY=VALUE...]",
            help="Sweep or runs to run again, and overrides of cluster.* and hardware.*, as cluster.account=A.",
            autocompletion=complete_names,
        ),
    ] = None,
    where: WhereOption = None,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Submit failed runs again as frozen, with your changes; they resume from their newest checkpoints."""
    from hpc_trainer.cli.grid_verbs import run_retry

    run_retry(names or [], sweep, runs_dir, as_json=as_json, where=where)


@app.command("top-up", cls=Verb, hidden=True)
def top_up(folder: Annotated[Path, typer.Argument(metavar="SWEEP_FOLDER", help="runs/<sweep>")]) -> None:
    """Submit the runs that wait in a sweep's own queue. Top-up jobs run this command."""
    from hpc_trainer.cli.grid_verbs import run_top_up

    run_top_up(folder)


@app.command(cls=Verb)
def cancel(
    names: Names = None,
    save: Annotated[
        bool, typer.Option("--save", help="Let running runs save a checkpoint first, however long that takes.")
    ] = False,
    where: WhereOption = None,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Cancel runs, or a whole sweep; only `retry` restarts a cancelled run."""
    from hpc_trainer.cli.run_verbs import run_cancel

    run_cancel(names or [], sweep, runs_dir, save=save, as_json=as_json, where=where)


@app.command(cls=Verb)
def hold(
    names: Names = None,
    save: Annotated[
        bool, typer.Option("--save", help="Hold running runs too: they save a checkpoint and exit.")
    ] = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Keep waiting runs, or a whole sweep, from starting until they are released."""
    from hpc_trainer.cli.run_verbs import run_hold

    run_hold(names or [], sweep, runs_dir, save=save, as_json=as_json)


@app.command(cls=Verb)
def release(names: Names = None, sweep: SweepOption = None, runs_dir: RunsDir = None, as_json: Json = False) -> None:
    """Let held runs, or a held sweep, continue."""
    from hpc_trainer.cli.grid_verbs import run_release

    run_release(names or [], sweep, runs_dir, as_json=as_json)


@app.command(cls=Verb)
def status(
    name: SweepArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show progress until all runs have ended.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE,..", help="Show only runs in these states, as FAILED,HELD."),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Show only runs that failed or were interrupted.")] = False,
    where: WhereOption = None,
    columns: ColumnsOption = None,
    every_run: EveryRun = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Show every run of a sweep: state, step, attempt, node, metrics."""
    from hpc_trainer.cli.run_verbs import ChosenRuns, run_status

    chosen = ChosenRuns(states=words_of(state), where=where, failed=failed, columns=words_of(columns))
    run_status(one_sweep(name, sweep), runs_dir, watch=watch, as_json=as_json, every_run=every_run, chosen=chosen)


@app.command(cls=Verb)
def logs(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Run id, or its beginning or end.", autocompletion=complete_runs),
    ] = None,
    sweep: SweepOption = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", help="Show one rank's logs; by default rank 0's.")
    ] = None,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Show every rank's logs.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines as they are written.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", help="Show only the last N lines of each file.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Print what a run printed, over all its attempts."""
    from hpc_trainer.cli.run_verbs import run_logs

    chosen = None if all_ranks else (rank or 0)
    run_logs(run, sweep, runs_dir, rank=chosen, follow=follow, tail=tail, as_json=as_json)


@app.command(cls=Verb)
def sweeps(
    tag: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Show only sweeps with this tag.")] = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="Count all files, however long that takes.")] = False,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """List the sweeps in the folder of runs, newest first, without asking a scheduler."""
    from hpc_trainer.cli.show_verbs import run_sweeps

    run_sweeps(runs_dir, tag=tag, sizes=sizes, as_json=as_json)


@app.command(cls=Verb)
def usage(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP...]", help="Names of sweeps; by default all of yours.", autocompletion=complete_sweeps
        ),
    ] = None,
    by: Annotated[
        str, typer.Option("--by", metavar="COLUMNS", help="Columns to group by: sweep, person, account, month.")
    ] = "sweep",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all figures as CSV.")] = False,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Count GPU- and core-hours: requested, used, redone, idle, and hours in the queue; one sacct for all sweeps."""
    from hpc_trainer.cli.show_verbs import run_usage

    run_usage(names or [], runs_dir, by=by, as_csv=as_csv, as_json=as_json)


@app.command(cls=Verb)
def show(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run id, or its beginning or end.", autocompletion=complete_runs)
    ],
    every_key: Annotated[bool, typer.Option("--all", "-a", help="Show keys at their default too.")] = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Show a run as it was frozen: its configuration, where each value came from, command and code."""
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
def why(
    names: Names = None,
    sweep: SweepOption = None,
    page: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write everything known about one run as one HTML page."),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Explain in a sentence why a run is not done, with the evidence and what to do."""
    from hpc_trainer.cli.why_verbs import run_why

    run_why(names or [], sweep, runs_dir, page=page, as_json=as_json)


@app.command(cls=Verb)
def results(
    name: SweepArgument = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option(
            "--group-by", metavar="AXIS", help="Mean ± std over runs that differ only in these keys, such as seed."
        ),
    ] = None,
    where: WhereOption = None,
    columns: ColumnsOption = None,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort",
            metavar="COLUMN",
            help="Column to sort by, best first: losses and errors ascending, all else descending; -COLUMN reverses.",
        ),
    ] = None,
    every_run: EveryRun = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with all digits.")] = False,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX tabular (booktabs).")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="Write a Parquet file (pandas and pyarrow).")
    ] = None,
) -> None:
    """Print a table of results, one row a run."""
    from hpc_trainer.cli.results_verbs import Asked, chosen_format, run_results

    chosen = chosen_format(json=as_json, csv=as_csv, latex=as_latex, markdown=as_markdown, parquet=parquet is not None)
    asked = Asked(
        sort=sort,
        group_by=words_of(group_by),
        where=where,
        columns=words_of(columns),
        format=None if parquet else chosen,
        parquet=parquet,
    )
    run_results(one_sweep(name, sweep), runs_dir, sort=sort, as_json=as_json, every_run=every_run, asked=asked)


@app.command(cls=Verb)
def top(name: SweepArgument = None, sweep: SweepOption = None, runs_dir: RunsDir = None) -> None:
    """Show sweeps, runs, curves, logs and explanations on the whole screen, with keys to cancel, retry and hold."""
    from hpc_trainer.config.packages import check_installed

    check_installed("top, unlike status --watch,", "textual")
    from hpc_trainer.cli.top import run_top

    run_top(one_sweep(name, sweep), runs_dir)


@app.command(cls=Verb)
def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP...]",
            help="A sweep, or several to compare; by default the newest one.",
            autocompletion=complete_sweeps,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="File of the page; by default report.html in the sweep's folder."
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            "--warmup-steps",
            metavar="N",
            help="Number of first steps of each attempt that the speeds leave out; by default 20.",
        ),
    ] = None,
    exports: Annotated[
        list[Path] | None,
        typer.Option(
            "--exports",
            metavar="PATH",
            help="Export, or folder of exports, for charts of accuracy against size and latency; may be repeated.",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Update the page until all runs have ended.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Write a page without scripts, with static charts.")] = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page: a table of runs, curves, parameters, failures, costs, scaling; or compare sweeps."""
    from hpc_trainer.cli.report_verbs import run_report
    from hpc_trainer.operate.report.write import PageOptions

    one = one_sweep(names[0] if names and len(names) == 1 else None, sweep)
    if sweep is not None and names and len(names) > 1:
        raise ConfigError(f"--sweep {sweep} and {len(names)} other sweeps are given. Name all of them without --sweep.")
    run_report(
        names if names and len(names) > 1 else [] if one is None else [one],
        runs_dir,
        PageOptions(output=output, warmup_steps=warmup_steps, exports=exports or (), plain=plain),
        watch=watch,
        as_json=as_json,
    )


@app.command(cls=Verb)
def sync(
    names: Names = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TRACKER", help="wandb or mlflow; by default the tracker of each run.")
    ] = None,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Send the metrics that runs have logged to W&B or MLflow; from a login node, as often as you like."""
    from hpc_trainer.cli.report_verbs import run_sync

    run_sync(names or [], sweep, runs_dir, to=to, as_json=as_json)


@app.command("log-metrics", cls=Verb)
def log_metrics(
    words: Annotated[
        list[str], typer.Argument(metavar="step=N [METRIC=VALUE]...", help="The completed step, and its metrics.")
    ],
) -> None:
    """Record a step and its metrics from inside a program that runs as a run."""
    _log_metrics(words)


app.command("log", cls=renamed("log-metrics"), hidden=True)(log_metrics)


_LOG_HINT = "Write: hpc-trainer log-metrics step=10 loss=0.3"


def _log_metrics(words: list[str]) -> None:
    """Record one line of metrics of the run that calls this command.

    Raises:
        ConfigError: there is no step, a value is not a number, or the caller is not a run.
    """
    from hpc_trainer.record.metrics import VARIABLE, log_metrics

    given = dict(word.partition("=")[::2] for word in words)
    try:
        step = int(given.pop("step"))
        num_steps = int(given.pop("num_steps")) if "num_steps" in given else None
        metrics = {key: float(value) for key, value in given.items()}
    except KeyError:
        raise ConfigError(f"log-metrics needs the number of the completed step. {_LOG_HINT}") from None
    except ValueError as error:
        raise ConfigError(f"log-metrics takes numbers: {error}. {_LOG_HINT}") from None
    if step < 0 or "" in metrics:
        raise ConfigError(f"log-metrics takes a step ≥ 0 and names of metrics. {_LOG_HINT}")
    if VARIABLE not in os.environ:
        raise ConfigError(
            f"log-metrics records metrics of the run that calls it, and ${VARIABLE} is not set: no run calls it here."
        )
    log_metrics(step, metrics, num_steps=num_steps)


for verbs in contributions("verbs"):
    app.add_typer(verbs)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Submit grids of training runs to Slurm, or to this machine; interrupted runs resume by themselves."""
    if version:
        from hpc_trainer import __version__

        print(f"hpc-trainer {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; an error becomes one clear message and an exit code (0 success, 2 usage, 1 otherwise)."""
    # The objects of 10,000 runs live to the end: searching them for garbage again and again took a sixth of submit.
    gc.set_threshold(500_000)
    atexit.register(gc.freeze)  # the search at the end of the process took a tenth of results
    allow_any_encoding()
    with visible_output():
        _main()


def with_one_verb(word: str) -> typer.Typer:
    """Return the app with the named verb alone, or whole if no verb has the name.

    typer makes the options of every verb, which takes a tenth of the time that `status` of 10,000 runs takes.
    """
    commands = [command for each in (app, *contributions("verbs")) for command in each.registered_commands]
    named = [command for command in commands if command.callback and _name_of(command) == word]
    if not named:
        return app
    one = copy.copy(app)
    one.registered_commands, one.registered_groups = named, []
    return one


def _name_of(command: typer.models.CommandInfo) -> str:
    assert command.callback is not None
    return command.name or command.callback.__name__


def _main() -> None:
    try:
        with_one_verb(sys.argv[1] if len(sys.argv) > 1 else "")()
    except HpcTrainerError as error:
        if isinstance(error, RunStateError):
            _tell_unused_project()
        _complain(error)
        sys.exit(2 if error.exit_code == 2 else 1)
    except KeyboardInterrupt:
        sys.exit(1)
    except BrokenPipeError:
        # `hpc-trainer logs | head`: the reader has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except OSError as error:  # a full disk, a read-only folder: the system's message names the cause and the path
        _complain(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(as_typed(_NO_ROOM), file=sys.stderr)
        if isinstance(error, PermissionError) and error.filename is not None:
            print(_closed_words(Path(os.fsdecode(error.filename)).absolute()), file=sys.stderr)
        if isinstance(error, FileNotFoundError) and error.filename is None:  # as os.getcwd raises it
            print("The current folder was removed. Go to another one, as by cd ~", file=sys.stderr)
        sys.exit(1)
    except Exception:  # a bug of hpc-trainer; its message may hold any text
        traceback.print_exc()
        sys.exit(1)


_NO_ROOM = (
    "Free some space (quota -s, df -h), or name another folder: paths.runs_dir=FOLDER. Then run the command again."
)


def _closed_words(path: Path) -> str:
    """Return the owner of a file that the user may not access, and advice if it is in a colleague's folder of runs."""
    from hpc_trainer.operate.find import configured_runs_dir

    place = next((parent for parent in (path, *path.parents) if os.path.lexists(parent)), path)
    info = place.lstat()
    try:
        owner = pwd.getpwuid(info.st_uid).pw_name
    except KeyError:
        owner = str(info.st_uid)
    said = f"{place} belongs to {owner} and has mode {stat.S_IMODE(info.st_mode):o}."
    runs_dir = configured_runs_dir().absolute()
    if path == runs_dir or runs_dir in path.parents:
        return f"{said} Keep your runs in a folder of your own, once: export HPC_TRAINER_RUNS=$HOME/runs"
    return said


def _tell_unused_project() -> None:
    """Print a note on an unused project file: the sweep or run that was not found may be in its folder of runs."""
    from hpc_trainer.cli.options import tell_notes
    from hpc_trainer.config.compose.own_files import read_project

    with contextlib.suppress(HpcTrainerError):
        unused = read_project().unused
        tell_notes(() if unused is None or "--runs-dir" in " ".join(sys.argv) else (unused,))


def _complain(error: Exception) -> None:
    if "--json" in sys.argv:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return
    for line in str(error).splitlines():
        print(f"error: {as_typed(line)}", file=sys.stderr)


if __name__ == "__main__":
    main()
