"""show, diff and sweeps: facts about submitted runs, read from files only."""

from __future__ import annotations

import csv
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.cli.common import as_typed, print_json, print_next, print_table, short_duration
from hpc_trainer.cli.options import tell_notes
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, valid
from hpc_trainer.operate.find import configured_runs_dir, existing_sweep, list_sweeps, nothing_of_yours
from hpc_trainer.operate.show import COUNT_S, DEFAULT, SweepColumns, as_text, difference, find_run, sweep_lines, values
from hpc_trainer.operate.usage import AMOUNTS, checked_groups, total, usage
from hpc_trainer.record.environment import changes_of
from hpc_trainer.record.journal import Journal, read_first_weights

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
        as_typed(
            f"Command: {shlex.join(run.command)}"
            if run.command
            else "Command: unknown; the last submit did not submit this run"
        )
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
        print("They do not differ: the same configuration and the same frozen code.")


_DAY_S = 86_400.0


def run_sweeps(runs_dir: Path | None, *, tag: str | None, sizes: bool, as_json: bool) -> None:
    """Print a line for each sweep, or for each with this tag; `sizes` counts all files, however long it takes."""
    folder = configured_runs_dir(runs_dir)
    lines = sweep_lines(folder, seconds=math.inf if sizes else COUNT_S)
    all_tags = sorted({tag_name for line in lines for tag_name in line.more.get("tags", ())})
    if tag is not None:
        if lines and tag not in all_tags:
            raise ConfigError(
                f"--tag {tag}: no sweep has this tag. {valid(tag, all_tags) if all_tags else ''}".rstrip()
            )
        lines = [line for line in lines if tag in line.more.get("tags", ())]
    if as_json:
        plain = [dataclasses.asdict(line) for line in lines]
        print_json([{**line, **line.pop("more")} for line in plain])
        return
    if not lines:
        print(nothing_of_yours(folder))
        return
    contributed: Sequence[SweepColumns] = contributions("sweep_columns")
    print_table(
        ["SWEEP", "RUNS", "SUBMITTED", "AGE", "BY", *(word for columns in contributed for word in columns.headings),
         "COMMAND"],
        [
            [
                line.name, str(line.num_runs), line.submitted, _age(line.time), line.executor,
                *(cell for columns in contributed for cell in columns.cells(line.more)),
                _cut(shlex.join(line.command)) or "-",
            ]
            for line in lines
        ],
        least=("COMMAND", "BY", "SUBMITTED", *(column for columns in contributed for column in columns.least), "AGE"),
    )  # fmt: skip
    if any(line.more.get("size_bytes", 0) is None for line in lines):
        print(f"Files were counted for {COUNT_S:.0f} s; `hpc-trainer sweeps --sizes` counts all.")
    print_next(f"status {lines[0].name}")


def run_usage(names: Sequence[str], runs_dir: Path | None, *, by: str, as_csv: bool, as_json: bool) -> None:
    """Print the hours that sweeps used, in a row for each group.

    Raises:
        ConfigError: `by` names no column to group by.
        RunStateError: there is no such sweep.
    """
    keys = checked_groups([word.strip() for word in by.split(",") if word.strip()])
    folder = configured_runs_dir(runs_dir)
    notes: list[str] = []
    sweeps = [existing_sweep(folder, name) for name in dict.fromkeys(names)] if names else list_sweeps(folder)
    rows = usage(sweeps, keys, notes)
    tell_notes(notes)
    if as_json:
        print_json(rows)
        return
    if as_csv:
        out = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [*keys], lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
        return
    if not rows:
        told = f"No job of {', '.join(names)} has begun." if names else "No job of yours has begun."
        print(told if sweeps else nothing_of_yours(folder))
        return
    unit = "gpu" if any(row[f"gpu_hours_{what}"] for row in rows for what in AMOUNTS) else "core"
    cells = [[*(str(row[key]) for key in keys), str(row["jobs"]),
              *(f"{row[f'{unit}_hours_{what}']:.4g}" for what in AMOUNTS), f"{row['waiting_h']:.4g}"]
             for row in (*rows, total(rows, keys))]  # fmt: skip
    if len(rows) == 1:
        cells.pop()
    print_table([*(key.upper() for key in keys), "JOBS", *(what.upper() for what in AMOUNTS), "WAITING"], cells)
    print(f"In {'GPU' if unit == 'gpu' else 'core'}-hours; WAITING is hours in the queue, summed over jobs.")


def _age(begin: float) -> str:
    """Return the time since `begin` as `3 d` or `2h05m`."""
    if not begin:
        return "-"
    age_s = max(0.0, time.time() - begin)
    return f"{age_s / _DAY_S:.0f} d" if age_s >= 2 * _DAY_S else short_duration(age_s)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
