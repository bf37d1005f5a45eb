"""Files of a prepared folder: `prepare.json` holds options, input and pieces, and each piece has a record.

    FOLDER/prepare.json            written first, by the first call; other options or another input are refused later
    FOLDER/.pieces/NAME.json       record of a complete piece: its files, and what else is needed at the end
    FOLDER/train/, FOLDER/eval/    the result; the file that readers look for (index.json, meta.json) is written last

The pieces depend on the sorted input only. So any number of calls, concurrent or in turn, give the same result.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.data.images.folder import is_held_out
from hpc_trainer.data.prepare.pool import Maker, Piece, over_processes
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.record.files import claim, fsync_folder, own_name, rename, to_json, write_atomic, write_json
from hpc_trainer.record.reading import read_json

ABOUT, PIECES, BROKEN = "prepare.json", ".pieces", "broken.txt"
FORMAT = 1
TRAIN, EVAL = "train", "eval"
FRESH = "Add --fresh to make all of it anew, or name another folder with --to."


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """Input file. `name` is its path relative to the source that the user named, with `/`."""

    name: str
    path: str  # a Path takes three times the memory, and there may be millions
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All input files, sorted by name and path."""

    files: tuple[InputFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def described(self) -> dict[str, Any]:
        """Return the input's entry in `prepare.json`: number, bytes, digest of paths, sizes and times of change."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.path}\0{file.size}\0{file.mtime_ns}\n".encode("utf-8", "surrogateescape"))
        return {"num_files": len(self.files), "num_bytes": self.num_bytes, "digest": digest.hexdigest()}


def absolute(path: str | Path) -> Path:
    """Return the absolute path without `~` and `..`; links stay as the user named them."""
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111  (Path.resolve follows links)


def part_of(name: str, eval_fraction: float) -> str:
    """Return `train` or `eval` by a hash of the name, so that other files never change a file's part."""
    return EVAL if is_held_out(name, eval_fraction) else TRAIN


def shuffled(names: Iterable[str]) -> list[str]:
    """Return the names in a fixed order that looks random: by their hashes."""
    return sorted(names, key=lambda name: (hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest(), name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one call. Only `skip_broken` changes the result."""

    num_workers: int = 1
    part: tuple[int, int] = (1, 1)
    """(i, n): every n-th piece, in order, from the i-th on; i counts from 1."""
    fresh: bool = False
    plan_only: bool = False
    """True if the call makes no piece: it reports problems, and finishes a folder that has all its pieces."""
    skip_broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """State of the folder after a call."""

    folder: str
    is_whole: bool
    """False if other parts still have pieces to make; then nothing can be read."""
    num_pieces: int
    num_made: int
    """Number of pieces that this call made."""
    num_missing: int
    counts: dict[str, dict[str, int]]
    """Part -> counted quantity -> number; empty until the folder is complete."""
    num_broken: int
    overrides: tuple[str, ...]
    """Overrides that train on the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prepared folder."""

    folder: Path
    kind: str
    options: Mapping[str, Any]
    """Options that determine the result; other values are refused."""
    inputs: Inputs

    def begin(self, plan: Callable[[], Mapping[str, Any]], *, fresh: bool) -> dict[str, Any]:
        """Make the folder, or check one that an earlier call began; return its `prepare.json`.

        Args:
            plan: returns further values that the first call stores in `prepare.json`; later calls read them.
            fresh: delete the result of earlier calls first.

        Raises:
            ConfigError: the folder was begun with other options or another input, or has files of other origin.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"--to {self.folder} must be a folder; there is a file of this name. Name another.")
        about = read_json(self.folder / ABOUT)
        if about is not None and fresh:
            self.clear()
            about = None
        if about is None:
            self._refuse_what_is_not_ours()
            (self.folder / PIECES).mkdir(parents=True, exist_ok=True)
            about = {
                "format": FORMAT, "kind": self.kind, "options": dict(self.options), "input": self.inputs.described(),
                "time": time.time(), **plan(),
            }  # fmt: skip
            if not _write_new(self.folder / ABOUT, about):  # another part was first
                about = read_json(self.folder / ABOUT) or {}
        problems = self._differences(about)
        if problems:
            raise ConfigError(f"{self.folder} was begun with other options: {'; '.join(problems)}. {FRESH}")
        for name in (TRAIN, EVAL, PIECES):
            (self.folder / name).mkdir(exist_ok=True)
        return about

    def clear(self) -> None:
        """Delete the result of earlier calls: first the files that readers look for, last `prepare.json`."""
        for name in (TRAIN, EVAL):
            for vouched in ("index.json", "meta.json"):
                (self.folder / name / vouched).unlink(missing_ok=True)
        for name in (TRAIN, EVAL, PIECES):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder / name)
        for name in ("statistics.json", "classes.json", BROKEN, ABOUT):
            (self.folder / name).unlink(missing_ok=True)

    def _refuse_what_is_not_ours(self) -> None:
        there = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        if ABOUT in there:  # another part has written it since it was looked for
            return
        # A call that was killed before it wrote prepare.json leaves only .pieces.
        foreign = [name for name in there if name != PIECES and not name.startswith(f".{ABOUT}.")]
        if foreign and read_json(self.folder / ABOUT) is None:  # a listing may miss what is made meanwhile
            raise ConfigError(
                f"--to {self.folder} must be empty, or begun by data prepare: it holds {foreign[0]} and no {ABOUT}. "
                "Name another folder."
            )

    def _differences(self, record: Mapping[str, Any]) -> list[str]:
        if record.get("format") != FORMAT:
            return [f"its {ABOUT} has format {record.get('format')!r}, and this version writes {FORMAT}"]
        if record.get("kind") != self.kind:
            return [f"it holds {record.get('kind')}, not {self.kind}"]
        before: Mapping[str, Any] = record.get("options") or {}
        problems = [
            f"{_option(name)} was {_value(before.get(name))}, is {_value(value)}"
            for name, value in self.options.items()
            if before.get(name) != value
        ]
        return problems or self._other_input(record)

    def _other_input(self, record: Mapping[str, Any]) -> list[str]:
        before, now = record.get("input") or {}, self.inputs.described()
        if before == now:
            return []
        if before.get("num_files") != now["num_files"]:
            return [f"the input had {before.get('num_files'):,} files, and has {now['num_files']:,} now"]
        since = float(record.get("time") or 0.0) * 1e9
        changed = next((file for file in self.inputs.files if file.mtime_ns > since), None)
        which = f"; {changed.path} was changed since" if changed else ""
        sizes = f"{before.get('num_bytes'):,} bytes then, {now['num_bytes']:,} now"
        return [f"the input has files of other names, sizes or times of change ({sizes}{which})"]

    # --- pieces ---

    def record_of(self, name: str) -> dict[str, Any] | None:
        """Return the record of a complete piece; None if the piece must be made."""
        record = read_json(self.folder / PIECES / f"{name}.json")
        if record is None:
            return None
        is_there = all(_size(self.folder / file) == size for file, size in record["files"].items())
        return record if is_there else None

    def records(self, pieces: Sequence[Piece]) -> list[dict[str, Any]] | None:
        """Return the records of all pieces, in order; None while a piece is missing."""
        records = [self.record_of(piece.name) for piece in pieces]
        return None if None in records else records  # type: ignore[return-value]

    def missing(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces that must be made."""
        return [piece for piece in pieces if self.record_of(piece.name) is None]

    def unfinished(self, pieces: Sequence[Piece], num_made: int) -> Prepared:
        """Return the state of a folder whose remaining pieces other parts must make."""
        return Prepared(
            folder=str(self.folder), is_whole=False, num_pieces=len(pieces), num_made=num_made,
            num_missing=len(self.missing(pieces)), counts={}, num_broken=0, overrides=(),
        )  # fmt: skip


def make_missing(
    job: Job, maker: Maker, pieces: Sequence[Piece], settings: Settings, tell: Callable[[int, int], None]
) -> int:
    """Make the missing pieces of this part; return their number. `tell` is called with (done, total)."""
    index, number = settings.part
    mine = [] if settings.plan_only else pieces[index - 1 :: number]
    missing = job.missing(mine)
    total = sum(piece.amount for piece in mine)
    done = total - sum(piece.amount for piece in missing)

    def count(more: int) -> None:
        nonlocal done
        done += more
        tell(done, total)

    count(0)
    return sum(1 for _ in over_processes(maker, missing, settings.num_workers, count))


def write_record(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Record a piece as complete, once its `files` are on the disk. `folder` is the prepared folder."""
    write_json(folder / PIECES / f"{name}.json", record)


def commit(temporary: Path, path: Path) -> None:
    """Rename a flushed and fsynced file to its final name; the name survives a power cut."""
    rename(temporary, path, is_own=True)
    fsync_folder(path.parent)


def temporary_of(path: Path) -> Path:
    """Return a path in the same folder that no reader looks at and no other process uses."""
    return Path(own_name(path))


def remove_temporaries(folder: Path, settings: Settings) -> None:
    """Delete files of killed calls in a complete folder; skip this with several parts, as others may be working."""
    for place in (folder, folder / TRAIN, folder / EVAL, folder / PIECES) if settings.part == (1, 1) else ():
        for path in place.glob(".*.tmp"):
            path.unlink(missing_ok=True)


def check_apart(sources: Iterable[Path], folder: Path) -> None:
    """Raise ConfigError if the result is inside a source: the next call would take it for input."""
    inside = next((source for source in sources if folder == source or source in folder.parents), None)
    if inside is not None:
        raise ConfigError(f"--to {folder} is inside {inside}, which is an input. Name a folder beside it.")


def check_fraction(value: float) -> None:
    """Raise ConfigError unless 0 < `value` < 1."""
    if not 0.0 < value < 1.0:
        raise ConfigError(
            f"--eval-fraction={value:g} must be between 0 and 1, both excluded. Use {0.01 if value <= 0 else 0.5:g}."
        )


def check_parts(splits: Mapping[str, int], what: str, eval_fraction: float) -> None:
    """Raise ConfigError if the split leaves a part empty. `splits` maps a part to its number of elements."""
    total = sum(splits.values())
    for part in (TRAIN, EVAL):
        if not splits.get(part):
            other = eval_fraction * 2 if part == EVAL else eval_fraction / 2
            raise ConfigError(
                f"{part} has none of the {total} {what}: the name of each decides its part. Use another "
                f"--eval-fraction than {eval_fraction:g}, for example {min(0.5, other):g}, or more {what}."
            )


def tell_broken(folder: Path, broken: Sequence[tuple[str, str]], total: int, what: str, settings: Settings) -> None:
    """List unreadable files or documents in broken.txt; raise RunStateError unless `settings` says to skip them."""
    if not broken:
        return
    lines = [f"{name}: {cause}".encode("utf-8", "backslashreplace").decode() for name, cause in broken]
    lines = [line.replace("\n", "\\n") for line in lines]
    write_atomic(folder / BROKEN, "".join(f"{line}\n" for line in lines))
    if settings.skip_broken:
        return
    raise RunStateError(
        f"{len(broken)} of {total} {what} cannot be read; {folder / BROKEN} lists them. The first: {lines[0]}. "
        "Leave them out with --on-broken skip (what is made already stays), or repair them and add --fresh."
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _write_new(path: Path, value: Any) -> bool:
    """Write a file atomically unless it exists; return False if it exists."""
    is_first = claim(path, f"{to_json(value)}\n".encode())
    fsync_folder(path.parent)
    return is_first


def _option(name: str) -> str:
    return "the source" if name == "source" else "--" + name.replace("_", "-")


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "not set" if value is None else str(value)
