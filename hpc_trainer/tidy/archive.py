"""A sweep as one tar file with a list of checksums, and back. An archive may come from anywhere.

    SWEEP/...              files of the sweep: configuration, submissions, code, labels; of each run everything but
                           checkpoints other than its newest and its best
    SWEEP/MANIFEST.json    the last member: format, name of the sweep, SHA-256 and size of every file

`unpack` takes only files and folders, writes each file itself under a name that it has checked, in a new folder, and
gives the folder its name after every checksum has fitted. The owner is the user, modes are those of the umask.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from hpc_trainer import __version__
from hpc_trainer.config import script_words as words
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.record.checkpoint_folders import committed, is_pinned
from hpc_trainer.record.files import fsync_folder, make_folder, rename, set_umask, write_json
from hpc_trainer.record.layout import TRASH, SweepPaths
from hpc_trainer.record.reading import Faults, is_there, read_json
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.record.trust import check_place
from hpc_trainer.tidy.cleaning import best_step, is_whole

MANIFEST = "MANIFEST.json"
_FORMAT = 1
_PIECE = 1 << 22
_MODES = {".tar": "", ".tar.gz": "gz", ".tgz": "gz", ".tar.xz": "xz", ".txz": "xz"}
_LEFT_OUT = re.compile(r".*\.lock(\.removing)?|\..*\.tmp|\.trash-.*|step-\d{8,}\.tmp-\d+|.*\.old-\d+|\.nfs.*")
_OF_PROGRAM = re.compile(r"[^/]+/output/")
_REMOVED_FILE = re.compile(r"\.nfs[0-9a-f]{24}")  # an NFS client's name for a file that was removed while it was open
_WHOLE_LEFT_OUT = ("compile_cache", "walk.json", "finished.json", "summaries.jsonl", "REMOVED", "MANIFEST.json")
_MOST_MANIFEST = 1 << 30
_MOST_MEMBERS = 20_000_000
_LONGEST_PATH = 4000
_STRANGE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """Result of `pack` or `unpack`: the sweep, the number of files, and their bytes."""

    sweep: str
    place: Path
    num_files: int
    num_bytes: int
    left_out: tuple[str, ...] = ()
    """Names of links and pipes in the sweep, which no archive holds."""


def pack(status: SweepStatus, file: Path, *, every_checkpoint: bool = False) -> Archived:
    """Write a sweep that is at rest into a new tar file. The caller holds the sweep's lock.

    Args:
        status: status of the sweep.
        file: the file; its ending chooses the compression. After an error there is no file.
        every_checkpoint: keep all checkpoints, also those of the user's own loops and programs.

    Raises:
        ConfigError: the file's ending is unknown, the file exists, or it would be inside the sweep.
        OSError: the file system refused.
    """
    kind = _kind_of(file)
    file = file.absolute()
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}. Make it, or name another file.")
    if os.path.lexists(file):
        raise ConfigError(f"{file} exists already, and is not overwritten. Name another file.")
    if file.parent.resolve().is_relative_to(status.sweep.folder.resolve()):
        raise ConfigError(f"{file} would be inside the sweep that it holds. Name a file outside {status.sweep.folder}.")
    part = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    mode: Any = f"w:{kind}"
    left_out: list[str] = []
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "wb") as raw:
            with tarfile.open(fileobj=raw, mode=mode, format=tarfile.PAX_FORMAT) as tar:
                records = list(_add_all(tar, status, left_out, every_checkpoint=every_checkpoint))
                _add_manifest(tar, status, records)
            raw.flush()
            os.fsync(raw.fileno())
        rename(part, file, is_own=True)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    fsync_folder(file.parent)
    num_bytes = sum(record["size"] for record in records)
    return Archived(
        sweep=status.sweep.name, place=file, num_files=len(records), num_bytes=num_bytes, left_out=tuple(left_out)
    )


def _kind_of(file: Path) -> str:
    ending = next((ending for ending in sorted(_MODES, key=len, reverse=True) if file.name.endswith(ending)), None)
    if ending is None or file.name == ending:
        raise ConfigError(
            f"{file}: the ending of an archive is {', '.join(_MODES)}. Use {file.name.split('.')[0] or 'sweep'}.tar.gz"
        )
    return _MODES[ending]


def _add_all(
    tar: tarfile.TarFile, status: SweepStatus, left_out: list[str], *, every_checkpoint: bool
) -> Iterator[dict[str, Any]]:
    """Add the files of the sweep, and yield the record of each for the manifest; links and pipes go to `left_out`."""
    runs = {run.run_id: run for run in status.runs}

    @functools.cache
    def kept(run_id: str) -> frozenset[str]:
        return _kept_checkpoints(status, runs[run_id])

    for path, name in _files(status.sweep.folder, "", left_out):
        top, _, below = name.partition("/")
        if top in _WHOLE_LEFT_OUT or (top in runs and not every_checkpoint and not _is_kept(below, kept, top)):
            continue
        yield _add(tar, path, f"{status.sweep.name}/{name}")


def _files(folder: Path, head: str, left_out: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield (path, name from the sweep's folder on) of every regular file that is not temporary.

    In the folder for a program's files every name is the program's.
    """
    skipped = _REMOVED_FILE if _OF_PROGRAM.match(head) else _LEFT_OUT
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name = f"{head}{entry.name}"
        if skipped.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(folder / entry.name, f"{name}/", left_out)
        elif entry.is_file(follow_symlinks=False):
            yield folder / entry.name, name
        else:
            left_out.append(name)


