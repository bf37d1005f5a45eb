"""Checks of this machine: Python, packages, torch's build, Hydra plugins, limits of the user, ports.

Nothing is imported to be looked at: versions are read from the metadata of installed distributions, and torch's build
from its file `version.py`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hpc_trainer.config.compose.own_files import check_config_dir, config_dirs_of, own_defaults
from hpc_trainer.doctor.findings import Finding, broken, ok, warning
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.runtime.machine import driver

_OURS = "hpc_trainer"
_NEWEST_PYTHON = (3, 13)
"""Newest Python that the tests use."""


def machine_findings() -> Iterator[Finding]:
    """Yield the findings about this machine."""
    yield _python()
    yield from _settings()
    yield from _packages()
    yield from _torch()
    yield from _libraries()
    yield _plugins()
    yield _limits()
    yield _ports()
    yield from _temporary()


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] > _NEWEST_PYTHON:
        newest = ".".join(map(str, _NEWEST_PYTHON))
        return warning(
            "python", f"Python {version} is newer than {newest}, the newest that hpc_trainer is tested with",
            why="packages may have no wheels for it, and warnings of a new Python may become errors",
            fix=f"make the environment with Python 3.10 to {newest}",
        )  # fmt: skip
    return ok("python", f"Python {version}, {sys.executable}")


def _settings() -> Iterator[Finding]:
    """Yield a finding if the user's own file, the project's file or a folder of configurations cannot be used."""
    try:
        own_defaults()
        for folder in config_dirs_of():
            check_config_dir(folder)
    except HpcTrainerError as error:
        yield broken(
            "settings", " ".join(str(error).split()), why="every command that makes a plan ends with this error",
            fix="correct the file, or rename it to try without it",
        )  # fmt: skip


# --- packages ---

_WHY = {
    "hydra-core": "before 1.3.6 a configuration can run any code, and 1.4 changes how launchers are called",
    "omegaconf": "with omegaconf 2.4 pip falls back to hydra-core 1.3.0 of 2022 without a warning",
    "torch": "checkpoints and parallelism use what older releases lack",
}
_IMPOSTORS = {
    "hostlist": (
        "its module hostlist hides that of python-hostlist, which sites' Slurm tools import",
        "pip uninstall hostlist; pip install python-hostlist",
    ),
    "pynvml": (
        "its module pynvml is an old copy of nvidia-ml-py's, or a wrapper that warns at each import; telemetry of GPUs "
        "reads whichever was installed last",
        "pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py",
    ),
}
"""Distribution with a misleading name -> (why it matters, what to type)."""
_WATCHED = ("torch", "hydra-core", "omegaconf", "submitit", "numpy", _OURS)
"""Distributions of which two copies would be confusing."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*((?:[<>=!~]=?\s*[0-9A-Za-z.*+!]+,?\s*)*)$")


def _packages() -> Iterator[Finding]:
    problems = [*_wrong_versions(), *_impostors(), *_copies()]
    yield from problems
    if not problems:
        yield ok("packages", f"hpc_trainer {_version(_OURS) or 'from a folder'} and what it needs")


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _wrong_versions() -> Iterator[Finding]:
    """Yield each requirement of hpc_trainer that the installed version breaks."""
    try:
        requirements = metadata.requires(_OURS) or []
    except metadata.PackageNotFoundError:  # imported from a folder
        return
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None:  # of an extra, or with a marker
            continue
        name, bounds = match[1], match[2].strip()
        version = _version(name)
        if version is None:
            state = f"{name} is not installed"
        elif not _fits(version, bounds):
            state = f"{name} {version} is installed, and hpc_trainer needs {name}{bounds}"
        else:
            continue
        yield broken(
            "packages", state, why=_WHY.get(name.lower(), "hpc_trainer is written for these versions"),
            fix=f"pip install '{name}{bounds}'",
        )  # fmt: skip


def _fits(version: str, bounds: str) -> bool:
    """Return True if a version is within bounds such as `>=1.3.6,<1.4`; unusual operators are taken as fulfilled.

    Only numbers are compared: 1.4.0rc3 counts as 1.4.0, which `<1.4` excludes (PEP 440, exclusive ordered comparison).
    """
    for operator, bound in re.findall(r"(>=|<=|<|>)\s*([0-9.]+)", bounds):
        left, right = _numbers(version), _numbers(bound)
        width = max(len(left), len(right))
        left, right = (part + (0,) * (width - len(part)) for part in (left, right))
        if not {">=": left >= right, "<=": left <= right, "<": left < right, ">": left > right}[operator]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"[0-9.]+", version)
    return tuple(int(part) for part in match[0].split(".") if part) if match else ()


def _impostors() -> Iterator[Finding]:
    for name, (why, fix) in _IMPOSTORS.items():
        version = _version(name)
        if version is not None:
            yield warning("packages", f"the package {name} {version} is installed", why=why, fix=fix)


