"""The verb `best`, and what `status` and `results` show of a search.

Every command line imports this file at its start: functions import what they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_trainer.cli.options import Json, RunsDir, Verb, complete_sweeps

if TYPE_CHECKING:
    from hpc_trainer.record.reading import Faults
    from hpc_trainer.record.run_status import RunStatus
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


class TrialColumn:
    """Column of `results` with the number of a run's trial (hook `result_columns`).

    Without a search, only this file is imported: the rest takes a twentieth of `results` of 10,000 runs.
    """

    names, sums = frozenset({"trial"}), frozenset[str]()

    def __init__(self) -> None:
        self._numbers: tuple[SweepStatus, Mapping[str, int]] | None = None

    def of(self, status: SweepStatus, run: RunStatus) -> Mapping[str, Any]:
        """Return the number of the run's trial; {} if the run is no trial.

        The trials are read once for a status. If they cannot be read, `run` gets the fault.
        """
        if self._numbers is None or self._numbers[0] is not status:
            self._numbers = status, _trial_numbers(status, status.faults_of(run.run_id))
        numbers = self._numbers[1]
        return {"trial": numbers[run.run_id]} if run.run_id in numbers else {}


def _trial_numbers(status: SweepStatus, faults: Faults) -> Mapping[str, int]:
    from hpc_trainer.record.reading import is_there

    if not is_there(status.sweep.search, faults=faults):
        return {}
    from hpc_trainer.search.commands import view_of

    view = view_of(status.sweep)
    return {} if view is None else {trial.run_id: trial.number for trial in view[1]}


COLUMNS = TrialColumn()


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
