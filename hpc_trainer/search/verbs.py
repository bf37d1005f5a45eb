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
    """Lines about a search for `status` (hook `sweep_lines`); a sweep without a search imports none of its files."""

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
    import shlex

    from hpc_trainer.cli.common import print_json, say
    from hpc_trainer.cli.terminal import as_typed
    from hpc_trainer.errors import RunStateError
    from hpc_trainer.operate.find import configured_runs_dir, find_sweep
    from hpc_trainer.record.layout import OTHER_FOLDER
    from hpc_trainer.search.commands import best_paused, best_trial, read_view
    from hpc_trainer.search.folder import override_of
    from hpc_trainer.search.space import text_of

    paths = find_sweep(configured_runs_dir(runs_dir), sweep)
    if not paths.exists:
        raise RunStateError(f"there is no sweep {paths.name}. {OTHER_FOLDER}")
    search, trials = read_view(paths)
    trial, value, rung = best_trial(search, trials), None, None
    if trial is not None:
        value = trial.value
    elif (paused := best_paused(search, trials)) is not None:
        trial, rung = paused
        value = trial.at_rungs[rung]
    if trial is None or value is None:
        raise RunStateError(
            f"no trial of {paths.name} has a value of {search.settings.metric} yet. "
            f"Read: hpc-trainer status {paths.name}"
        )
    kept = [word for word in search.words if not word.startswith(("sweep_name=", "seed="))]
    params = [
        f"{key}={value if key in search.bases[0].choices else override_of(value)}"
        for key, value in trial.params.items()
    ]
    overrides = [*kept, *params, f"sweep_name={paths.name}_best", "seed=0,1,2"]
    command = f"hpc-trainer submit {shlex.join(overrides)}"
    if as_json:
        print_json({
            "sweep": paths.name, "run_id": trial.run_id, "trial": trial.number, "metric": search.settings.metric,
            "value": value, "rung": rung, "params": dict(trial.params), "again": overrides,
        })  # fmt: skip
        return
    at = "" if rung is None else f" at step {rung}; no trial is complete"
    say(f"{trial.run_id} (trial {trial.number}): {search.settings.metric} {value:.6g}{at}")
    for key, param in trial.params.items():
        say(f"  {key} = {text_of(param)}")
    print(as_typed(f"With other seeds: {command}"))