def _copies() -> Iterator[Finding]:
    """Yield each watched package that is installed more than once on Python's path."""
    for name in _WATCHED:
        places: dict[tuple[str, str], None] = {}
        for distribution in metadata.distributions(name=name):
            is_link = str(distribution.read_text("direct_url.json") or "").find('"editable": true') >= 0
            if not is_link:  # an editable install may have metadata in the checkout too
                places[distribution.version, os.path.realpath(str(distribution.locate_file("")))] = None
        if len(places) > 1:
            listed = ", ".join(f"{version} in {place}" for version, place in places)
            first = next(iter(places))
            yield warning(
                "packages", f"{name} is installed {len(places)} times: {listed}",
                why=f"Python imports the first one ({first[0]}), and pip changes another; a compute node with another "
                "home or PYTHONPATH imports another one",
                fix=f"pip uninstall {name} until pip finds none, then install it once; PYTHONNOUSERSITE=1 leaves "
                "~/.local out",
            )  # fmt: skip


# --- torch ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Build of the installed torch."""

    version: str
    cuda: str | None
    """Release of CUDA, as `12.8`; None for another build."""
    hip: str | None
    """Release of ROCm; None for another build."""
    architecture: str | None
    """Architecture of its binaries, as `uname -m` names it; None if its metadata do not say."""

    @property
    def kind(self) -> str:
        """Return the build in words."""
        return f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPU only"


_TAG = re.compile(
    r"^Tag: \S+?-\S+?-(?:manylinux\w*?|linux|musllinux\w*?)_(x86_64|aarch64|ppc64le|armv7l|i686)$", re.MULTILINE
)


def torch_build() -> TorchBuild | None:
    """Read the build of the torch that Python would import; None if it has none."""
    # Finds the file and runs none of it. importlib.util.find_spec would answer of a torch that is imported already.
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    values: dict[str, str | None] = {}
    with contextlib.suppress(OSError, SyntaxError):
        for node in ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                values[target.id] = None if value.value is None else str(value.value)
    wheel = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        wheel = metadata.distribution("torch").read_text("WHEEL") or ""
    tag = _TAG.search(wheel)
    return TorchBuild(
        version=values.get("__version__") or _version("torch") or "unknown",
        cuda=values.get("cuda"),
        hip=values.get("hip"),
        architecture=tag[1] if tag else None,
    )


_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major release of CUDA -> oldest driver branch (NVIDIA, CUDA Compatibility, table 1)."""


def _torch() -> Iterator[Finding]:
    build = torch_build()
    if build is None:
        yield broken(
            "torch", f"{sys.executable} has no torch",
            why="each rank of a training imports it (a program of your own need not)",
            fix="install the build for your compute nodes: https://pytorch.org/get-started/locally",
        )  # fmt: skip
        return
    if build.architecture is not None and build.architecture != platform.machine():
        yield broken(
            "torch", f"torch {build.version} is built for {build.architecture}, and this machine is a "
            f"{platform.machine()}",
            why="its libraries cannot be loaded here",
            fix="make one environment for each architecture, on a machine of that architecture",
        )  # fmt: skip
        return
    least, installed = _least_driver(build), driver()
    if installed is not None and least is not None and _numbers(installed) < (least,):
        yield broken(
            "torch", f"torch {build.version} ({build.kind}) needs NVIDIA driver {least} or newer, and this machine has "
            f"{installed}",
            why="CUDA does not start: torch.cuda.is_available() is False",
            fix="install a torch for an older CUDA (https://pytorch.org/get-started/previous-versions)",
        )  # fmt: skip
    elif installed is not None and build.cuda is None:
        yield warning(
            "torch", f"torch {build.version} is built for {build.kind}, and this machine has NVIDIA's driver "
            f"{installed}",
            why="runs on GPUs fail at their start",
            fix="pip install torch from the index for CUDA: https://pytorch.org/get-started/locally",
        )  # fmt: skip
    else:
        suffix = f", driver {installed}" if installed else f", needs driver {least} or newer" if least else ""
        yield ok("torch", f"torch {build.version}, {build.kind}{suffix}")


def _least_driver(build: TorchBuild) -> int | None:
    major = _numbers(build.cuda or "")[:1]
    return _LEAST_DRIVER.get(major[0]) if major else None


_OF_CUDA = {
    "libcudart": "nvidia-cuda-runtime",
    "libnvJitLink": "nvidia-nvjitlink",
    "libcudnn": "nvidia-cudnn",
    "libnccl": "nvidia-nccl",
}
"""Library -> the package, without -cu12 and the like, that brings it for torch."""


def _libraries() -> Iterator[Finding]:
    """Yield a finding if LD_LIBRARY_PATH has an older library of CUDA, which torch then loads instead of its own."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for library, package in _OF_CUDA.items() if folders else ():
        names = (package, *(f"{package}-cu{major}" for major in _LEAST_DRIVER))
        name, own = next(((name, own) for name in names if (own := _version(name))), (package, None))
        if own is None:
            continue
        soname = f"{library}.so.{_numbers(own)[0]}"
        first = next((folder for folder in folders if os.access(folder / soname, os.R_OK)), None)
        if first is None:
            continue
        real = (first / soname).resolve().name
        found = _numbers(real.removeprefix(f"{library}.so."))
        if found < _numbers(own)[: len(found)]:
            yield warning(
                "libraries", f"LD_LIBRARY_PATH has {real} in {first}, and torch needs that of {name} {own}",
                why="the older library is loaded first: undefined symbol, or CUDA does not start; jobs get the same "
                "LD_LIBRARY_PATH",
                fix="module unload the CUDA module before submit and in cluster.setup (torch brings its own CUDA), or "
                "unset LD_LIBRARY_PATH",
            )  # fmt: skip