def _is_kept(below: str, kept: Callable[[str], frozenset[str]], run_id: str) -> bool:
    """Return True if a file of a run, by its path in the run's folder, is kept: it is not a superfluous checkpoint."""
    if below.startswith(("output/checkpoints/", "own_checkpoints/")):
        return False
    first, _, rest = below.partition("/")
    return first != "checkpoints" or rest.partition("/")[0].removesuffix(".pin") in kept(run_id)


def _kept_checkpoints(status: SweepStatus, run: RunStatus) -> frozenset[str]:
    """Return the names of the newest whole checkpoint of a run, of its best one, and of pinned ones."""
    paths = status.sweep.run(run.run_id)
    checkpoints = committed(paths.checkpoints)
    newest = next((step for step, path in checkpoints if is_whole(path)), None)
    steps = {newest, None if run.spec.is_lost else best_step(run.spec, paths)}
    return frozenset(path.name for step, path in checkpoints if step in steps or is_pinned(path))


class _Hashed(io.RawIOBase):
    """File that computes its checksum while it is read."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        super().__init__()
        self._file, self._left = file, most
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Read at most the size that the file had when it was opened."""
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        self.digest.update(data)
        return data


def _add(tar: tarfile.TarFile, path: Path, name: str) -> dict[str, Any]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise RunStateError(f"{path} became something else than a file while it was read. Try again.")
        member = tarfile.TarInfo(name)
        member.size, member.mtime = info.st_size, int(info.st_mtime)
        member.mode = 0o755 if info.st_mode & stat.S_IXUSR else 0o644
        hashed = _Hashed(file, info.st_size)
        tar.addfile(member, hashed)
    return {"name": name, "size": info.st_size, "sha256": hashed.digest.hexdigest()}


def _add_manifest(tar: tarfile.TarFile, status: SweepStatus, records: list[dict[str, Any]]) -> None:
    content = {
        "format": _FORMAT, "sweep": status.sweep.name, "time": time.time(), "hpc_trainer": __version__,
        "states": status.counts, "files": records,
    }  # fmt: skip
    data = json.dumps(content, indent=1).encode()
    member = tarfile.TarInfo(f"{status.sweep.name}/{MANIFEST}")
    member.size, member.mtime, member.mode = len(data), int(time.time()), 0o644
    tar.addfile(member, io.BytesIO(data))


# Unpacking of an archive that is not trusted.


