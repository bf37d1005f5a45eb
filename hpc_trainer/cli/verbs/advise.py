"""`hpc-trainer advise`: advice that makes runs faster or cheaper, one line per piece of advice."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from hpc_trainer.cli.common import print_json, print_next, say, state_markup, warn
from hpc_trainer.cli.given import resolve_runs_dir
from hpc_trainer.observe.advice import Tuned, alike, next_words, tune
from hpc_trainer.operate.find import select

_SHOWN_RUNS = 3


def run_advise(names: list[str], sweep: str | None, runs_dir: Path | None, *, as_json: bool) -> None:
    """Print advice for the runs that `names` mean; several runs with the same advice share a line."""
    status, run_ids = select(resolve_runs_dir(runs_dir), names, sweep, is_look=True)
    tuned, notes = tune(status, run_ids)
    warn(status)
    if as_json:
        runs = [tuned_json(run) for run in tuned]
        print_json({"sweep": status.sweep.name, "runs": runs, "notes": notes})
        return
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)
    if len(tuned) == 1:
        _print_one(tuned[0], status.sweep.name)
    else:
        _print_many(tuned)


def tuned_json(tuned: Tuned) -> dict[str, Any]:
    """Return one run of `advise --json` (docs/json.md)."""
    return {
        "run_id": tuned.run_id, "state": tuned.state.value,
        "advice": [{**dataclasses.asdict(advice), "line": advice.line} for advice in tuned.advice],
    }  # fmt: skip


def _print_one(tuned: Tuned, sweep: str) -> None:
    say("", f"[bold]{escape(tuned.run_id)}[/]  {state_markup(tuned.state)}")
    for advice in tuned.advice:
        say(advice.line)
    if not tuned.advice:
        say("Nothing stands out.")
        if tuned.state.has_failed:
            print_next(f"why {tuned.run_id}")
    elif (words := next_words(tuned, sweep)) is not None:
        print_next(words)


def _print_many(tuned: Sequence[Tuned]) -> None:
    groups = alike(tuned)
    for group in groups:
        names = ", ".join(group.run_ids[:_SHOWN_RUNS])
        more = f" and {len(group.run_ids) - _SHOWN_RUNS} more" if len(group.run_ids) > _SHOWN_RUNS else ""
        say(f"{len(group.run_ids)} x {group.advice.line}\n  {names}{more}")
    advised = sum(bool(run.advice) for run in tuned)
    say(f"{advised} of {len(tuned)} runs looked at have advice." if groups else "Nothing stands out.")
    if groups:
        print_next(f"advise {groups[0].run_ids[0]}")
