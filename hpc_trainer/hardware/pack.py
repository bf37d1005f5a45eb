"""`pack`: a Python environment as one archive that `cluster.environment.stage` unpacks on each node's own disk.

The archive has no folder of its own, and its last member `.hpc_trainer_pack.json` describes it, with a SHA-256 over the
names, modes and contents of all others: the copy on a node brings its digest along. Of a venv, scripts are changed so
that they run from any folder. Of a conda environment conda-pack makes the archive, and conda-unpack changes the copy.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from hpc_trainer.config.environment import PACK_FACTS
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.record.shared_folder import is_local, mount_of

_FORMAT = 1
_SHOWN = 3
_NOT_OF_PYTHON = ("site-packages", "dist-packages", "test", "idlelib")
_TIMEOUT_S = 600.0
# A shell finds the Python beside the script; Python reads the first lines as a string (as virtualenv and uv do).
_SHEBANG = b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(realpath -- "$0")")"/python "$0" "$@"\n\' \'\'\'\n'
_LOOK = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
files = sorted({module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)})
print(json.dumps({"prefix": sys.prefix, "version": sys.version.split()[0], "path": sys.path, "files": files}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Archive that was written, and facts about its content."""

    archive: Path
    source: Path
    kind: str
    """venv or conda."""
    num_bytes: int
    num_files: int
    sha256: str
    python: str | None = None
    """Version that the copy's Python reports; None if the copy was not tried."""
    outside: tuple[tuple[str, str, int], ...] = ()
    """Folders outside the copy from which modules were imported: (folder, type of its file system, modules)."""
    notes: tuple[str, ...] = ()


