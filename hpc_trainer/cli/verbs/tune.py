"""`hpc-trainer tune`: what would make runs faster or cheaper, a line each."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from hpc_trainer.cli.common import print_json, print_next, say, state_markup, warn
from hpc_trainer.cli.given import resolve_runs_dir
from hpc_trainer.operate.advice.advised import Tuned, alike, next_words, tune
from hpc_trainer.operate.find import select

_SHOWN_RUNS = 3


def run_tune(names: list[str], sweep: str | None, runs_dir: Path | None, *, as_json: bool) -> None:
    """Advises the runs that `names` name; of a sweep's, those with the same advice together."""
    status, run_ids = select(resolve_runs_dir(runs_dir), names, sweep, is_look=True)
    tuned, notes = tune(status, run_ids)
    warn(status)
    if as_json:
        found = [tuned_json(each) for each in tuned]
        print_json({"sweep": status.sweep.name, "runs": found, "notes": notes})
        return
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)
    if len(tuned) == 1:
        _print_one(tuned[0], status.sweep.name)
    else:
        _print_many(tuned)


def tuned_json(tuned: Tuned) -> dict[str, Any]:
    """One run of `tune --json` (docs/json.md)."""
    return {
        "run_id": tuned.run_id, "state": tuned.state.value,
        "advice": [{**dataclasses.asdict(each), "line": each.line} for each in tuned.advice],
    }  # fmt: skip


def _print_one(tuned: Tuned, sweep: str) -> None:
    say("", f"[bold]{escape(tuned.run_id)}[/]  {state_markup(tuned.state)}")
    for each in tuned.advice:
        say(each.line)
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
    advised = sum(bool(each.advice) for each in tuned)
    say(f"{advised} of {len(tuned)} runs looked at have advice." if groups else "Nothing stands out.")
    if groups:
        print_next(f"tune {groups[0].run_ids[0]}")
