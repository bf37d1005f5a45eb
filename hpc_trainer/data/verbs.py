"""The verbs of `hpc-trainer data`, and their output. No torch: a separate process reads samples."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpc_trainer.cli.common import console, ended_by_signals, print_json, print_next, print_table, say, short_number
from hpc_trainer.cli.options import Chosen, Given, only_point
from hpc_trainer.data.images.index import build_index
from hpc_trainer.data.prepare.images import ImageOptions, prepare_images
from hpc_trainer.data.prepare.job import BROKEN, Prepared, Settings
from hpc_trainer.data.prepare.tokens import TokenOptions, prepare_tokens
from hpc_trainer.errors import ConfigError, ExitCode
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.runtime.torch_process import Tell, ask

_READER = "hpc_trainer.data.reading"
"""Module that a process with torch runs for `data check` and `data bench`."""
_PROBLEMS_SHOWN = 20
_MODELS = {"data=image_shards": "model=resnet18", "data=tokens": "model=gpt"}
_UNITS = {"images": "pictures", "tokens": "bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of `data check`. `problems` has the first 1,000 of `num_problems`, with split, file, cause and offset."""

    splits: Mapping[str, Mapping[str, int | None]]
    """Split -> the number of its `samples` (None for a stream) and how many were `read`."""
    num_problems: int
    problems: Sequence[Mapping[str, Any]]
    duplicates: Mapping[str, Any]
    """`num` samples of eval whose inputs are in train too; `pairs` has the first few as (index in train, in eval)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Measurement with one number of loader processes. `batch_ms` is the time between batches; 1 MB is 10^6 bytes."""

    num_workers: int
    samples_per_s: float
    batch_ms: float
    mb_per_s: float
    first_batch_s: float
    num_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of `data bench`. `shares` are fractions of a sample's time, by name; empty except for pictures."""

    batch_size: int
    num_samples: int
    rows: tuple[Rate, ...]
    shares: Mapping[str, float]

    def enough(self, step_ms: float) -> int | None:
        """Return the fewest measured processes with which a step of `step_ms` never waits; None if all are too few."""
        fit = [row.num_workers for row in self.rows if row.batch_ms <= step_ms]
        return min(fit, default=None)


def check_data(config: Mapping[str, Any], *, sample: int | None, num_workers: int, tell: Tell) -> Checked:
    """Read every sample of both splits, or `sample` of each, as training would.

    Args:
        config: a frozen configuration.
        tell: called with (done, total) samples.

    Raises:
        RunStateError: the reading process was killed. Otherwise the error of that process is raised.
    """
    return Checked(**ask(_READER, "check", {"config": config, "sample": sample, "num_workers": num_workers}, tell))


