"""The verb `best`, and what it prints.

Every command line imports this file at its start: functions import what they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_trainer.cli.options import Json, RunsDir, Verb, complete_sweeps

if TYPE_CHECKING:
    from hpc_trainer.record.status import SweepStatus

verbs = typer.Typer()


class SearchLines:
    """Lines about a search for `status` (hook `sweep_lines`); without a search, only this file is imported."""

    def text(self, status: SweepStatus) -> Sequence[str]:
        """Return lines on trials, rungs, the best run, and why the search stopped; [] without a search.

        If the file system does not say whether there is a search, return its error.
        """
        from hpc_trainer.record.reading import Faults, is_there

        faults = Faults()
        if not is_there(status.sweep.search, faults=faults):
            return faults
        from hpc_trainer.search.commands import status_lines

        return status_lines(status)

    def json(self, status: SweepStatus) -> Mapping[str, Any]:
        """Return the key `search`; {} without a search."""
        from hpc_trainer.record.reading import Faults, is_there

        if not is_there(status.sweep.search, faults=Faults()):
            return {}
        from hpc_trainer.search.commands import status_json_of_search

        return status_json_of_search(status)


LINES = SearchLines()


@verbs.command(cls=Verb)
def best(
    sweep: Annotated[
        str | None, typer.Argument(help="the search's sweep; without it, the newest", autocompletion=complete_sweeps)
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Show the best trial of a search, and the command that trains it again in full or with other seeds."""
    import dataclasses
    import shlex

    from hpc_trainer.cli.common import as_typed, print_json, say
    from hpc_trainer.operate.find import configured_runs_dir, find_sweep
    from hpc_trainer.search.commands import best_of
    from hpc_trainer.search.space import text_of

    found = best_of(find_sweep(configured_runs_dir(runs_dir), sweep))
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    at = "" if found.rung is None else f" at step {found.rung}; no trial is complete"
    say(f"{found.run_id} (trial {found.trial}): {found.metric} {found.value:.6g}{at}")
    for key, param in found.params.items():
        say(f"  {key} = {text_of(param)}")
    print(as_typed(f"With other seeds: hpc-trainer submit {shlex.join(found.again)}"))
