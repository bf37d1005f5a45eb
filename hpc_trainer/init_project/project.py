"""Files of a new project: those of template/, filled in, and a hardware profile of this cluster or machine."""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.user_files import naming
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.machine import cpu, devices

_TEMPLATE = Path(__file__).with_name("template")
# A file's name in the project: {package} and {name} are filled in. Names in template/ have no leading dot and no .py:
# git would obey an ignore file there, and linters and imports would take the modules for ours.
_PLACES = {
    "README.md": "README.md",
    "ci.yml": ".github/workflows/test.yml",
    "data.py.txt": "{package}/data.py",
    "experiment.yaml": "conf/experiment/{name}.yaml",
    "gitignore": ".gitignore",
    "hpc_trainer.yaml": "hpc_trainer.yaml",
    "init.py.txt": "{package}/__init__.py",
    "loop.py.txt": "{package}/loop.py",
    "model.py.txt": "{package}/model.py",
    "own_loop.yaml": "conf/experiment/{name}_own_loop.yaml",
    "pyproject.toml": "pyproject.toml",
    "submit.sh": "jobs/submit.sh",
    "task.py.txt": "{package}/task.py",
    "test_resume.py.txt": "tests/test_resume.py",
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_TAKEN = frozenset({"hpc_trainer", "torch", "conf", "tests", "jobs", "runs", "hydra", "digits", "custom", "test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NewProject:
    """A project that was written."""

    folder: Path
    name: str
    package: str
    files: tuple[str, ...]
    hardware: str
    """Where the figures of conf/hardware/here.yaml come from."""


def check_name(name: str) -> str:
    """Return the name of the package for a project's name.

    Raises:
        ConfigError: the name cannot be that of an experiment and a package.
    """
    package = _package(name)
    if package is None:
        better = re.sub(r"[^A-Za-z0-9_-]", "_", name).strip("_-")[:34] or "project"
        better = better if _package(better) is not None else f"my_{better}"
        raise ConfigError(
            f"{name!r} cannot be the name of a project: it becomes a package, so it begins with a letter, has letters, "
            f"digits, _ and -, at most 40, and is not a name of Python or hpc_trainer. Use {better}."
        )
    return package


def _package(name: str) -> str | None:
    """Return the package of a project's name; None if the name cannot be one."""
    package = name.replace("-", "_").lower()
    is_free = not keyword.iskeyword(package) and package not in _TAKEN
    return package if is_free and _NAME.fullmatch(name) else None


def write_project(folder: Path, name: str, more: Mapping[str, str] | None = None) -> NewProject:
    """Write a project into a folder, which may exist; nothing is written if one of its files is there.

    Args:
        folder: the project's folder.
        name: the project's name.
        more: further files by their place in the project.

    Raises:
        ConfigError: the name is not valid, or a file is there already.
    """
    package = check_name(name)
    values, hardware = hardware_here()
    texts = {
        place.format(package=package, name=package): _filled(_TEMPLATE / source, name, package)
        for source, place in _PLACES.items()
    }
    texts["conf/hardware/here.yaml"] = as_yaml(values, f"{hardware}. Check the figures; hpc-trainer plan does, too.")
    texts |= more or {}
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, and init overwrites nothing. Choose another NAME.")
    present = sorted(place for place in texts if os.path.lexists(folder / place))
    if present:
        few = ", ".join(present[:4]) + (" .." if len(present) > 4 else "")
        raise ConfigError(f"{folder} has {few} already, and init overwrites nothing. Choose another NAME.")
    for place, text in texts.items():
        path = folder / place
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        if place.endswith(".sh"):
            path.chmod(path.stat().st_mode | 0o100)
    return NewProject(folder=folder, name=name, package=package, files=tuple(sorted(texts)), hardware=hardware)


def _filled(path: Path, name: str, package: str) -> str:
    text = path.read_text(encoding="utf-8")
    for word, value in (("PROJECT", name), ("PACKAGE", package), ("EXPERIMENT", package)):
        text = text.replace(f"{{{{{word}}}}}", value)
    return text


def as_yaml(values: Mapping[str, Any], comment: str) -> str:
    """Return a file of a configuration group: a comment, then the values in their order."""
    import yaml

    return f"# {comment}\n{yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=110)}"


# --- hardware ---


def hardware_here() -> tuple[dict[str, Any], str]:
    """Return the keys of a profile for the smallest run on this cluster, else for this machine, and their origin."""
    for profile_of in contributions("cluster_profile"):
        if (keys := profile_of()) is not None:
            values, where = keys
            return {**values, "name": "here"}, f"The smallest run in {where} (scontrol, sinfo, sacctmgr)"
    gpus = len(devices())
    cores = int(cpu()["allowed"] or 1)
    if gpus:
        values = {"name": "here", "num_nodes": 1, "gpus_per_node": gpus, "cpus_per_gpu": max(1, cores // gpus)}
        return values, f"Of this machine: all its {gpus} GPUs"
    return {"name": "here", "num_nodes": 1, "tasks_per_node": 1, "cpus_per_task": cores}, "Of this machine: no GPU"