def pack_environment(
    folder: Path, archive: Path | None = None, *, modules: Sequence[str] = (), with_python: bool = False,
    force: bool = False, tries: bool = True,
) -> Packed:  # fmt: skip
    """Pack an environment, and try the copy in another folder.

    Args:
        folder: a virtual environment, a project of uv with its `.venv`, or the folder of a conda environment.
        archive: file to write; FOLDER.tar if None.
        modules: modules to import in the copy.
        with_python: pack the Python that a virtual environment was made from, too; conda environments have theirs.
        force: replace a file that is there.
        tries: unpack the archive once, and run its Python.

    Raises:
        ConfigError: the folder is not an environment, or the archive's name is not valid.
        HpcTrainerError: the archive cannot be written, or its copy does not run apart from the folder.
    """
    source, kind = find_environment(folder)
    archive = (archive if archive is not None else Path(f"{source}.tar")).absolute()
    _check_archive(archive, source, force=force)
    partial = archive.with_name(f".{archive.name}.{os.getpid()}.part")
    try:
        notes = [*_notes(source)] if kind == "venv" else []
        if kind == "conda":
            _run_conda_pack(source, partial)
            digest, count = _digest_of(partial)
        else:
            digest, count = _write(_members(source, with_python=with_python), source, partial)
        facts = {
            "format": _FORMAT, "sha256": digest, "files": count, "source": str(source), "kind": kind,
            "day": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        _append(partial, facts)
        seen = _try(partial, source, modules) if tries else None
        partial.replace(archive)
    except OSError as error:
        raise HpcTrainerError(f"{archive} was not written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    outside = () if seen is None else tuple(_outside(seen))
    return Packed(
        archive=archive, source=source, kind=kind, num_bytes=archive.stat().st_size, num_files=count, sha256=digest,
        python=None if seen is None else seen["version"], outside=outside, notes=tuple(notes),
    )  # fmt: skip


def find_environment(folder: Path) -> tuple[Path, str]:
    """Return the folder of an environment and its kind: `venv` or `conda`.

    Raises:
        ConfigError: there is none; the message names one nearby.
    """
    place = folder.expanduser().absolute()
    for candidate in (place, place / ".venv"):
        if (candidate / "pyvenv.cfg").is_file():
            return candidate, "venv"
        if (candidate / "conda-meta").is_dir():
            return candidate, "conda"
    if not place.is_dir():
        raise ConfigError(
            f"{place} is not a folder. Name that of a virtual environment or a conda environment{_near(place)}"
        )
    raise ConfigError(
        f"{place} is not an environment: it has no pyvenv.cfg (venv, uv) and no conda-meta (conda). Name its folder"
        f"{_near(place)}"
    )


def _near(place: Path) -> str:
    """Return the environments in or above a folder, for the end of a message."""
    parents = [place, *place.parents]
    inside = next(parent for parent in parents if parent.is_dir())
    try:
        near = [child for child in sorted(inside.iterdir()) if (child / "pyvenv.cfg").is_file()]
    except OSError:
        near = []
    near += [parent for parent in parents if (parent / "pyvenv.cfg").is_file() or (parent / "conda-meta").is_dir()]
    return f", as {near[0]}." if near else "."


def _check_archive(archive: Path, source: Path, *, force: bool) -> None:
    if archive.suffix != ".tar":
        raise ConfigError(
            f"--to {archive}: the archive's name must end with .tar. Use --to {archive.with_suffix('.tar')}"
        )
    if not archive.parent.is_dir():
        raise ConfigError(f"--to {archive}: there is no folder {archive.parent}. Make it: mkdir -p {archive.parent}")
    if archive.is_relative_to(source):
        raise ConfigError(f"--to {archive} is inside the environment. Use --to {source.parent / archive.name}")
    if archive.exists() and not force:
        raise ConfigError(f"{archive} exists already. To replace it: --force")


# --- virtual environments ---


def _members(source: Path, *, with_python: bool) -> Iterator[tuple[Path, str]]:
    """Yield (file, name in the archive) of a virtual environment, and of the Python that it was made from."""
    names = set()
    if with_python:
        for path, name in _base_python(source):
            names.add(name)
            yield path, name
    for path in _walk(source):
        name = str(path.relative_to(source))
        is_replaced = with_python and (name == "pyvenv.cfg" or (path.parent == source / "bin" and _is_python(path)))
        if name not in names and not is_replaced:
            yield path, name


def _base_python(source: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files by which the Python of a virtual environment runs alone: its binary and its standard library.

    Raises:
        HpcTrainerError: its standard library is not below its prefix, so that a copy would not find it; or it is the
            system's Python, which Debian changes to look for packages in dist-packages alone.
    """
    asked = "import json, os, sys; print(json.dumps([sys.base_prefix, os.path.realpath(sys.executable)]))"
    prefix, binary = map(
        Path, json.loads(_ask([str(source / "bin" / "python"), "-I", "-c", asked], "its Python failed"))
    )
    if prefix == Path("/usr"):
        raise HpcTrainerError(
            "--with-python: this environment was made from the Python of the operating system (/usr), a copy of which "
            "finds no packages elsewhere. Make the environment from another one, as with `uv venv --managed-python` or "
            "conda, or leave --with-python out."
        )
    version = next((path.name for path in (source / "lib").glob("python3.*")), "")
    library = prefix / "lib" / version
    if not (library / "os.py").is_file():
        raise HpcTrainerError(f"--with-python: {prefix} has no lib/{version or 'python3'}/os.py. Leave it out")
    for name in ("python", "python3", version):
        yield binary, f"bin/{name}"
    for path in sorted((prefix / "lib").glob("libpython*")):
        yield path, f"lib/{path.name}"
    for folder in (library, prefix / "include" / version):
        for path in _walk(folder):
            parts = path.relative_to(folder).parts
            if parts[0] not in _NOT_OF_PYTHON and path.suffix != ".a":
                yield path, str(path.relative_to(prefix))


def _is_python(path: Path) -> bool:
    return path.name.startswith("python")


def _write(members: Iterator[tuple[Path, str]], source: Path, archive: Path) -> tuple[str, int]:
    """Write the files of a virtual environment; return the digest and the number of files."""
    digest, count = hashlib.sha256(), 0
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for path, name in members:
            if path.is_socket():  # tarfile has no member for one
                continue
            member = tar.gettarinfo(path, arcname=f"./{name}")
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            data = None
            if member.issym():
                member.linkname = _moved_link(path, source)
            elif member.isreg():
                data = _moved_script(path, source)
                member.size = member.size if data is None else len(data)
            count += not member.isdir()
            _add(tar, member, path, data, digest)
    return digest.hexdigest(), count


def _add(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, data: bytes | None, digest: Any) -> None:
    digest.update(f"{member.name}\0{member.mode}\0{member.linkname}\0{member.size}\0".encode(errors="surrogateescape"))
    if not member.isreg():
        tar.addfile(member)
        return
    with io.BytesIO(data) if data is not None else path.open("rb") as file:
        tar.addfile(member, _Hashed(file, digest))


class _Hashed:
    """File that updates a digest as it is read, so that each file is read once."""

    def __init__(self, file: IO[bytes], digest: Any) -> None:
        self._file, self._digest = file, digest

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data


def _walk(source: Path) -> Iterator[Path]:
    """Yield all files and folders below `source` in a stable order."""
    for folder, folders, files in os.walk(source):
        folders.sort()
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted([*folders, *files]):
            yield Path(folder, name)
        folders[:] = [name for name in folders if name not in links]


def _moved_link(path: Path, source: Path) -> str:
    """Return the target of a link; one into the environment by its absolute path becomes relative."""
    target = path.readlink()
    if target.is_absolute() and target.is_relative_to(source):
        return os.path.relpath(target, path.parent)
    return str(target)


def _moved_script(path: Path, source: Path) -> bytes | None:
    """Return a script of `bin` that finds its Python beside itself; None for any other file."""
    if path.parent != source / "bin":
        return None
    with path.open("rb") as file:
        if file.read(2) != b"#!":
            return None
        data = b"#!" + file.read()
    python = os.fsencode(source / "bin" / "python")
    first, _, rest = data.partition(b"\n")
    if python in first:
        return _SHEBANG + rest
    second, _, after = rest.partition(b"\n")
    if first == b"#!/bin/sh" and second.startswith(b"'''exec' ") and python in second:
        return _SHEBANG + after.partition(b"\n")[2]
    return None


def _notes(source: Path) -> Iterator[str]:
    """Yield a note for each part of the environment that the archive leaves out."""
    editable = sorted(_editable(source))
    if editable:
        listed = ", ".join(f"{name} ({place})" for name, place in editable[:_SHOWN])
        yield (
            f"{len(editable)} editable install(s) are not in the archive, and ranks import them from their present "
            f"folders: {listed}. Install them without -e; code of the current checkout is frozen anyway (snapshot)"
        )
    links = [path for path in _walk(source) if path.is_symlink() and _leads_out(path, source)]
    if links:
        listed = ", ".join(str(path.relative_to(source)) for path in links[:_SHOWN])
        yield f"{len(links)} link(s) lead out of the environment: {listed}. With uv: uv sync --link-mode copy"


def _leads_out(path: Path, source: Path) -> bool:
    is_python = path.parent == source / "bin" and _is_python(path)
    return not is_python and not path.resolve().is_relative_to(source.resolve())


def _editable(source: Path) -> Iterator[tuple[str, str]]:
    """Yield (distribution, folder) of each editable install."""
    for record_file in source.glob("lib/python*/site-packages/*.dist-info/direct_url.json"):
        try:
            record = json.loads(record_file.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and (record.get("dir_info") or {}).get("editable"):
            yield record_file.parent.name.partition("-")[0], unquote(urlsplit(str(record.get("url"))).path)


# --- conda ---


def _run_conda_pack(source: Path, archive: Path) -> None:
    program = shutil.which("conda-pack") or shutil.which("conda-pack", path=str(source / "bin"))
    if program is None:
        raise HpcTrainerError(
            f"{source} is a conda environment, and conda-pack is not on PATH. Type: pip install conda-pack (or conda "
            "install -c conda-forge conda-pack)"
        )
    arguments = [program, "--quiet", "--prefix", str(source), "--output", str(archive), "--format", "tar", "--force"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode or not archive.is_file():
        raise HpcTrainerError(f"conda-pack failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")


def _digest_of(archive: Path) -> tuple[str, int]:
    """Return the digest and the number of the files of an archive; times do not count."""
    digest, count = hashlib.sha256(), 0
    with tarfile.open(archive) as tar:
        for member in tar:
            description = f"{member.name}\0{member.mode}\0{member.linkname}\0{member.size}\0"
            digest.update(description.encode(errors="surrogateescape"))
            count += not member.isdir()
            file = tar.extractfile(member) if member.isreg() else None
            while file is not None and (data := file.read(1 << 20)):
                digest.update(data)
    return digest.hexdigest(), count


# --- both ---


def _append(archive: Path, facts: dict[str, Any]) -> None:
    data = f"{json.dumps(facts)}\n".encode()
    member = tarfile.TarInfo(f"./{PACK_FACTS}")
    member.size, member.mtime = len(data), int(time.time())
    with tarfile.open(archive, "a") as tar:
        tar.addfile(member, io.BytesIO(data))


def _try(archive: Path, source: Path, modules: Sequence[str]) -> dict[str, Any]:
    """Unpack the archive in another folder, run its Python there, and return its output.

    Raises:
        HpcTrainerError: it does not start, a module is missing, or it still uses the original folder.
    """
    with tempfile.TemporaryDirectory(prefix="hpc_trainer-pack-") as place:
        copy = Path(place).resolve() / "copy"
        copy.mkdir(mode=0o700)
        _ask(["tar", "-x", "--no-same-owner", "-f", str(archive), "-C", str(copy)], "its copy was not unpacked")
        python = str(copy / "bin" / "python")
        if (copy / "bin" / "conda-unpack").exists():
            _ask([python, str(copy / "bin" / "conda-unpack")], "conda-unpack failed in its copy")
        answer = _ask([python, "-I", "-c", _LOOK, *modules], "the Python of its copy failed")
        seen: dict[str, Any] = json.loads(answer.splitlines()[-1])
        if Path(seen["prefix"]).resolve() != copy:
            raise HpcTrainerError(f"the copy of {source} cannot be moved: its Python still belongs to {seen['prefix']}")
        back = [entry for entry in seen["path"] if Path(entry).is_relative_to(source)]
        if back:
            raise HpcTrainerError(
                f"the copy of {source} cannot be moved: its sys.path has {back[0]}. A .pth file or a link has that path"
            )
        return {**seen, "files": [file for file in seen["files"] if not Path(file).is_relative_to(copy)]}


def _ask(words: Sequence[str], problem: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CONDA_"))}
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environ, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HpcTrainerError(f"{problem}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise HpcTrainerError(f"{problem} ({done.returncode}): {said[-1] if said else 'it printed nothing'}")
    return done.stdout


def _outside(seen: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield the folders outside the copy from which modules came, the file system's type, and the number of modules."""
    counts: dict[str, int] = {}
    for file in seen["files"]:
        parts = Path(file).parts
        end = next((index for index, part in enumerate(parts) if part.startswith("python3.")), len(parts) - 2)
        folder = str(Path(*parts[: end + 1]))
        counts[folder] = counts.get(folder, 0) + 1
    for folder, count in sorted(counts.items()):
        mount = mount_of(folder)
        yield folder, "unknown" if mount is None else mount[1], count


def is_shared(kind: str) -> bool:
    """Return True if a file system of this type is one that nodes share."""
    return kind != "unknown" and not is_local(kind)
