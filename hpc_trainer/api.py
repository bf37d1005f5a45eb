"""Python functions: `hpc_trainer.plan`, `submit`, `sync`, and for notebooks `results`, `metrics`, `status`, ..

`plan`, `submit` and `sync` take the overrides of the command line and return typed objects. `plan` writes nothing.
`submit` submits new and interrupted runs; calling it again submits no run twice. `wait` waits for their ends. `sync`
sends trackers the records that they lack. `results` and `metrics` return pandas frames if pandas is installed, else
lists of dicts. Notebooks show returned objects as tables.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, RunStateError, visible
from hpc_trainer.launch import stages
from hpc_trainer.launch.extend import extend_grid
from hpc_trainer.launch.freeze import Grid, freeze_grid
from hpc_trainer.launch.grids import Submitted, plan_grid, submit_grid
from hpc_trainer.launch.hydra_app import freeze_app, read_app
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.launch.searches import await_slots, search_kind
from hpc_trainer.operate.control import cancel_runs, is_whole_sweep
from hpc_trainer.operate.find import check_one_each, configured_runs_dir, find_sweep, names_runs, select
from hpc_trainer.operate.formats import frame, has_pandas, html_text
from hpc_trainer.operate.results import BestRun, ResultTable, named_apart, result_table
from hpc_trainer.operate.show import COUNT_S, SweepColumns, SweepLine, find_run, sweep_lines
from hpc_trainer.operate.sync import SyncResult, sync_named, tracker_named
from hpc_trainer.operate.waits import looks
from hpc_trainer.operate.where import parse_where
from hpc_trainer.operate.why import Why, explain
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.run_figures import metrics_now, outcome_metrics
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
    return _shown_as(Sweep, last)


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


T = TypeVar("T")
_CAUSE = 80  # characters of a cause in a table; `why` has all of it


class Best(BestRun):
    """Best trial of a search, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        row = {"run_id": self.run_id, "trial": self.trial, **self.params, self.metric: self.value}
        return html_text(ResultTable(rows=[row], axes=tuple(self.params), metrics=(self.metric,), costs=()))


class Rows(list[T]):
    """List of dicts or of objects with fields, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows: list[dict[str, Any]] = []
        for item in self:
            if isinstance(item, SweepLine):
                rows.append(_cells_of(item))
            else:
                rows.append(dict(item) if isinstance(item, dict) else dataclasses.asdict(item))  # type: ignore[call-overload]
        return html_text(ResultTable(rows=rows, axes=(), metrics=(), costs=()))


def _cells_of(line: SweepLine) -> dict[str, Any]:
    """Return a sweep's line as `sweeps` of the command line shows it, without its command."""
    contributed: Sequence[SweepColumns] = contributions("sweep_columns")
    cells = {"sweep": line.name, "runs": line.num_runs, "submitted": line.submitted, "by": line.executor}
    for columns in contributed:
        cells.update(zip(map(str.lower, columns.headings), columns.cells(line.more), strict=True))
    return cells


class Sweep(SweepStatus):
    """Status of every run of a sweep, shown as a table by a notebook, and as one line by a Python prompt."""

    def __repr__(self) -> str:
        return f"<Sweep {self.sweep.name}: {', '.join(f'{count} {state}' for state, count in self.counts.items())}>"

    def _repr_html_(self) -> str:
        metrics = {run_id: found for run_id, (found, _) in metrics_now(self, self.runs).items()}
        rows = []
        for run in self.runs:
            row = {"run_id": run.run_id, "state": run.state.value, "step": run.progress, "node": run.node}
            known = metrics[run.run_id]
            told = {**{key: known[key] for key in known.keys() & {"loss"}}, **outcome_metrics(run, known)}
            names = named_apart(told, {*row, "cause"})
            rows.append({**row, **{names[key]: value for key, value in told.items()}})
        columns = list(dict.fromkeys(column for row in rows for column in row))
        for row, run in zip(rows, self.runs, strict=True):
            row["cause"] = run.reason if run.reason is None or len(run.reason) <= _CAUSE else f"{run.reason[:_CAUSE]}.."
        notes = "".join(f"<p>{html.escape(visible(note))}</p>" for note in self.notes)
        table = ResultTable(rows=rows, axes=(), metrics=(), costs=(), chosen=[*columns, "cause"])
        return html_text(table) + notes


