"""`hpc-trainer verify` and `find-lr`: commands that test a run or a configuration. No slow imports."""

from __future__ import annotations

from typing import Annotated

import typer

from hpc_trainer.cli.options import (
    ConfigDir,
    Given,
    Json,
    Overrides,
    RunsDir,
    SweepOption,
    Trust,
    Verb,
    complete_names,
    complete_runs,
    renamed,
)
from hpc_trainer.verify.interruptions import InterruptionKind

verbs = typer.Typer()
verify = typer.Typer(
    name="verify", help="Check that a run resumes after an interruption, with the same bits; repeat an old run.",
    no_args_is_help=True, rich_markup_mode=None,
)  # fmt: skip
verbs.add_typer(verify)

Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", help="Seconds for the run to stop, and as many for it to resume."),
]
RunningNames = Annotated[
    list[str],
    typer.Argument(metavar="SWEEP|RUN", help="Id of a running run, or its sweep.", autocompletion=complete_names),
]


@verify.command(cls=Verb)
def preempt(
    names: RunningNames,
    kind: Annotated[
        InterruptionKind, typer.Option("--kind", metavar="|".join(InterruptionKind), help="Kind of interruption.")
    ] = InterruptionKind.preempt,
    sweep: SweepOption = None,
    timeout: Timeout = 300.0,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Interrupt a run that trains, as Slurm would, and check that it resumes at the saved step."""
    from hpc_trainer.verify.verbs import run_preempt

    run_preempt(kind, names, sweep, runs_dir, timeout_s=timeout, as_json=as_json)


@verbs.command("drill", cls=renamed("verify preempt --kind {what.value}"), hidden=True)
def preempt_by_old_name(
    what: Annotated[InterruptionKind, typer.Argument(metavar="|".join(InterruptionKind), help="Kind of interruption.")],
    names: RunningNames,
    sweep: SweepOption = None,
    timeout: Timeout = 300.0,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Interrupt a run that trains, as `verify preempt --kind KIND` does."""
    preempt(names, what, sweep, timeout, runs_dir, as_json)


@verify.command(cls=Verb)
def resume(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps of each of the three runs.")] = 40,
    interruptions: Annotated[
        int, typer.Option("--interruptions", metavar="N", help="Signals and kills, at random steps.")
    ] = 4,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="SEED", help="Seed of the random steps; else drawn, and printed.")
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
    from hpc_trainer.verify.verbs import run_resume

    given = Given(overrides, config_dir, trust)
    run_resume(
        given, steps=steps, interruptions=interruptions, seed=seed, timeout_s=timeout, keep=keep, as_json=as_json
    )


verbs.command("certify", cls=renamed("verify resume"), hidden=True)(resume)


@verify.command(cls=Verb)
def reproduce(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [KEY=VALUE]...",
            help="A run, and changed values of cluster.* and hardware.*.",
            autocompletion=complete_runs,
        ),
    ],
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Number of the run's first steps to repeat.")] = 20,
    may_differ: Annotated[
        bool,
        typer.Option("--allow-other-environment", help="Allow changes that make it another run: ranks, devices."),
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Use the recorded versions of all packages, in a venv that pip fills.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Seconds that the repetition may take.")
    ] = 3600.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the copy also if it is identical.")] = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Repeat the first steps of a run with its original code; say whether they are the same, or what differs."""
    from hpc_trainer.verify.verbs import run_reproduce

    run_reproduce(
        arguments, sweep, runs_dir, steps=steps, may_differ=may_differ, timeout_s=timeout, keep=keep, rebuilds=rebuild,
        as_json=as_json,
    )  # fmt: skip


verbs.command("reproduce", cls=renamed("verify reproduce"), hidden=True)(reproduce)


@verbs.command("find-lr", cls=Verb)
def find_lr(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps of the test, at least 10.")] = 100,
    first: Annotated[float, typer.Option("--from", metavar="LR", help="The first learning rate.")] = 1e-7,
    last: Annotated[
        float, typer.Option("--to", metavar="LR", help="The last learning rate, if the loss does not diverge before.")
    ] = 10.0,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Seconds that the test may take.")
    ] = 3600.0,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Try ever larger learning rates on this machine, suggest one, and write a plot; no run is left behind."""
    from hpc_trainer.verify.verbs import run_find_lr

    given = Given(overrides, config_dir, trust)
    run_find_lr(given, steps=steps, first=first, last=last, timeout_s=timeout, as_json=as_json)
