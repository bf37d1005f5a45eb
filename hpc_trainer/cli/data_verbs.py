"""What `hpc-trainer data ...` prints."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpc_trainer.cli.common import console, ended_by_signals, print_json, print_next, short_number
from hpc_trainer.cli.given import Chosen, Given
from hpc_trainer.cli.grid_verbs import run_submit
from hpc_trainer.datasets.shard_index import build_index
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.prepare.images import ImageOptions, prepare_images
from hpc_trainer.operate.prepare.job import BROKEN, Asked, Prepared
from hpc_trainer.operate.prepare.tokens import TokenOptions, prepare_tokens

Told = Callable[[int, int], None]
_UNITS = {"images": "pictures", "tokens": "bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What the kinds of `data prepare` share on the command line; None: not given."""

    workers: int | None
    part: str | None
    slurm: list[str] | None
    parts: int
    fresh: bool
    skip_broken: bool
    as_json: bool

    @property
    def asked(self) -> Asked:
        """Raises ConfigError: a number is out of range."""
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers={self.workers} must be 1 or more. Use 1.")
        return Asked(
            num_workers=self.workers or len(os.sched_getaffinity(0)), part=_part(self.part), fresh=self.fresh,
            skip_broken=self.skip_broken,
        )  # fmt: skip


def run_prepare_images(source: Path, to: Path, options: ImageOptions, how: How) -> None:
    """Prepares pictures, here or on Slurm."""
    words = [str(source.absolute()), "--to", str(to.absolute()), *_words(options)]
    _prepare("images", words, to, how, partial(prepare_images, source, to, options))


def run_prepare_tokens(sources: Sequence[str], to: Path, options: TokenOptions, how: How) -> None:
    """Prepares texts, here or on Slurm."""
    words = [*(str(Path(each).absolute()) for each in sources), "--to", str(to.absolute()), *_words(options)]
    _prepare("tokens", words, to, how, partial(prepare_tokens, sources, to, options))


def run_index(folder: Path, *, as_json: bool) -> None:
    """Writes an index for shards."""
    found = build_index(folder)
    if as_json:
        print_json({"folder": str(folder), "samples": len(found.rows), "shards": len(found.shards)})
        return
    print(f"{folder}: {len(found.rows):,} samples in {len(found.shards)} shards. Index: {folder / 'index.json'}")


def _prepare(kind: str, words: list[str], to: Path, how: How, prepare: Callable[[Asked, Told], Prepared]) -> None:
    began = time.monotonic()
    if how.slurm is not None:
        if how.part is not None:
            raise ConfigError(f"--part={how.part} is for one job, and --slurm gives each of its own. Keep one of them.")
        done = prepare(dataclasses.replace(how.asked, plan_only=True), lambda *_: None)
        if not done.is_whole:
            _submit_parts(kind, words, to, how)
            return
    else:
        with ended_by_signals(), _bar(_UNITS[kind], quiet=how.as_json) as tell:
            done = prepare(how.asked, tell)
    if how.as_json:
        print_json({**dataclasses.asdict(done), "seconds": time.monotonic() - began})
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
        told = ", ".join(
            f"{short_number(count)}{'B' if what == 'bytes' else f' {what}'}" for what, count in counts.items()
        )
        print(f"{part}: {told}")
    if done.num_broken:
        print(f"Left out: {done.num_broken} that cannot be read, see {Path(done.folder) / BROKEN}")
    what = f"{done.num_made} of {done.num_pieces} pieces made now" if done.num_made else "all was there already"
    print(f"Folder: {done.folder} ({what})")
    print_next(f"train {shlex.join(done.words)}")


def _counted(what: str, count: int) -> str:
    return f"{short_number(count)}B" if what == "bytes" else f"{count:,} {what}"


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    first, _, last = text.partition("/")
    if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return int(first), int(last)
    raise ConfigError(f"--part={text} must be I/N with 1 ≤ I ≤ N, as 3/8. Use 1/8 to 8/8.")


@contextlib.contextmanager
def _bar(unit: str, *, quiet: bool) -> Iterator[Told]:
    """A bar on a terminal; in a pipe nothing."""
    if quiet or not console().is_terminal:
        yield lambda *_: None
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=40), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console()) as progress:
        task = progress.add_task(unit, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _submit_parts(kind: str, words: Sequence[str], to: Path, how: How) -> None:
    """An array of the same command, each element with a part of the pieces."""
    if how.parts < 1:
        raise ConfigError(f"--parts={how.parts} must be 1 or more. Use 1.")
    more = ["--on-broken", "skip"] if how.skip_broken else []
    if how.workers is not None:
        more += ["--workers", str(how.workers)]
    command = shlex.join(["python", "-m", "hpc_trainer", "data", "prepare", kind, *words, *more])
    command = command.replace("{", "{{").replace("}", "}}") + f" --part {{params.part}}/{how.parts}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"prepare-{to.absolute().name}")[:100]
    given = Given.of_grid(
        [f"sweep_name={name}", *(how.slurm or ()), f"params.part=range(1,{how.parts + 1})"], command, None, None, None
    )
    run_submit(given, Chosen(retry_failed=False, fresh=False, extend=False), wait=False, as_json=how.as_json)


def _words(options: ImageOptions | TokenOptions) -> list[str]:
    """The options, as they are typed."""
    values = dataclasses.asdict(options).items()
    return [word for key, value in values if value is not None for word in (f"--{key.replace('_', '-')}", str(value))]
