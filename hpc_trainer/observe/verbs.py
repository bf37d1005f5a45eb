"""The verbs `advise` and `profile`, and what they print.

Every command line imports this file at its start: functions import what they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_trainer.cli.options import Json, Names, RunsDir, SweepOption, Verb, complete_runs, renamed

if TYPE_CHECKING:
    from hpc_trainer.observe.advice import AdvisedRun
    from hpc_trainer.observe.profile_client import RankProfile
    from hpc_trainer.observe.profile_request import ProfileRequest

verbs = typer.Typer()
_SHOWN_RUNS = 3


@verbs.command(cls=Verb)
def advise(
    names: Names = None,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Say what would make runs faster or cheaper: what was seen, the key to change, the expected gain."""
    import sys

    from hpc_trainer.cli.common import print_json, warn
    from hpc_trainer.observe.advice import advise_runs
    from hpc_trainer.operate.find import configured_runs_dir, select

    status, run_ids = select(configured_runs_dir(runs_dir), names or [], sweep, is_look=True)
    tuned, notes = advise_runs(status, run_ids)
    warn(status)
    if as_json:
        print_json({"sweep": status.sweep.name, "runs": [_advice_json(run) for run in tuned], "notes": notes})
        return
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)
    if len(tuned) == 1:
        _print_advice(tuned[0], status.sweep.name)
    else:
        _print_common_advice(tuned)


verbs.command("tune", cls=renamed("advise"), hidden=True)(advise)


def _advice_json(tuned: AdvisedRun) -> dict[str, Any]:
    """Return one run of `advise --json` (docs/json.md)."""
    import dataclasses

    return {
        "run_id": tuned.run_id, "state": tuned.state.value,
        "advice": [{**dataclasses.asdict(advice), "line": advice.line} for advice in tuned.advice],
    }  # fmt: skip


def _print_advice(tuned: AdvisedRun, sweep: str) -> None:
    from rich.markup import escape

    from hpc_trainer.cli.common import print_next, say, state_markup
    from hpc_trainer.observe.advice import next_command

    say("", f"[bold]{escape(tuned.run_id)}[/]  {state_markup(tuned.state)}")
    for advice in tuned.advice:
        say(advice.line)
    if not tuned.advice:
        say("Nothing stands out.")
        if tuned.state.has_failed:
            print_next(f"why {tuned.run_id}")
    elif (command := next_command(tuned, sweep)) is not None:
        print_next(command)


def _print_common_advice(tuned: Sequence[AdvisedRun]) -> None:
    """Print each piece of advice once, with the runs that share it."""
    from hpc_trainer.cli.common import print_next, say
    from hpc_trainer.observe.advice import shared_advice

    groups = shared_advice(tuned)
    for group in groups:
        names = ", ".join(group.run_ids[:_SHOWN_RUNS])
        more = f" and {len(group.run_ids) - _SHOWN_RUNS} more" if len(group.run_ids) > _SHOWN_RUNS else ""
        say(f"{len(group.run_ids)} x {group.advice.line}\n  {names}{more}")
    advised = sum(bool(run.advice) for run in tuned)
    say(f"{advised} of {len(tuned)} runs looked at have advice." if groups else "Nothing stands out.")
    if groups:
        print_next(f"advise {groups[0].run_ids[0]}")


@verbs.command(cls=Verb)
def profile(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Id of a running run, or its beginning or end.", autocompletion=complete_runs
        ),
    ],
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Number of steps to profile, 1 to 1000.")] = 20,
    ranks: Annotated[str, typer.Option("--ranks", metavar="N,..", help="Ranks to profile, or all.")] = "0",
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Send the request, and do not wait for the profile.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Seconds after which the request expires.")
    ] = 600.0,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Profile some steps of a running run with torch.profiler, and show where their time goes."""
    import sys

    from hpc_trainer.cli.common import print_json, say
    from hpc_trainer.errors import RunStateError
    from hpc_trainer.observe.profile_client import ask_for_profile, await_profile
    from hpc_trainer.operate.find import configured_runs_dir, select

    status, chosen = select(configured_runs_dir(runs_dir), [run], sweep)
    if len(chosen) > 1:
        listed = ", ".join(chosen[:5])
        raise RunStateError(f"a profile is of one run, and {len(chosen)} match {run}: {listed}. Name one.")
    chosen_run = status.run(chosen[0])
    asked = ask_for_profile(
        status.sweep,
        chosen_run,
        num_steps=steps,
        ranks=_ranks_of(ranks, chosen_run.spec.shape.world_size),
        timeout_s=timeout,
    )
    if no_wait:
        files = [status.sweep.run(chosen_run.run_id).profile_files(rank)[0] for rank in asked.ranks]
        if as_json:
            print_json(_profile_json(chosen_run.run_id, asked, []))
        else:
            say(f"Asked {chosen_run.run_id}, at step {chosen_run.step}, for {steps} steps. It will write:")
            for file in files:
                say(f"  {file}")
        return
    progress = [] if as_json else [lambda line: print(line, file=sys.stderr, flush=True)]
    profiles = await_profile(status.sweep, chosen_run.run_id, asked, *progress)
    if as_json:
        print_json(_profile_json(chosen_run.run_id, asked, profiles))
        return
    for index, profile in enumerate(profiles):
        say("\n".join(profile.answer.lines), "\n" if index else "")
        say(f"Table: {profile.table}\nTrace: {profile.trace} (chrome://tracing, or https://ui.perfetto.dev)")


def _ranks_of(option: str, world_size: int) -> list[int]:
    from hpc_trainer.errors import ConfigError

    if option == "all":
        return list(range(world_size))
    try:
        return [int(word) for word in option.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ranks={option} must be ranks with commas between them, or all. Use --ranks=0.") from error


def _profile_json(run_id: str, request: ProfileRequest, profiles: Sequence[RankProfile]) -> dict[str, object]:
    """Return the stable form of `profile --json` (docs/json.md)."""
    ranks = [
        {
            "rank": profile.rank, "table": str(profile.table), "trace": str(profile.trace),
            **{key: profile.answer.figures.get(key) for key in _FIGURES},
            "advice": [line.removeprefix("advice: ") for line in profile.answer.lines if line.startswith("advice: ")],
        }
        for profile in profiles
    ]  # fmt: skip
    return {"run_id": run_id, "asked": {"num_steps": request.num_steps, "ranks": [*request.ranks]}, "ranks": ranks}


_FIGURES = (
    "device", "first_step", "num_steps", "step_s", "data_wait_share", "idle_share", "between_share", "optimizer_share",
    "work", "peak_memory_share",
)  # fmt: skip
