"""The archive of frozen code, runs/<sweep>/code/<digest>.zip, written atomically."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import zipfile
from pathlib import Path

from hpc_trainer.errors import SubmitError
from hpc_trainer.launch.frozen_code.frozen_worker import MANIFEST, member, read_archive
from hpc_trainer.launch.frozen_code.snapshot import Snapshot, starter_code
from hpc_trainer.launch.frozen_code.unpacking import RefusedCodeError
from hpc_trainer.runs.files import check_trusted, fsync_folder, whole_file
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.modes import make_folder
from hpc_trainer.runs.shared_folder import age_on_server_s, is_there

# A file that a killed submit left half written is removed when no live submit can still be writing it.
_STALE_S = 3600.0


def archive_of(paths: SweepPaths, digest: str) -> Path:
    """Return the path of the archive with this digest (64 hex digits) in a sweep's folder."""
    return paths.code / f"{digest[:12]}.zip"


def store_code(paths: SweepPaths, snapshot: Snapshot) -> Path:
    """Write the archive that workers start from into the sweep's folder, unless it exists, and return its path.

    The archive is flushed to the disk and appears by a rename; if this process is killed before, there is no archive.

    Raises:
        SubmitError: the archive of this digest was changed.
        UntrustedFileError: others may have changed the archive.
    """
    archive = archive_of(paths, snapshot.digest)
    make_folder(paths.code)
    check_trusted(paths.code)
    if is_there(archive):
        check_trusted(archive)
        try:
            manifest, _ = read_archive(archive)
            if manifest != snapshot.manifest:
                raise RefusedCodeError(f"{archive} holds other code of the same short digest")
        except RefusedCodeError as error:
            raise SubmitError(
                f"{error}. Runs that wait refuse to start from it. Move it away and submit again: that writes it anew."
            ) from error
        return archive
    _remove_stale(paths.code)
    with whole_file(archive) as file:
        file.write(_pack(snapshot))
        os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o444)  # read-only: it is never written again
    fsync_folder(paths.folder)
    return archive


def _pack(snapshot: Snapshot) -> bytes:
    packed = io.BytesIO()
    # Stored, not compressed: 0.4 MB of Python in 100 files take 15 ms to deflate, and 1 ms to write.
    with zipfile.ZipFile(packed, "w") as file:
        for name, content in {**starter_code(), MANIFEST: json.dumps(snapshot.manifest, indent=1).encode()}.items():
            file.writestr(zipfile.ZipInfo(name), content)
        for number, (name, (_, content)) in enumerate(snapshot.contents.items()):
            file.writestr(zipfile.ZipInfo(member(number, name)), content)
    return packed.getvalue()


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if age_on_server_s(path) > _STALE_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