class Explanation(Why):
    """Explanation of one run, shown as text by a notebook, and as one line by a Python prompt."""

    def __repr__(self) -> str:
        return f"<Explanation of {self.run_id}: {self.state.value}, {self.diagnosis}: {visible(self.verdict)}>"

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.escape(visible(self.run_id))}</b> {self.state.value}: {html.escape(self.verdict)}</p>"]
        for title, lines in (("Because", self.evidence), ("Do", self.advice), ("Story", self.timeline)):
            items = "".join(f"<li>{html.escape(visible(line))}</li>" for line in lines)
            parts.append(f"<p>{title}:</p><ul>{items}</ul>" if lines else "")
        return "".join(parts)


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
    return _as_frame(table.rows, table.columns)


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
    return _shown_as(Best, best_of(find_sweep(_folder(runs_dir), sweep)))


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
    return _as_frame(records, list(dict.fromkeys(name for record in records for name in record)))


def status(sweep: str | None = None, *, runs_dir: Path | None = None) -> Sweep:
    """Return the status of every run of a sweep: `.runs`, `.counts`, `.notes`.

    Args:
        sweep: the sweep; None: the newest one.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: there is no such sweep.
    """
    return _shown_as(Sweep, read_status(find_sweep(_folder(runs_dir), sweep), is_look=True))


def why(run: str, *, sweep: str | None = None, runs_dir: Path | None = None) -> Explanation:
    """Return why a run is not done, the evidence for it, and what to do.

    Args:
        run: the run's id, its beginning or its end, or SWEEP/RUN.
        sweep: the sweep to look in; None: the newest one that has the run.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: no run, or more than one, matches.
    """
    sweep_status, run_ids = select(_folder(runs_dir), [run], sweep, is_look=True)
    if len(run_ids) != 1:
        raise RunStateError(f"{run} names {len(run_ids)} runs of {sweep_status.sweep.name}. Name one, by its id.")
    return _shown_as(Explanation, explain(sweep_status, sweep_status.run(run_ids[0])))


def sweeps(runs_dir: Path | None = None) -> Rows[SweepLine]:
    """Return the sweeps in the folder of sweeps, the latest submitted first; no scheduler is asked.

    Files are counted for at most 5 s, as by `hpc-trainer sweeps`; sizes and best values beyond that are None.

    Args:
        runs_dir: folder of sweeps; None: the configured folder.
    """
    return Rows(sweep_lines(_folder(runs_dir), seconds=COUNT_S))


def cancel(*names: str, sweep: str | None = None, save: bool = False, runs_dir: Path | None = None) -> list[str]:
    """Cancel runs or a whole sweep, and return the ids of the cancelled runs. Only `retry` restarts them.

    Args:
        names: a sweep, or ids of runs. At least one name or `sweep` is required.
        sweep: the sweep to look in; without names, the sweep to cancel.
        save: let running runs save a checkpoint, however long it takes.
        runs_dir: folder of sweeps; None: the configured folder.

    Raises:
        RunStateError: a name matches nothing or several runs, or no name was given.
        SlurmError: Slurm does not answer. Markers are written, and the same call may be repeated.
    """
    if not names and sweep is None:
        raise RunStateError("cancel needs the name of a sweep or of a run: it cannot be undone.")
    sweep_status, run_ids = select(_folder(runs_dir), list(names), sweep)
    check_one_each(sweep_status, list(names), sweep)
    is_whole = is_whole_sweep(sweep_status, run_ids, names_runs=names_runs(sweep_status.sweep, names, sweep))
    return cancel_runs(sweep_status, sweep_status.open_among(run_ids), save=save, is_whole=is_whole)


def _shown_as(kind: type[T], value: Any) -> T:
    """Return a copy of a dataclass object as `kind`, its subclass that a notebook shows."""
    return kind(**{field.name: getattr(value, field.name) for field in dataclasses.fields(value)})


def _folder(runs_dir: Path | None) -> Path:
    return configured_runs_dir(None if runs_dir is None else Path(runs_dir))


def _as_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame | Rows[dict[str, Any]]:
    if has_pandas():
        table: pd.DataFrame = frame(rows, columns)
        return table
    return Rows([{column: row.get(column) for column in columns} for row in rows])


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
