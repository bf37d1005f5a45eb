"""Python functions: `hpc_trainer.plan`, `submit`, `sync`, and for notebooks `results`, `metrics`, `status`, ..

`plan`, `submit` and `sync` take the overrides of the command line and return typed objects. `plan` writes nothing.
`submit` submits new and interrupted runs; calling it again submits no run twice. `wait` waits for their ends. `sync`
sends trackers the records that they lack. `results`, `metrics`, `usage` and `diff` return pandas frames if pandas is
installed, else lists of dicts. Notebooks show returned objects as tables (`operate/notebook.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch import stages
from hpc_trainer.launch.extend import extend_grid
from hpc_trainer.launch.freeze import Grid, freeze_grid
from hpc_trainer.launch.grids import Submitted, plan_grid, submit_grid
from hpc_trainer.launch.grids import retry as submit_again
from hpc_trainer.launch.hydra_app import freeze_app, read_app
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.launch.searches import await_slots, search_kind
from hpc_trainer.operate.control import (
    Held,
    Released,
    cancel_runs,
    hold_runs,
    is_whole_sweep,
    release_runs,
    runs_to_retry,
)
from hpc_trainer.operate.find import (
    check_one_each,
    configured_runs_dir,
    existing_sweep,
    find_sweep,
    list_sweeps,
    names_runs,
    select,
)
from hpc_trainer.operate.logs import log_files, read_logs
from hpc_trainer.operate.notebook import Best, Explanation, Rows, Sweep, Text, as_frame, shown_as
from hpc_trainer.operate.results import result_table, where_holds
from hpc_trainer.operate.show import COUNT_S, Labels, SweepLine, Value, difference, find_run, sweep_lines, values
from hpc_trainer.operate.sync import SyncResult, sync_named, tracker_named
from hpc_trainer.operate.waits import looks
from hpc_trainer.operate.where import parse_where
from hpc_trainer.operate.why import explain
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.status import SweepStatus, read_status

if TYPE_CHECKING:
    import pandas as pd


def plan(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False, extend: bool = False, app: str | None = None,
) -> SweepPlan:  # fmt: skip
    """Return what `submit` with the same arguments would do, and write nothing. `changed` lists runs with changed code.

    With `search=SAMPLER` among the overrides a `SearchPlan` is returned.

    Args:
        overrides: overrides as on the command line: `"experiment=digits"`, `"optim.lr=1e-3,3e-3"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: plan failed runs too.
        fresh: plan all runs, as if none existed yet.
        extend: start from the ends of runs with fewer train.num_steps. Otherwise `twins` lists runs that could do so.
        app: a Hydra app and its overrides, as after `--app`: `"train.py model=a,b lr=1e-3"`.

    Raises:
        ConfigError: a point of the grid is not valid. `problems` lists what the cluster would refuse; `notes` says
            if the cluster does not answer.
    """
    if (kind := search_kind(overrides)) is not None:
        _refuse_of_grids(fresh=fresh, extend=extend)
        return kind.plan_search(overrides, app=app, config_dirs=config_dirs, trust=trust)
    grid = _frozen(overrides, config_dirs, trust, app, extend=extend)
    return plan_grid(grid, retry_failed=retry_failed, fresh=fresh)


def submit(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False, extend: bool = False, app: str | None = None,
) -> Submitted:  # fmt: skip
    """Submit the new and interrupted runs of a grid; return at once. A repeated call is safe.

    With `search=SAMPLER` among the overrides the search's slots are submitted, and a `SubmittedSearch` is returned.

    Args:
        overrides: overrides as on the command line: `"experiment=digits"`, `"optim.lr=1e-3,3e-3"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: submit failed runs again; they resume from their newest checkpoint.
        fresh: start all runs from the beginning; their present folders are set aside.
        extend: start from the ends of runs with fewer train.num_steps.
        app: a Hydra app and its overrides, as after `--app`: `"train.py model=a,b lr=1e-3"`.

    Raises:
        ConfigError: a point of the grid is not valid, or the cluster would refuse it; nothing was written.
        RunStateError: `fresh` is set and one of the runs is running or pending.
        SubmitError: the scheduler refused an array, or another submit is working on this sweep.
        SlurmError: Slurm does not answer.
    """
    if (kind := search_kind(overrides)) is not None:
        _refuse_of_grids(fresh=fresh, extend=extend)
        return kind.submit_search(overrides, app=app, config_dirs=config_dirs, trust=trust)
    grid = _frozen(overrides, config_dirs, trust, app, extend=extend)
    command_line = ["hpc_trainer.submit", *overrides, *(() if app is None else (f"app={app}",))]
    return submit_grid(grid, retry_failed=retry_failed, fresh=fresh, command_line=command_line)


def plan_chain(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False,
) -> dict[str, SweepPlan]:  # fmt: skip
    """Return the plan of each stage of a chain by the stage's name, in order, and write nothing.

    Args:
        overrides: overrides as on the command line: `"grid=pretrain_finetune"`, `"finetune:train.num_steps=150"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: plan failed runs too.
        fresh: plan all runs, as if none existed yet.

    Raises:
        ConfigError: no override chooses a file with stages, or a point of a stage is not valid.
    """
    chain = _chain(overrides, config_dirs, trust)
    plans = stages.plan_chain(chain, retry_failed=retry_failed, fresh=fresh)
    return {stage.name: planned for stage, planned in zip(chain.stages, plans, strict=True)}


def submit_chain(
    *overrides: str, config_dirs: Sequence[Path] = (), trust: Sequence[str] = (), retry_failed: bool = False,
    fresh: bool = False,
) -> dict[str, Submitted]:  # fmt: skip
    """Submit the stages of a chain; return what each submitted, by the stage's name. A repeated call is safe.

    Args:
        overrides: overrides as on the command line: `"grid=pretrain_finetune"`, `"finetune:train.num_steps=150"`.
        config_dirs: folders of your own conf/ files, beside those of the project file.
        trust: packages that `_target_` and `train.main` may name, beside those of the project file.
        retry_failed: submit failed runs again; they resume from their newest checkpoint.
        fresh: start all runs from the beginning; their present folders are set aside.

    Raises:
        ConfigError: the plan of a stage has a problem; nothing was submitted.
        RunStateError, SubmitError, SlurmError: as in `submit`.
    """
    chain = _chain(overrides, config_dirs, trust)
    command_line = ["hpc_trainer.submit_chain", *overrides]
    done = stages.submit_chain(chain, retry_failed=retry_failed, fresh=fresh, command_line=command_line)
    return {stage.name: submitted for stage, submitted in zip(chain.stages, done, strict=True)}


def wait(sweep: str | None = None, *, runs_dir: Path | None = None) -> Sweep:
    """Wait until no run of a sweep is pending or running and no slot of its search is at work; return its status.

    Args:
        sweep: the sweep; None: the newest one.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: there is no such sweep.
        SlurmError: the sweep has a search, and Slurm does not answer.
    """
    paths = find_sweep(_folder(runs_dir), sweep)
    await_slots(paths)
    *_, last = looks(paths, set(read_status(paths, is_look=True).specs))
    return shown_as(Sweep, last)


def sync(*names: str, sweep: str | None = None, to: str | None = None, runs_dir: Path | None = None) -> SyncResult:
    """Send W&B or MLflow the logged records that they lack; a repeated call is safe, during and after training.

    Args:
        names: a sweep, or ids of runs; without names, the newest sweep.
        sweep: the sweep to look in; None: the newest one.
        to: `"wandb"` or `"mlflow"`, also for runs without a tracker; None: the tracker of each run.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        ConfigError: no run has a tracker, the tracker's package is not installed, or the tracker has no key.
        RunStateError: a name matches nothing, or another sync is working on this sweep. `failed` of the result lists
            what a tracker did not accept.
    """
    tracker = None if to is None else tracker_named(to, "to=")
    return sync_named(runs_dir or configured_runs_dir(), names, sweep, tracker)[1]


def results(
    sweep: str | None = None, *, group_by: str | Sequence[str] = (), where: str | None = None,
    columns: str | Sequence[str] = (), sort: str | None = None, runs_dir: Path | None = None,
) -> pd.DataFrame | Rows[dict[str, Any]]:  # fmt: skip
    """Return the table of `hpc-trainer results`, one row a run, with best values; a DataFrame if pandas is installed.

    Args:
        sweep: the sweep; None: the newest one.
        group_by: axes over which complete runs are averaged, such as `["seed"]` or `"seed"`.
        where: a condition, such as `"optim.lr>1e-3 and state=='COMPLETED'"`.
        columns: the columns, such as `["optim.lr", "eval_loss"]` or `"optim.lr,eval_loss"`; none: all.
        sort: the column to sort by, best first; `-` before its name reverses the order.
        runs_dir: folder of sweeps; None: the configured folder.

    Returns:
        Without pandas (`pip install 'hpc_trainer[pandas]'`) a list of dicts.

    Raises:
        RunStateError: there is no such sweep.
        ConfigError: a column is not there, or the condition cannot be read.
    """
    condition = None if where is None else parse_where(where, "where=")
    status_ = read_status(find_sweep(_folder(runs_dir), sweep), is_look=True)
    table = result_table(status_, typed=True, best=True).where(condition).means_over(_names(group_by))
    table = (table if sort is None else table.sorted_by(sort)).select(_names(columns))
    return as_frame(table.rows, table.columns)


def _names(given: str | Sequence[str]) -> Sequence[str]:
    """Return names that are given as a list, or as one text with commas between them, as on the command line."""
    return [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else given


def best(sweep: str | None = None, *, runs_dir: Path | None = None) -> Best:
    """Return the best trial of a search, and the overrides that train it again with other seeds.

    If no trial is complete, the best one at the highest rung that has a result is returned.

    Args:
        sweep: the search's sweep; None: the newest sweep.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: there is no such sweep, it is no search, or no trial has a value yet.
    """
    best_of = next(iter(contributions("best_of")), None)
    if best_of is None:
        raise RunStateError("this installation has no searches (hpc_trainer/search).")
    return shown_as(Best, best_of(find_sweep(_folder(runs_dir), sweep)))


def metrics(run: str, *, sweep: str | None = None, runs_dir: Path | None = None) -> pd.DataFrame | Rows[dict[str, Any]]:
    """Return the logged records of one run, a row for each step; a DataFrame if pandas is installed.

    Args:
        run: the run's id, its beginning or its end, or SWEEP/RUN.
        sweep: the sweep to look in; None: all, the newest first.
        runs_dir: folder of sweeps; None: the configured folder.

    Returns:
        Without pandas a list of dicts.

    Raises:
        RunStateError: no run, or more than one, matches.
    """
    match = find_run(_folder(runs_dir), run, sweep)
    records = read_metrics(match.sweep.run(match.spec.run_id).metrics)
    return as_frame(records, list(dict.fromkeys(name for record in records for name in record)))


def status(sweep: str | None = None, *, runs_dir: Path | None = None) -> Sweep:
    """Return the status of every run of a sweep: `.runs`, `.counts`, `.notes`.

    Args:
        sweep: the sweep; None: the newest one.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: there is no such sweep.
    """
    return shown_as(Sweep, read_status(find_sweep(_folder(runs_dir), sweep), is_look=True))


def why(run: str, *, sweep: str | None = None, runs_dir: Path | None = None) -> Explanation:
    """Return why a run is not done, the evidence for it, and what to do.

    Args:
        run: the run's id, its beginning or its end, or SWEEP/RUN.
        sweep: the sweep to look in; None: the newest one that has the run.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: no run, or more than one, matches.
    """
    sweep_status, run_id = _one_run(run, sweep, runs_dir)
    return shown_as(Explanation, explain(sweep_status, sweep_status.run(run_id)))


def sweeps(runs_dir: Path | None = None) -> Rows[SweepLine]:
    """Return the sweeps in the folder of sweeps, the latest submitted first; no scheduler is asked.

    Files are counted for at most 5 s, as by `hpc-trainer sweeps`; sizes and best values beyond that are None.

    Args:
        runs_dir: folder of sweeps; None: the configured folder.
    """
    return Rows(sweep_lines(_folder(runs_dir), seconds=COUNT_S))


def cancel(
    *names: str, sweep: str | None = None, where: str | None = None, save: bool = False, runs_dir: Path | None = None
) -> list[str]:
    """Cancel runs or a whole sweep, and return the ids of the cancelled runs. Only `retry` restarts them.

    Args:
        names: a sweep, or ids of runs. At least one name or `sweep` is required.
        sweep: the sweep to look in; without names, the sweep to cancel.
        where: a condition on the columns of `results`, such as `"optim.lr>1e-2 and state!='COMPLETED'"`.
        save: let running runs save a checkpoint, however long it takes.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: a name matches nothing or several runs, no name was given, or no run fulfils the condition.
        ConfigError: the condition cannot be read.
        SlurmError: Slurm does not answer. Markers are written, and the same call may be repeated.
    """
    if not names and sweep is None:
        raise RunStateError("cancel needs the name of a sweep or of a run: it cannot be undone.")
    sweep_status, run_ids, is_sweep = _named("cancel", names, sweep, runs_dir)
    run_ids = where_holds(sweep_status, run_ids, where, "where=")
    is_whole = where is None and is_whole_sweep(sweep_status, run_ids, names_runs=not is_sweep)
    return cancel_runs(sweep_status, sweep_status.open_among(run_ids), save=save, is_whole=is_whole)


def hold(*names: str, sweep: str | None = None, save: bool = False, runs_dir: Path | None = None) -> Held:
    """Hold waiting runs, or a whole sweep: they do not start until `release`.

    Args:
        names: a sweep, or ids of runs. At least one name or `sweep` is required.
        sweep: the sweep to look in; without names, the sweep to hold.
        save: hold running runs too; they save a checkpoint and leave their nodes.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: a name matches nothing or several runs, or no name was given.
        SlurmError: Slurm does not answer. Markers are written, and the same call may be repeated.
    """
    sweep_status, run_ids, is_whole = _named("hold", names, sweep, runs_dir)
    return hold_runs(sweep_status, sweep_status.open_among(run_ids), save=save, is_whole=is_whole)


def release(*names: str, sweep: str | None = None, runs_dir: Path | None = None) -> Released:
    """Release held runs, or a held sweep; submit again the runs that left their nodes (`.to_submit` of the result).

    Args:
        names: a sweep, or ids of runs. At least one name or `sweep` is required.
        sweep: the sweep to look in; without names, the sweep to release.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: a name matches nothing or several runs, no name was given, or the whole sweep is held.
        SubmitError, SlurmError: as in `submit`; the same call may be repeated.
    """
    sweep_status, run_ids, is_whole = _named("release", names, sweep, runs_dir)
    done = release_runs(sweep_status, sweep_status.open_among(run_ids), is_whole=is_whole)
    if done.to_submit:
        submit_again(sweep_status.sweep, done.to_submit)
    return done


def retry(
    *names: str, sweep: str | None = None, where: str | None = None, changes: Sequence[str] = (),
    runs_dir: Path | None = None,
) -> Submitted:  # fmt: skip
    """Submit failed and interrupted runs again, with their frozen code; they continue from their checkpoints.

    A cancelled run is submitted if its own name is given, or if its sweep's name is given and cancelled it.

    Args:
        names: a sweep, or ids of runs; without names, the newest sweep.
        sweep: the sweep to look in.
        where: a condition on the columns of `results`, such as `"state=='OUT_OF_MEMORY'"`.
        changes: overrides of `cluster.*` and `hardware.*` that hold from now on.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: a name matches nothing, or no run has failed or was interrupted.
        ConfigError: the condition or a change is wrong.
        SubmitError, SlurmError: as in `submit`.
    """
    sweep_status, run_ids = select(_folder(runs_dir), list(names), sweep)
    run_ids = where_holds(sweep_status, run_ids, where, "where=")
    wanted = runs_to_retry(sweep_status, run_ids, names, is_chosen=where is not None)
    return submit_again(sweep_status.sweep, wanted.run_ids, take_back=wanted.takes_back, changes=changes)


def logs(
    run: str, *, sweep: str | None = None, rank: int | None = 0, tail: int | None = None, runs_dir: Path | None = None
) -> Text:
    """Return what a run printed, over all its attempts.

    Args:
        run: the run's id, its beginning or its end, or SWEEP/RUN.
        sweep: the sweep to look in; None: the newest one that has the run.
        rank: the rank, beside the one that failed first; None: every rank.
        tail: the number of last lines of each file; None: all lines.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: no run, or more than one, matches.
    """
    sweep_status, run_id = _one_run(run, sweep, runs_dir)
    return Text("\n".join(read_logs(log_files(sweep_status, sweep_status.run(run_id), rank), tail)))


def show(run: str, *, sweep: str | None = None, runs_dir: Path | None = None) -> Rows[Value]:
    """Return every key of a run's frozen configuration: `.key`, `.value`, and where it came from (`.source`, `.said`).

    Args:
        run: the run's id, its beginning or its end, or SWEEP/RUN.
        sweep: the sweep to look in; None: all, the newest first.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: no run, or more than one, matches.
    """
    return Rows(values(find_run(_folder(runs_dir), run, sweep).spec))


def diff(*runs: str, sweep: str | None = None, runs_dir: Path | None = None) -> pd.DataFrame | Rows[dict[str, Any]]:
    """Return the keys in which runs differ, a row for each key and a column for each run.

    Args:
        runs: two or more runs, by their ids, beginnings or ends, or SWEEP/RUN.
        sweep: the sweep to look in; None: all, the newest first.
        runs_dir: folder of sweeps; None: the configured folder.

    Returns:
        A DataFrame; without pandas a list of dicts.

    Raises:
        ConfigError: fewer than two runs are named.
        RunStateError: a name matches no run, or more than one.
    """
    if len(runs) < 2:
        raise ConfigError("diff compares runs: name two or more.")
    rows = difference([find_run(_folder(runs_dir), run, sweep) for run in runs])
    return as_frame([{"key": key, **dict(zip(runs, row, strict=True))} for key, row in rows], ["key", *runs])


def report(
    *names: str, output: str | Path | None = None, plain: bool = False, warmup_steps: int | None = None,
    exports: Sequence[str | Path] = (), runs_dir: Path | None = None,
) -> Path:  # fmt: skip
    """Write the page of a sweep, or one page that compares several, and return its path.

    Args:
        names: the sweeps; without names, the newest one.
        output: file of the page; None: `report.html` (or `compare.html`) in the first sweep's folder.
        plain: write still pictures without scripts, also if plotly is installed.
        warmup_steps: number of first steps that measurements of speed leave out; None: the usual number.
        exports: folders of measured exports, which are drawn too.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: there is no such sweep, or a folder of `exports` has no measured export.
        ConfigError: an argument is wrong, or several sweeps are named and plotly is not installed.
    """
    from hpc_trainer.operate.report.write import PageOptions, place_of_page, write_page

    options = PageOptions(
        output=None if output is None else Path(output), warmup_steps=warmup_steps,
        exports=[Path(folder) for folder in exports], plain=plain,
    )  # fmt: skip
    folder = _folder(runs_dir)
    paths = [find_sweep(folder, name) for name in dict.fromkeys(names)] or [find_sweep(folder, None)]
    page = place_of_page(paths, options)
    write_page([read_status(path, is_look=True) for path in paths], page, options)
    return page


def usage(
    *names: str, by: str | Sequence[str] = "sweep", runs_dir: Path | None = None
) -> pd.DataFrame | Rows[dict[str, Any]]:
    """Return the GPU- and core-hours of sweeps: requested, used, redone, idle, and hours in the queue.

    Args:
        names: the sweeps; without names, all sweeps of yours.
        by: columns to group by: `sweep`, `person`, `account`, `month`.
        runs_dir: folder of sweeps; None: the configured folder.

    Returns:
        A DataFrame; without pandas a list of dicts. `is_by_slurm` is False for hours from the runs' own files.

    Raises:
        ConfigError: `by` names no column to group by.
        RunStateError: there is no such sweep.
    """
    from hpc_trainer.operate import usage as hours

    keys = hours.checked_groups(_names(by), "by=")
    folder = _folder(runs_dir)
    paths = [existing_sweep(folder, name) for name in dict.fromkeys(names)] if names else list_sweeps(folder)
    notes: list[str] = []
    rows = hours.usage(paths, keys, notes)
    for line in notes:
        warnings.warn(line, stacklevel=2)
    return as_frame(rows, list(rows[0]) if rows else keys)


def tag(sweep: str, *tags: str, remove: str | Sequence[str] = (), runs_dir: Path | None = None) -> Labels:
    """Add tags to a sweep and remove others; return its tags and its note. Without tags, only return them.

    Args:
        sweep: the sweep.
        tags: tags to add.
        remove: tags to remove.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: there is no such sweep.
        ConfigError: a tag is not legal, or a tag to remove is not there.
    """
    return _label(sweep, runs_dir, add=tags, remove=_names(remove))


def note(sweep: str, text: str | None = None, *, runs_dir: Path | None = None) -> Labels:
    """Write a note on a sweep, and return its tags and its note. Without a text, only return them.

    Args:
        sweep: the sweep.
        text: the note; "" removes it; None: it stays as it is.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: there is no such sweep.
        ConfigError: the note is too long.
    """
    return _label(sweep, runs_dir, note=text)


def _label(sweep: str, runs_dir: Path | None, **changes: Any) -> Labels:
    label = next(iter(contributions("labels")), None)
    if label is None:
        raise RunStateError("this installation has no tags and notes (hpc_trainer/tidy).")
    labels: Labels = label(existing_sweep(_folder(runs_dir), sweep), **changes)
    return labels


def _named(
    verb: str, names: Sequence[str], sweep: str | None, runs_dir: Path | None
) -> tuple[SweepStatus, list[str], bool]:
    """Return the status of the named sweep, the ids of the named runs, and True if the sweep as a whole is named.

    Raises:
        RunStateError: nothing is named, or a name matches nothing or several runs.
    """
    if not names and sweep is None:
        raise RunStateError(f"{verb} needs the name of a sweep or of a run.")
    sweep_status, run_ids = select(_folder(runs_dir), list(names), sweep)
    check_one_each(sweep_status, list(names), sweep)
    return sweep_status, run_ids, not names_runs(sweep_status.sweep, names, sweep)


def _one_run(run: str, sweep: str | None, runs_dir: Path | None) -> tuple[SweepStatus, str]:
    """Return the status of the sweep of a run, and the run's id. Raises RunStateError if not just one run matches."""
    sweep_status, run_ids = select(_folder(runs_dir), [run], sweep, is_look=True)
    if len(run_ids) != 1:
        raise RunStateError(f"{run} names {len(run_ids)} runs of {sweep_status.sweep.name}. Name one, by its id.")
    return sweep_status, run_ids[0]


def _folder(runs_dir: Path | None) -> Path:
    return configured_runs_dir(None if runs_dir is None else Path(runs_dir))


def _refuse_of_grids(*, fresh: bool, extend: bool) -> None:
    for argument, is_given in (("fresh", fresh), ("extend", extend)):
        if is_given:
            raise ConfigError(f"{argument}=True is for grids. For a search that begins anew, use another sweep_name.")


def _chain(overrides: Sequence[str], config_dirs: Sequence[Path], trust: Sequence[str]) -> stages.Chain:
    chain = stages.freeze_chain(overrides, config_dirs=config_dirs, trust=trust)
    if chain is None:
        raise ConfigError(
            "these overrides choose no file with sweep.stages (docs/chain.md). Add grid=FILE, or call plan and submit."
        )
    return chain


def _frozen(
    overrides: Sequence[str], config_dirs: Sequence[Path], trust: Sequence[str], app: str | None, *, extend: bool
) -> Grid:
    if app is None:
        grid = freeze_grid(overrides, config_dirs=config_dirs, trust=trust)
    else:
        grid = freeze_app(read_app(app), overrides, config_dirs=config_dirs, trust=trust)
    return extend_grid(grid) if extend else grid