def bench_data(config: Mapping[str, Any], *, workers: Sequence[int], seconds: float, tell: Tell) -> Measured:
    """Load batches for `seconds` with each number of loader processes. The errors are those of `check_data`."""
    answer = ask(_READER, "bench", {"config": config, "workers": list(workers), "seconds": seconds}, tell)
    return Measured(**{**answer, "rows": tuple(Rate(**row) for row in answer["rows"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """Shared options of the `data prepare` commands; None if an option is not given."""

    workers: int | None
    part: str | None
    slurm: list[str] | None
    parts: int
    fresh: bool
    skip_broken: bool
    as_json: bool

    @property
    def settings(self) -> Settings:
        """Settings of the call.

        Raises:
            ConfigError: a number is out of range.
        """
        return Settings(
            num_workers=_num_processes(self.workers), part=_part(self.part), fresh=self.fresh,
            skip_broken=self.skip_broken,
        )  # fmt: skip


def run_prepare_images(source: Path, to: Path, options: ImageOptions, how: How) -> None:
    """Prepare pictures, on this machine or on Slurm."""
    arguments = [str(source.absolute()), "--to", str(to.absolute()), *_as_arguments(options)]
    _prepare("images", arguments, to, how, partial(prepare_images, source, to, options))


def run_prepare_tokens(sources: Sequence[str], to: Path, options: TokenOptions, how: How) -> None:
    """Prepare texts, on this machine or on Slurm."""
    arguments = [
        *(str(Path(source).absolute()) for source in sources),
        "--to",
        str(to.absolute()),
        *_as_arguments(options),
    ]
    _prepare("tokens", arguments, to, how, partial(prepare_tokens, sources, to, options))


def run_index(folder: Path, *, as_json: bool) -> None:
    """Write an index for shards and print its size."""
    index = build_index(folder)
    if as_json:
        print_json({"folder": str(folder), "samples": len(index.rows), "shards": len(index.shards)})
        return
    shards = f"{len(index.shards)} shard{'' if len(index.shards) == 1 else 's'}"
    print(f"{folder}: {len(index.rows):,} samples in {shards}. Index: {folder / 'index.json'}")


def run_check(given: Given, *, sample: int | None, workers: int | None, as_json: bool) -> None:
    """Check all data; exit with 0 if they are right, 1 if there are problems, 2 if the configuration is wrong."""
    spec = _data_of(given, "data check", "train.global_batch_size=1")  # so that small sets can be checked too
    if sample is not None and sample < 1:
        raise ConfigError(f"--sample={sample} must be 1 or more. Use 100, or leave it out to read all.")
    with ended_by_signals(), _bar("samples", quiet=as_json) as tell:
        checked = check_data(spec.config, sample=sample, num_workers=_num_processes(workers), tell=tell)
    if as_json:
        print_json(dataclasses.asdict(checked))
    else:
        _show_checked(checked)
    if checked.num_problems:
        sys.exit(ExitCode.FAILED)


def run_bench(given: Given, *, workers: str, seconds: float, step_ms: float | None, as_json: bool) -> None:
    """Print a table of rates with a row for each number of processes."""
    numbers = [int(word) for word in workers.split(",") if word.isdecimal()]
    if not numbers or len(numbers) != len(workers.split(",")):
        raise ConfigError(f"--workers={workers} must be numbers with commas between them. Use --workers 0,2,4.")
    if seconds <= 0 or (step_ms is not None and step_ms <= 0):
        raise ConfigError("--seconds and --step-ms must be greater than 0.")
    spec = _data_of(given, "data bench")
    with ended_by_signals(), _bar("measured", quiet=as_json) as tell:
        measured = bench_data(spec.config, workers=sorted(set(numbers)), seconds=seconds, tell=tell)
    enough = None if step_ms is None else measured.enough(step_ms)
    if as_json:
        print_json({**dataclasses.asdict(measured), "step_ms": step_ms, "enough_workers": enough})
    else:
        _show_measured(measured, step_ms, enough)


def _data_of(given: Given, verb: str, *neutral: str) -> RunSpec:
    """Return the single configuration, with neutral choices for the sections that the command line does not name.

    Without these choices, a default model or batch could refuse the data.

    Args:
        given: the command line.
        verb: the command.
        neutral: overrides that suit any data; each is dropped if the command line names its section.
    """
    from hpc_trainer.cli.grid_verbs import freeze_here

    named = {word.lstrip("+~").partition("=")[0].partition(".")[0] for word in given.overrides or ()}
    defaults = ["model=custom", "model._target_=torch.nn.Identity", *neutral] if "experiment" not in named else []
    here = given.here(verb)
    kept = [word for word in defaults if word.partition("=")[0].partition(".")[0] not in named]
    grid = freeze_here(dataclasses.replace(here, overrides=[*(here.overrides or ()), *kept]))
    spec = only_point(grid, f"{verb} takes", "Choose one point.")
    if spec.is_own_loop:
        raise ConfigError(
            f"{verb} reads the data that data= names, and train.main or train.command reads data of its own."
        )
    return spec


def _show_checked(checked: Checked) -> None:
    for split, numbers in checked.splits.items():
        if numbers["samples"] is None:
            print(f"{split}: a stream, which has no samples by number; it was not read")
        else:
            print(f"{split}: {numbers['read']:,} of {numbers['samples']:,} samples read")
    for problem in checked.problems[:_PROBLEMS_SHOWN]:
        place = problem["file"] if problem["offset"] is None else f"{problem['file']} at byte {problem['offset']}"
        say(f"{place}: {problem['cause']}")
    if checked.num_problems > _PROBLEMS_SHOWN:
        print(f".. and {checked.num_problems - _PROBLEMS_SHOWN:,} more; --json has the first 1,000")
    if checked.duplicates["num"]:
        row, other = checked.duplicates["pairs"][0]
        print(
            f"Note: {checked.duplicates['num']:,} sample(s) of eval have the inputs of one of train. The first: "
            f"{other} of eval, {row} of train. Metrics of these samples are metrics of training data."
        )
    print(f"{checked.num_problems:,} problem(s)" if checked.num_problems else "No problems.")


def _show_measured(measured: Measured, step_ms: float | None, enough: int | None) -> None:
    print_table(
        ["WORKERS", "SAMPLES/S", "MS A BATCH", "MB/S", "FIRST BATCH"],
        [
            [str(row.num_workers), short_number(row.samples_per_s), f"{row.batch_ms:.3g}", short_number(row.mb_per_s),
             f"{row.first_batch_s:.2g}s"] for row in measured.rows
        ],
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    print(f"Batches of {measured.batch_size} samples, {measured.num_samples:,} in all; {cores} cores here.")
    if measured.shares:
        print("Of a sample's time: " + ", ".join(f"{share:.0%} {name}" for name, share in measured.shares.items()))
    if step_ms is None:
        return
    if enough is not None:
        print(f"With data.num_workers={enough} a step of {step_ms:g} ms never waits for a batch.")
        return
    best = min(measured.rows, key=lambda row: row.batch_ms)
    print(
        f"A step of {step_ms:g} ms waits in each case: with {best.num_workers} process(es) a batch takes "
        f"{best.batch_ms:.3g} ms. Try more processes, smaller pictures, or data prepare."
    )


def _prepare(
    kind: str, arguments: list[str], to: Path, how: How, prepare: Callable[[Settings, Tell], Prepared]
) -> None:
    began = time.monotonic()
    if how.slurm is not None:
        if how.part is not None:
            raise ConfigError(
                f"--part={how.part} is for one job, but --slurm gives each job its own part. Keep one of the two."
            )
        done = prepare(dataclasses.replace(how.settings, plan_only=True), lambda *_: None)
        if not done.is_whole:
            _submit_parts(kind, arguments, to, how)
            return
    else:
        with ended_by_signals(), _bar(_UNITS[kind], quiet=how.as_json) as tell:
            done = prepare(how.settings, tell)
    if how.as_json:
        document = dataclasses.asdict(done)
        document["words"] = document.pop("overrides")
        print_json({**document, "seconds": time.monotonic() - began})
    else:
        _show(done)


def _show(done: Prepared) -> None:
    if not done.is_whole:
        print(
            f"{done.folder}: {done.num_made} piece(s) made; {done.num_missing} of {done.num_pieces} are for other "
            f"parts. The last part, or the same command without --part, finishes."
        )
        return
    for part, counts in done.counts.items():
        text = ", ".join(
            f"{short_number(count)}{'B' if what == 'bytes' else f' {what}'}" for what, count in counts.items()
        )
        print(f"{part}: {text}")
    if done.num_broken:
        print(f"Left out: {done.num_broken} that cannot be read, see {Path(done.folder) / BROKEN}")
    what = f"{done.num_made} of {done.num_pieces} pieces made now" if done.num_made else "all was there already"
    print(f"Folder: {done.folder} ({what})")
    print_next(f"train {_MODELS[done.overrides[0]]} {shlex.join(done.overrides)}")


def _num_processes(workers: int | None) -> int:
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers={workers} must be 1 or more. Use 1.")
    return workers or len(os.sched_getaffinity(0))


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    first, _, last = text.partition("/")
    if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return int(first), int(last)
    raise ConfigError(f"--part={text} must be I/N with 1 ≤ I ≤ N, as 3/8. Use 1/8 to 8/8.")


@contextlib.contextmanager
def _bar(unit: str, *, quiet: bool) -> Iterator[Tell]:
    """Show a progress bar on a terminal, and nothing in a pipe."""
    if quiet or not console().is_terminal:
        yield lambda *_: None
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=40), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console()) as progress:
        task = progress.add_task(unit, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _submit_parts(kind: str, arguments: Sequence[str], to: Path, how: How) -> None:
    """Submit an array of the same command; each element makes a part of the pieces."""
    from hpc_trainer.cli.grid_verbs import run_submit  # late: it takes half a second

    if how.parts < 1:
        raise ConfigError(f"--parts={how.parts} must be 1 or more. Use 1.")
    more = ["--on-broken", "skip"] if how.skip_broken else []
    if how.workers is not None:
        more += ["--workers", str(how.workers)]
    command = shlex.join(["python", "-m", "hpc_trainer", "data", "prepare", kind, *arguments, *more])
    command = command.replace("{", "{{").replace("}", "}}") + f" --part {{params.part}}/{how.parts}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"prepare-{to.absolute().name}")[:100]
    given = Given.of_grid(
        [f"sweep_name={name}", *(how.slurm or ()), f"params.part=range(1,{how.parts + 1})"], command, None, None, None
    )
    run_submit(given, Chosen(retry_failed=False, fresh=False, extend=False), wait=False, as_json=how.as_json)


def _as_arguments(options: ImageOptions | TokenOptions) -> list[str]:
    """Return the options as command-line arguments."""
    values = dataclasses.asdict(options).items()
    return [word for key, value in values if value is not None for word in (f"--{key.replace('_', '-')}", str(value))]
