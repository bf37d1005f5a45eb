"""Code that torch.compile made, cached in the sweep's folder: its first run compiles, later ones read.

torch caches in a folder (TORCHINDUCTOR_CACHE_DIR). Here each rank has its own such folder, in the node's temporary
files: many nodes in one folder on a shared file system race, and lose (docs/decisions/0017-compile-cache.md). Before
the first step the folder is filled from an archive in the sweep's folder; after it the folder is packed into one. An
archive is written under another name and renamed, so a reader gets all of it or nothing.

An archive holds machine code and pickled graphs: reading an archive is running code. An archive is used only if its
checksum is right. As for the run's frozen code, this user (or root) must own it and its folder, and no other user may
write to either.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.schema.train import CompileScope, TrainConfig
from hpc_trainer.config.store import KEYS
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.features.compile.graphs import compilations_within, compile_step, graph_counts, uncompiled
from hpc_trainer.models.parts import check_has_blocks
from hpc_trainer.record.files import narrow_default_acl, whole_file
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.ledger import Kind
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.trust import check_trusted
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.context import RunContext

_HEAD = b"hpc_trainer compile cache 1\n"
# Variables of the folders that torch and Triton write to; both read them at each use.
_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_VARIABLES = {_FOLDER_VARIABLE: "", "TRITON_CACHE_DIR": "triton"}
_TORCH_DEFAULT = "torchinductor_"  # torch sets the variable itself, when it is imported, to /tmp/torchinductor_<user>
# Configuration keys that can change a graph. A superfluous key costs a run one compilation, and no error.
_IN_GRAPH = [name.split(".") for name, key in KEYS.items() if key.in_graph and "." in name]


def cache_key(config: TrainConfig, facts: Mapping[str, Any]) -> str:
    """Return the key of a compile cache, 16 hex digits.

    torch compares far more before it takes a graph: the key only says which archive may fit.

    Args:
        facts: facts of the resume contract: `code`, `versions`, `device`, `world_size`.
    """
    plain = to_plain(config)
    parts: dict[str, Any] = {}
    for section, name in _IN_GRAPH:
        # A key of another variant is left out. So is an empty list, as in cache keys of earlier versions.
        if plain[section].get(name, []) != []:
            parts.setdefault(section, {})[name] = plain[section][name]
    (parts["parallel"],) = parts["parallel"].values()  # a value by itself: as in cache keys of earlier versions
    parts |= {name: facts.get(name) for name in ("code", "versions", "device", "world_size")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def open_cache(config: TrainConfig, run: RunContext) -> CompileCache | None:
    """Return the cache of one rank, filled if the sweep has an archive that may fit. Collective.

    It is None if the environment names a cache folder. Each local rank has its own archive: if ranks see all GPUs of
    their node, the number of the rank's GPU is in the compiled code. Close the cache at the end.
    """
    key = run.group.broadcast(cache_key(config, run.contract.facts) if run.is_rank_zero else None)
    named = os.environ.get(_FOLDER_VARIABLE, "")
    if named and not Path(named).name.startswith(_TORCH_DEFAULT):
        print(f"torch.compile: {_FOLDER_VARIABLE}={named} is used, and not the sweep's cache")
        return None
    folder = SweepPaths(run.paths.folder.parent).compile_cache
    cache = CompileCache(folder / f"{key}.{run.env.local_rank}.cache", writes=run.env.node_rank == 0)
    cache.load()
    return cache


@dataclass(slots=True)
class CompileCache:
    """Compile cache of one rank.

    `archive` is in the sweep's folder. `writes` is true for the rank that packs it: one for each archive.
    """

    archive: Path
    writes: bool
    folder: Path = field(init=False)
    """Cache folder of this rank, on the node."""
    _loaded: frozenset[str] = frozenset()
    _before: dict[str, str | None] = field(default_factory=dict)
    _is_saved: bool = False
    _begin: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        # Made with mode 0700, under a name that nobody can guess.
        self.folder = Path(tempfile.mkdtemp(prefix="hpc_trainer-compile-", dir=os.environ.get("SLURM_TMPDIR")))
        for name, below in _VARIABLES.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = str(self.folder / below)

    def load(self) -> bool:
        """Fill the node's folder from the archive; return False if no archive can be used."""
        try:
            content = read_archive(self.archive)
        except (HpcTrainerError, OSError) as error:
            print(f"WARNING: the compile cache is not used: {error}")
            return False
        if content is None:
            return False
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            file.extractall(self.folder)
        self._loaded = frozenset(_files(self.folder))
        print(f"torch.compile: {len(self._loaded)} files of the sweep's cache, {len(content) / 2**20:.1f} MiB")
        return True

    def save_once(self) -> None:
        """Pack the archive after the first step, if there are new files. Not collective.

        A full or broken file system is a warning.
        """
        if self._is_saved:
            return
        self._is_saved = True
        counts = graph_counts()
        print(
            f"torch.compile: first step {time.perf_counter() - self._begin:.1f} s after the start of compilation; "
            f"{counts['graphs']} graphs, {counts['cached']} from the cache, {counts['made']} made"
        )
        names = _files(self.folder)
        if not self.writes or not names.keys() - self._loaded:
            return
        try:
            write_archive(self.archive, names)
        except (HpcTrainerError, OSError) as error:
            print(f"WARNING: the compile cache was not saved: {error}")

    def close(self) -> None:
        """Remove the node's folder, and restore the environment. May be called again."""
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._before.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def read_archive(path: Path) -> bytes | None:
    """Return the zip in an archive; None if there is none, or if it is damaged (it is replaced then).

    Raises:
        UntrustedFileError: another user owns the archive or its folder, others may write them, or it is a link.
    """
    if not is_there(path):
        return None
    check_trusted(path.parent)
    check_trusted(path)
    data = path.read_bytes()
    head, digest, content = data[: len(_HEAD)], data[len(_HEAD) : len(_HEAD) + 64], data[len(_HEAD) + 64 :]
    if head != _HEAD or digest != hashlib.sha256(content).hexdigest().encode():
        print(f"WARNING: {path} is damaged, and not used")
        return None
    return content


