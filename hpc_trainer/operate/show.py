"""Frozen configuration of a run: every key, the source of its value, and differences between runs; no scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.load import plain_value
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.domains import contributions
from hpc_trainer.errors import RunStateError
from hpc_trainer.operate.find import find_sweep, fits, in_one_sweep, list_sweeps
from hpc_trainer.record.known_runs import known_by_files
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import read_json
from hpc_trainer.record.spec import RunSpec, leaves, number_text
from hpc_trainer.record.submissions import Ledger, latest_of_each_run

LINE, FILE, FILLED, DEFAULT = "command line", "file", "filled in", "default"
# Keys that `validate` computes if they are not given (config/rules/validate.py).
_FILLED_IN = (
    "train.micro_batch_size",
    "train.grad_accum_steps",
    "train.command_dir",
    "train.command_from",
    "schedule.warmup_steps",
    "init_from.digest",
    "replay.data",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A run as its sweep's files describe it."""

    sweep: SweepPaths
    spec: RunSpec
    code: str | None
    """Digest of the frozen code of the run's newest submission; None without frozen code or without a submission."""

    @property
    def command(self) -> list[str]:
        """Command line of the sweep's newest submit if that submit named this run, else empty."""
        newest = read_json(self.sweep.sweep) or {}
        command = newest.get("command") if self.spec.run_id in (newest.get("run_ids") or ()) else None
        return [str(word) for word in command] if isinstance(command, list) else []


@dataclass(frozen=True, slots=True)
class Value:
    """A key of a run's configuration."""

    key: str
    value: Any
    source: str
    """`LINE`, `FILE` (a file of conf/ or of your own), `FILLED` (computed from other keys), or `DEFAULT`."""
    said: str = ""
    """Override on the command line."""


class NoRunError(RunStateError):
    """A name that no run has."""


def find_run(runs_dir: Path, name: str, sweep: str | None) -> Known:
    """Return the single run whose id is, begins with or ends with `name`, from the newest sweep that has such a run.

    SWEEP/RUN names the sweep.

    Raises:
        NoRunError: no run matches.
        RunStateError: several runs match, or `name` is the name of a sweep.
    """
    asked = name
    names, within = in_one_sweep(runs_dir, [name], sweep)
    if names:
        (name,), sweep = names, within
    of_that_name = None
    sweeps = [find_sweep(runs_dir, sweep)] if sweep is not None else list_sweeps(runs_dir.absolute())
    for paths in sweeps:
        ledger, specs = known_by_files(paths)
        of_that_name = specs if paths.name == name.rstrip("/") else of_that_name
        run_ids = [name] if name in specs else [run_id for run_id in specs if fits(run_id, name)]
        if len(run_ids) > 1:
            raise RunStateError(f"{name} may be {', '.join(run_ids[:5])}. Write more of the id.")
        if run_ids:
            return Known(sweep=paths, spec=specs[run_ids[0]], code=_code(ledger, run_ids[0]))
    if of_that_name is not None:
        first = next(iter(of_that_name), "RUN")
        raise RunStateError(f"{name.rstrip('/')} is a sweep: name one of its runs, as {first}.")
    raise NoRunError(f"no run is named {asked!r} in {runs_dir}. `hpc-trainer sweeps` lists the sweeps.")


def _code(ledger: Ledger, run_id: str) -> str | None:
    newest = latest_of_each_run(ledger.submissions).get(run_id)
    return None if newest is None else newest[0].code


def values(spec: RunSpec) -> list[Value]:
    """Return every key of the run with its value and source, in the order of the configuration."""
    said = {_key(line): line for line in spec.overrides}
    fresh = dict(leaves(_defaults(spec)))
    return [_value(key, value, said, fresh) for key, value in leaves(spec.config)]