def unpack(file: Path, runs_dir: Path, name: str | None = None) -> Archived:
    """Unpack an archive as a sweep of `runs_dir`, under its own name or `name`.

    Raises:
        ConfigError: the name is not legal.
        RunStateError: the name is taken, or the archive is damaged, or holds what no archive of a sweep holds; nothing
            was unpacked.
    """
    if name is not None:
        _check_name(name)
    set_umask(False)
    make_folder(runs_dir)
    temporary = runs_dir / f"{TRASH}{time.time_ns()}-unpacking.rm"
    temporary.mkdir(mode=0o700)
    try:
        try:
            own, records = _unpack_members(file, temporary)
        except (tarfile.TarError, EOFError, UnicodeError, ValueError) as error:
            raise RunStateError(
                f"{file} is not a tar file, or is damaged: {str(error) or type(error).__name__}."
            ) from error
        target = SweepPaths(runs_dir.absolute() / (name or own))
        _check_free(target)
        rename(temporary / own, target.folder)
        fsync_folder(runs_dir)
        check_place(target.folder)
        if not target.exists:
            shutil.rmtree(target.folder)
            raise RunStateError(f"{file} holds no sweep: it lacks specs.jsonl, submissions.jsonl and sweep.json.")
        if name is not None and name != own:
            _rename_within(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    num_bytes = sum(size for size, _ in records.values())
    return Archived(sweep=target.name, place=target.folder, num_files=len(records), num_bytes=num_bytes)


def _check_name(name: str) -> None:
    problem = next(iter(words.word_problem("the sweep's name", name, words.NAME)), None)
    if problem is not None:
        raise ConfigError(problem)


def _check_free(target: SweepPaths) -> None:
    """Make the name of a removed sweep free; raise RunStateError if the name is that of something else."""
    if not is_there(target.folder):
        return
    if [path.name for path in target.folder.iterdir()] == [target.removed_whole.name]:
        target.removed_whole.unlink()
        target.folder.rmdir()
        return
    raise RunStateError(f"{target.folder} exists already. Give the sweep another name: --name {target.name}-2")


def _rename_within(target: SweepPaths) -> None:
    record = read_json(target.sweep, Faults())
    if record is not None:
        write_json(target.sweep, {**record, "sweep": target.name})


def _unpack_members(file: Path, folder: Path) -> tuple[str, dict[str, tuple[int, str]]]:
    """Unpack into an empty folder of this process; return the sweep's name and (size, checksum) of each file."""
    room = shutil.disk_usage(folder).free
    checksums: dict[str, tuple[int, str]] = {}
    listed: dict[str, tuple[int, str]] | None = None
    own: str | None = None
    mode: Literal["r|*"] = "r|*"  # a stream: nothing seeks, and sizes are checked before anything is written
    with file.open("rb") as raw, tarfile.open(fileobj=raw, mode=mode) as tar:
        for number, member in enumerate(tar):
            if number >= _MOST_MEMBERS:
                raise RunStateError(f"{file} has more than {_MOST_MEMBERS:,} members.")
            name = _checked(member, file, folder)
            own = own or name.partition("/")[0]
            if name.partition("/")[0] != own:
                raise RunStateError(f"{file} holds {name!r} beside {own!r}: an archive holds one sweep.")
            if member.isdir():
                continue
            if listed is not None or name in checksums:
                raise RunStateError(f"{file} holds {name!r} twice, or after its list of files.")
            room -= member.size
            if room < 0:
                raise RunStateError(f"{file} holds more than the room that is left on the disk of {folder.parent}.")
            content = tar.extractfile(member)
            assert content is not None  # a regular file
            if name == f"{own}/{MANIFEST}":
                listed = _listed(content, member, file)
            else:
                checksums[name] = (
                    member.size,
                    _write(folder / name, content, is_program=bool(member.mode & stat.S_IXUSR)),
                )
    if own is None or listed is None:
        raise RunStateError(
            f"{file} has no {MANIFEST} at its end: it was not written by `hpc-trainer archive`, or is damaged."
        )
    _check_name(own)
    _compare(checksums, listed, file)
    return own, checksums


def _checked(member: tarfile.TarInfo, file: Path, folder: Path) -> str:
    """Return the name of a member that may be unpacked.

    Raises:
        RunStateError: it is neither a file nor a folder, or its name leads elsewhere.
    """
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise RunStateError(f"{file} holds {member.name!r}, which is a link, a device or a pipe: it is refused.")
    name = member.name.rstrip("/")
    parts = name.split("/")
    if not name or "" in parts or "." in parts or ".." in parts or _STRANGE.search(name) or len(name) > _LONGEST_PATH:
        raise RunStateError(
            f"{file} holds {member.name!r}, which is refused: the name leads elsewhere or is not plain."
        )
    if hasattr(tarfile, "data_filter"):  # 3.10.12 and later: the rules of PEP 706 besides our own
        try:
            tarfile.data_filter(member, os.fspath(folder))
        except tarfile.FilterError as error:
            raise RunStateError(f"{file} holds {member.name!r}, which is refused: {error}.") from error
    return name


def _write(path: Path, content: IO[bytes], *, is_program: bool) -> str:
    """Write a new file, and return the checksum of its content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o777 if is_program else 0o666), "wb") as out:
        while piece := content.read(_PIECE):
            digest.update(piece)
            out.write(piece)
        os.fchmod(out.fileno(), os.fstat(out.fileno()).st_mode & 0o755)
    return digest.hexdigest()


def _listed(content: IO[bytes], member: tarfile.TarInfo, file: Path) -> dict[str, tuple[int, str]]:
    if member.size > _MOST_MANIFEST:
        raise RunStateError(f"{file}: its {MANIFEST} has {member.size} bytes, more than any sweep needs.")
    try:
        values = json.loads(content.read())
        if values["format"] != _FORMAT:
            raise RunStateError(f"{file} has format {values['format']!r}; this version reads {_FORMAT}.")
        return {str(record["name"]): (int(record["size"]), str(record["sha256"])) for record in values["files"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunStateError(f"{file}: its {MANIFEST} cannot be read: {error!r}.") from error


def _compare(found: dict[str, tuple[int, str]], listed: dict[str, tuple[int, str]], file: Path) -> None:
    if found == listed:
        return
    wrong = next(name for name in sorted({*found, *listed}) if found.get(name) != listed.get(name))
    what = "is not listed" if wrong not in listed else "is missing" if wrong not in found else "differs"
    raise RunStateError(f"{file} is damaged or was changed: {wrong!r} {what} (SHA-256 in {MANIFEST}).")
