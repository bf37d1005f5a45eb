"""show, diff and sweeps: facts about submitted runs, read from files only."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.cli.common import print_json, print_next, print_table
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.find import configured_runs_dir
from hpc_trainer.operate.show import DEFAULT, as_text, difference, find_run, sweep_lines, values
from hpc_trainer.record.environment import changes_of
from hpc_trainer.record.journal import Journal, read_first_weights
from hpc_trainer.record.layout import OTHER_FOLDER

_WIDEST = 60


def run_show(name: str, sweep: str | None, runs_dir: Path | None, *, every_key: bool, as_json: bool) -> None:
    """Print the configuration of one run; without `every_key`, only keys that are not at their default."""
    run = find_run(configured_runs_dir(runs_dir), name, sweep)
    rows = values(run.spec)
    paths = run.sweep.run(run.spec.run_id)
    folder, first_weights = paths.folder, read_first_weights(paths)
    changes = changes_of(paths, len(Journal(paths).read()))
    if as_json:
        facts = {"run_id": run.spec.run_id, "sweep": run.sweep.name, "folder": str(folder), "command": run.command}
        loaded = {} if first_weights is None else {"first_weights": dataclasses.asdict(first_weights)}
        more = {"environment_changes": changes, "values": [dataclasses.asdict(row) for row in rows]}
        print_json({**facts, "code": run.code, **loaded, **more})
        return
    print(as_typed(f"{run.spec.run_id}, of sweep {run.sweep.name}"))
    print(as_typed(f"Folder: {folder}"))
    print(
        as_typed(f"Command: {shlex.join(run.command)}" if run.command else "Command: an earlier submit than the last")
    )
    print(f"Frozen code: {run.code[:12] if run.code else 'none'}")
    if first_weights is not None:
        print(as_typed(first_weights.line()))
    for line in changes:
        print(as_typed(f"{line[0].upper()}{line[1:]}"))
    shown = [row for row in rows if every_key or row.source != DEFAULT]
    print_table(
        ["KEY", "VALUE", "FROM"],
        [[row.key, _cut(as_text(row.value)), row.said or row.source] for row in shown],
    )
    if len(shown) < len(rows):
        print(f"{len(rows) - len(shown)} keys at their default are left out: --all shows them.")


def run_diff(names: Sequence[str], sweep: str | None, runs_dir: Path | None, *, as_json: bool) -> None:
    """Print the keys in which runs differ.

    Raises:
        ConfigError: fewer than two runs are named.
    """
    if len(names) < 2:
        raise ConfigError("diff compares runs: name two or more. hpc-trainer status lists them.")
    folder = configured_runs_dir(runs_dir)
    runs = [find_run(folder, name, sweep) for name in names]
    rows = difference(runs)
    ids = [run.spec.run_id for run in runs]
    headings = ids if len({*ids}) == len(ids) else [f"{run.sweep.name}/{run.spec.run_id}" for run in runs]
    if as_json:
        print_json([{"key": key, **dict(zip(names, row, strict=True))} for key, row in rows])
    elif rows:
        print_table(
            ["KEY", *headings],
            [[key, *(_cut(as_text(value)) for value in row)] for key, row in rows],
        )
    else:
        print("They differ in nothing: the same configuration and the same frozen code.")


def run_sweeps(runs_dir: Path | None, *, as_json: bool) -> None:
    """Print a line for each sweep."""
    folder = configured_runs_dir(runs_dir)
    lines = sweep_lines(folder)
    if as_json:
        print_json([dataclasses.asdict(line) for line in lines])
        return
    if not lines:
        print(f"{folder.absolute()} holds no sweep of yours. {OTHER_FOLDER}")
        return
    print_table(
        ["SWEEP", "RUNS", "SUBMITTED", "BY", "COMMAND"],
        [
            [
                line.name, str(line.num_runs),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(line.time)) if line.time else "-",
                line.executor, _cut(shlex.join(line.command)) or "-",
            ]
            for line in lines
        ],
    )  # fmt: skip
    print_next(f"status {lines[0].name}")


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