def _defaults(spec: RunSpec) -> dict[str, Any]:
    """Return the defaults of the run's sections; for a section with required fields, the run's own values."""
    config = spec.typed()
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        part = getattr(config, field.name)
        kind: Any = type(part)
        with contextlib.suppress(TypeError):
            part = kind() if dataclasses.is_dataclass(part) else getattr(TrainConfig(), field.name)
        defaults[field.name] = plain_value(part)
    return defaults


def _value(key: str, value: Any, said: Mapping[str, str], fresh: Mapping[str, Any]) -> Value:
    parts = key.split(".")
    named = next((said[name] for count in range(len(parts), 1, -1) if (name := ".".join(parts[:count])) in said), None)
    if named is None and (len(parts) == 1 or parts[1:] == ["name"]):  # model=cnn is the choice of model.name
        named = said.get(parts[0])
    if named is not None:
        return Value(key, value, LINE, named)
    if key in fresh and value == fresh[key]:
        return Value(key, value, DEFAULT)
    if key in _FILLED_IN:
        return Value(key, value, FILLED)
    return Value(key, value, FILE, said.get(parts[0], "") if len(parts) > 1 else "")


def _key(line: str) -> str:
    return line.lstrip("+~").partition("=")[0]


def difference(runs: Sequence[Known]) -> list[tuple[str, list[Any]]]:
    """Return (key, its value in each run) for keys whose values differ; None if a run has no such key."""
    flat = [{**dict(leaves(run.spec.config)), "frozen code": run.code and run.code[:12]} for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [(key, [config.get(key) for config in flat]) for key in keys]
    return [(key, row) for key, row in rows if any(value != row[0] for value in row)]


def as_text(value: Any) -> str:
    """Return a value as the command line writes it."""
    if isinstance(value, float) and math.isfinite(value):
        return number_text(value)
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLine:
    """A sweep as its files describe it."""

    name: str
    num_runs: int
    time: float
    """Time of the latest submit, in seconds since the epoch; 0.0 if it is not known."""
    executor: str
    command: list[str]
    more: dict[str, Any]
    """Values that domains contribute, by name (`SweepColumns.of`)."""

    @property
    def submitted(self) -> str:
        """Day and time of the latest submit, by this machine's clock; `-` if it is not known."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.time)) if self.time else "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepColumns:
    """Columns of `sweeps` that a domain contributes (hook `sweep_columns`)."""

    headings: tuple[str, ...]
    of: Callable[[SweepPaths, Ledger, Mapping[str, RunSpec], float], dict[str, Any]]
    """Return the values of a sweep for JSON; a value that is not known by a deadline of `time.monotonic` is None."""
    cells: Callable[[Mapping[str, Any]], Sequence[str]]
    """Return the texts under `headings` for the values that `of` returned."""
    least: tuple[str | tuple[str, int], ...] = ()
    """Columns that a narrow terminal drops or cuts (cli/common.py, `print_table`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Tags, in order of the alphabet, and note of a sweep (hook `labels`)."""

    tags: tuple[str, ...] = ()
    note: str = ""


COUNT_S = 5.0
"""Seconds in which `sweeps` counts files; what takes longer is counted by the next call, or with --sizes."""


def sweep_lines(runs_dir: Path, *, seconds: float = 0.0) -> list[SweepLine]:
    """Return a line for each of the user's sweeps, the latest submitted first; files are counted for `seconds`."""
    deadline = time.monotonic() + seconds
    return [_line(paths, deadline) for paths in list_sweeps(runs_dir)]


def _line(paths: SweepPaths, deadline: float) -> SweepLine:
    ledger, specs = known_by_files(paths)
    newest = ledger.submissions[-1] if ledger.submissions else None
    command = (read_json(paths.sweep) or {}).get("command")
    return SweepLine(
        name=paths.name, num_runs=len(specs), time=newest.time if newest else 0.0,
        executor=newest.executor if newest else "-",
        command=[Path(str(command[0])).name, *map(str, command[1:])] if isinstance(command, list) and command else [],
        more={name: value for columns in contributions("sweep_columns")
              for name, value in columns.of(paths, ledger, specs, deadline).items()},
    )  # fmt: skip