def write_archive(path: Path, names: Mapping[str, Path]) -> None:
    """Replace the archive by one with these files, atomically.

    Raises:
        UntrustedFileError: the folder is another user's, or others may write it.
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    narrow_default_acl(path.parent)
    check_trusted(path.parent)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, place in sorted(names.items()):
            file.write(place, name)
    content = buffer.getvalue()
    with whole_file(path) as out:
        out.write(_HEAD + hashlib.sha256(content).hexdigest().encode() + content)


def _files(folder: Path) -> dict[str, Path]:
    """Return the files to keep by their name below `folder`: no locks, and none that is still being written."""
    files = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "locks"]
        for name in names:
            if not name.endswith((".tmp", ".lock")) and not name.startswith("."):
                path = Path(parent, name)
                files[str(path.relative_to(folder))] = path
    return files


class CompileAbility(Ability):
    _cache: CompileCache | None = None
    _stack: contextlib.ExitStack | None = None

    def see_whole(self, model: nn.Module, building: Building) -> None:
        if self.config.train.compile_scope is CompileScope.blocks:
            check_has_blocks(model, "train.compile_scope=blocks compiles blocks", "train.compile_scope=model")

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        """Compile the step. Collective.

        An estimate counts the uncompiled step.
        """
        if building.run is not None:
            self._cache = open_cache(self.config, building.run)
            compile_step(loss, self.config.train)
            spans = building.run.spans
            self._stack = contextlib.ExitStack()
            self._stack.enter_context(compilations_within(lambda: spans.within(Kind.compile)))

    def trying(self) -> contextlib.AbstractContextManager[None]:
        return uncompiled()

    def after_step(self, step: int) -> None:
        if self._cache is not None:
            self._cache.save_once()

    def close(self, error: BaseException | None) -> None:
        if self._stack is not None:
            self._stack.close()
        if self._cache is not None:
            self._cache.close()


ABILITY = CompileAbility