# --- Hydra plugins, limits, ports, temporary files ---


def _plugins() -> Finding:
    """Look for packages in the namespace `hydra_plugins` that neither we nor an installed distribution brought."""
    strange, owners = [], set()
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or os.curdir, "hydra_plugins")
        names = sorted(os.listdir(folder)) if folder.is_dir() else []  # noqa: PTH208
        for name in names:
            module = name.removesuffix(".py")
            if name.startswith(("__", ".")) or module == "hpc_trainer_launcher":
                continue
            owner = _owner_of_plugin(name)
            if owner is None:
                strange.append(str(folder / name))
            else:
                owners.add(owner)
    if strange:
        return warning(
            "hydra plugins", f"no installed package brought {', '.join(strange)}",
            why="Hydra imports every module of hydra_plugins at each start: its code runs as you, also in jobs",
            fix=f"look at it; if it is not yours, remove it: rm -r {strange[0]}",
        )  # fmt: skip
    return ok("hydra plugins", ", ".join(["those of hpc_trainer", *sorted(owners)]))


def _owner_of_plugin(name: str) -> str | None:
    """Return name and version of the installed distribution that brought a plugin, or that links to its checkout."""
    for distribution in metadata.distributions():
        title = str(distribution.metadata["Name"] or "")
        if "hydra" not in title.lower() and "hpc" not in title.lower():
            continue
        brought = {file.parts[1] for file in distribution.files or () if file.parts[:1] == ("hydra_plugins",)}
        if name in brought or title.replace("-", "_").lower() == name.removesuffix(".py").lower():
            return f"{title} {distribution.version}"
    return None


_FEWEST = {
    "NOFILE": (1024, "open files", "data loaders and checkpoints of several ranks open hundreds of files"),
    "NPROC": (512, "processes and threads", "ranks, data loaders and BLAS start hundreds of threads"),
}
"""Limit -> (least useful value, what it counts, why it matters)."""
_UNLIMITED = {
    "FSIZE": ("bytes of a file", "a checkpoint that is larger ends the run with SIGXFSZ"),
    "AS": ("bytes of address space", "CUDA reserves more addresses than a node has memory"),
}


def _limits() -> Finding:
    low = []
    for name, (least, what, why) in _FEWEST.items():
        value = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        if value != resource.RLIM_INFINITY and value < least:
            low.append((f"{value:,} {what} (RLIMIT_{name}, at least {least:,})", why, f"{_ULIMIT[name]} {least * 4}"))
    for name, (what, why) in _UNLIMITED.items():
        value = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        if value != resource.RLIM_INFINITY:
            low.append((f"{value:,} {what} (RLIMIT_{name})", why, f"{_ULIMIT[name]} unlimited"))
    if not low:
        files, processes = (_limit_text(resource.getrlimit(limit)[0]) for limit in (resource.RLIMIT_NOFILE, _NPROC))
        return ok("limits", f"{files} open files, {processes} processes")
    values, reasons, fixes = zip(*low, strict=True)
    return warning(
        "limits", f"this shell may use only {'; '.join(values)}",
        why=f"{'; '.join(reasons)}. Slurm gives jobs the limits of the shell that submits, unless the site forbids it "
        "(PropagateResourceLimits)",
        fix=f"in the shell's start-up file: {'; '.join(f'ulimit {options}' for options in fixes)}",
    )  # fmt: skip


_NPROC = resource.RLIMIT_NPROC
_ULIMIT = {"NOFILE": "-S -n", "NPROC": "-S -u", "FSIZE": "-S -f", "AS": "-S -v"}


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _ports() -> Finding:
    """Listen on a free port of the loopback, as ranks of one node do, and connect to it."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=2.0):
                port = server.getsockname()[1]
    except OSError as error:
        return broken(
            "ports", f"no connection to a port of 127.0.0.1: {error.strerror or error}",
            why="ranks meet over TCP, on one node over 127.0.0.1",
            fix="ask the site, or the owner of the container, for a loopback interface (ip link set lo up)",
        )  # fmt: skip
    return ok("ports", f"a free port of 127.0.0.1 can be used ({port})")


def _temporary() -> Iterator[Finding]:
    folder = os.environ.get("TMPDIR")
    if folder and not os.access(folder, os.W_OK | os.X_OK):
        state = "does not exist" if not os.path.lexists(folder) else "takes no files of yours"
        yield warning(
            "temporary files", f"TMPDIR={folder} {state}",
            why="Python then uses /tmp, but mktemp, apptainer and compilers fail; jobs get the same variable",
            fix="mkdir -p that folder, or unset TMPDIR",
        )  # fmt: skip
