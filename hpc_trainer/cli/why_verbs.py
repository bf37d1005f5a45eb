"""`hpc-trainer why`: one sentence on why a run is not done, and advice."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from rich.markup import escape

from hpc_trainer.cli.common import as_typed, counts_line, print_json, print_next, say, state_markup, warn
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.find import configured_runs_dir, prepare_to_write, select
from hpc_trainer.operate.run_page import gather_page, render_run_page
from hpc_trainer.operate.why import Why, because_of, by_cause, explain
from hpc_trainer.record.files import write_atomic
from hpc_trainer.record.ledger import ledger_json
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus

_SHOWN_RUNS = 3
_AT_PEACE = (RunState.COMPLETED, RunState.RUNNING, RunState.PENDING)


def run_why(
    names: list[str], sweep: str | None, runs_dir: Path | None, *, page: Path | None = None, as_json: bool
) -> None:
    """Explain one run at length; for a sweep, explain its unsuccessful runs, grouped by equal explanations.

    Raises:
        ConfigError: the folder of `page` does not exist, or `page` is given with several runs.
    """
    if page is not None and not page.absolute().parent.is_dir():
        raise ConfigError(f"--html={page}: there is no folder {page.absolute().parent}. Make it, or name another file.")
    status, run_ids = select(configured_runs_dir(runs_dir), names, sweep, is_look=True)
    if len(run_ids) == 1:
        run = status.run(run_ids[0])
        why = explain(status, run)
        warn(status)
        if page is not None:
            prepare_to_write(status.sweep, page=page.absolute())
            write_atomic(page.absolute(), render_run_page(gather_page(status, run, why)))
        if as_json:
            print_json(_json(why))
        else:
            _print_one(why)
            if page is not None:
                say(f"\nPage: {page.absolute()}")
        return
    if page is not None:
        raise ConfigError(f"--html={page} is of one run, and {len(run_ids)} are named. Name one run.")
    chosen = [run for run in status.open_among(run_ids) if run.state not in _AT_PEACE]
    explained = [explain(status, run, asks_slurm=False) for run in chosen]
    warn(status)
    if as_json:
        print_json({"sweep": status.sweep.name, "runs": [_json(why) for why in explained]})
    else:
        _print_many(status, run_ids, explained)


def _json(why: Why) -> dict[str, Any]:
    fields = dataclasses.asdict(dataclasses.replace(why, ledger=None))
    return {**fields, "state": why.state.value, "ledger": None if why.ledger is None else ledger_json(why.ledger)}


def _frame(why: Why) -> list[str]:
    return [] if why.frame is None else [why.frame]


def _print_one(why: Why) -> None:
    say("", f"[bold]{escape(why.run_id)}[/]  {state_markup(why.state)}")
    say(why.verdict)
    advice = [as_typed(line) for line in why.advice]
    for title, lines in (("Because", [*_frame(why), *why.evidence]), ("Do", advice), ("Story", why.timeline)):
        if lines:
            say("\n  ".join([f"\n{title}:", *lines]))


_OF_NODE = "node "
"""Beginning of the line on a node that failed before (record/bad_nodes.py)."""


def _print_many(status: SweepStatus, run_ids: list[str], explanations: list[Why]) -> None:
    say(f"Sweep {status.sweep.name}: {counts_line(Counter(status.states[run_id].value for run_id in run_ids))}.")
    for group in by_cause(explanations):
        verdict, because = group[0].verdict, because_of(group)
        names = ", ".join(why.run_id for why in group[:_SHOWN_RUNS])
        more = f" and {len(group) - _SHOWN_RUNS} more" if len(group) > _SHOWN_RUNS else ""
        said = [f"its last line: {line}" for line in dict.fromkeys(why.said for why in group) if line is not None]
        nodes = dict.fromkeys(line for why in group for line in why.evidence if line.startswith(_OF_NODE))
        say(
            "\n  ".join([verdict, *because, *said[:_SHOWN_RUNS], *[*nodes][:_SHOWN_RUNS], f"{names}{more}"]),
            f"\n{len(group)} x {state_markup(group[0].state)}: ",
        )
    if explanations:
        say("")
        print_next(f"why {explanations[0].run_id}")
    elif any(status.states[run_id] is not RunState.COMPLETED for run_id in run_ids):
        say("Every run is complete, running or waiting.")
        print_next(f"status {status.sweep.name}")
    else:
        print_next(f"results {status.sweep.name}")
