"""A person's project folder, as tests need it: files, perhaps a git checkout, and what is frozen of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.launch.frozen_code.snapshot import Snapshot, read_code
from tests.unit.record.builders import make_spec


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes files by their paths below `folder`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def git(folder: Path, *argv: str) -> None:
    """One git command there, in nobody's name."""
    author = ("-c", "user.name=Me", "-c", "user.email=me@example.org", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *author, *argv], cwd=folder, check=True, capture_output=True)


def make_checkout(folder: Path) -> Path:
    """A git checkout with one committed package, my_lab."""
    write_files(folder, {"my_lab/net.py": "class Net: ...\n", "my_lab/__init__.py": "", "setup.py": ""})
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "First")
    return folder


def frozen(runs_dir: Path, target: str = "my_lab.net.Net", **snapshot: Any) -> Snapshot:
    """What is frozen for one run whose model is `target`, submitted from the current folder."""
    changes = {f"snapshot__{key}": value for key, value in snapshot.items()}
    package = target.split(".", 1)[0]
    spec = make_spec("cluster=local", "model=custom", f"model._target_={target}", trust=[package], **changes)
    code = read_code([spec], runs_dir)
    assert code is not None
    return code


def names(code: Snapshot, root: str) -> Sequence[str]:
    """The files of one root, sorted."""
    return sorted(name.removeprefix(f"{root}/") for name in code.contents if name.startswith(f"{root}/"))


def links_of(code: Snapshot) -> dict[str, str]:
    """The links of the only project that lead out of the copy: target by name."""
    return {
        name.partition("/")[2]: os.fsdecode(target)
        for name, (mode, target) in code.contents.items()
        if mode == "link" and target.startswith(b"/")
    }
