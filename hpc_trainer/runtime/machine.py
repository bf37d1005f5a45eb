"""Machine and software of a process: processor, driver, devices, Python, packages, libraries, modules, variables."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_NVIDIA = Path("/proc/driver/nvidia")
_VERSION = re.compile(r"Kernel Module(?: for \w+)?\s+([0-9.]+)")


def cpu() -> dict[str, Any]:
    """Return the processor's model, the number of processors, and the number that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": _processor() or None, "count": os.cpu_count(), "allowed": allowed}


@functools.cache  # the kernel writes a page for each of its processors anew
def _processor() -> str:
    model = None
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return model or platform.processor()


def memory_bytes() -> int | None:
    """Return the bytes of the machine's memory; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def driver() -> str | None:
    """Return the version of NVIDIA's kernel module; None if there is none."""
    try:
        match = _VERSION.search((_NVIDIA / "version").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def devices() -> list[dict[str, Any]]:
    """Return name, UUID and memory of each GPU: those that torch sees once it uses CUDA, else all of the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        gpus = []
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            uuid = getattr(facts, "uuid", None)
            gpus.append(
                {
                    "name": facts.name,
                    "uuid": None if uuid is None else f"GPU-{uuid}",
                    "memory_bytes": facts.total_memory,
                }
            )
        return gpus
    return _of_driver()


def _of_driver() -> list[dict[str, Any]]:
    gpus = []
    for path in sorted(_NVIDIA.glob("gpus/*/information")):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
            gpus.append({"name": facts.get("Model"), "uuid": facts.get("GPU UUID"), "memory_bytes": None})
    return gpus


# Variables that change results, speed, or which files are found. Others may be private and are not recorded.
_PREFIXES = (
    "SLURM_", "CUDA_", "NVIDIA_", "NCCL_", "RCCL_", "HIP_", "ROCR_", "HSA_", "OMP_", "MKL_", "KMP_", "GOMP_",
    "OPENBLAS_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUBLAS_", "CUDNN_", "XLA_", "PJRT_", "GLOO_",
    "UCX_", "FI_", "HPC_TRAINER_", "PYTHON", "HF_", "TRANSFORMERS_",
)  # fmt: skip
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "MALLOC_CONF")
_LONGEST = 4_096


def python() -> dict[str, Any]:
    """Return facts about the interpreter and the environment that it belongs to."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "compiler": platform.python_compiler(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "conda": os.environ.get("CONDA_DEFAULT_ENV"),
    }


def packages(path: Sequence[str] | None = None) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Return the version of every installed distribution, and the origin of those that come from no index, by name.

    An origin follows PEP 610: the `url`, `editable`, and the revision in a version control system. Names and versions
    are read from the names of folders, in 5 ms: parsing the metadata of 150 distributions takes 150 ms of a core.

    Args:
        path: folders to search; None for sys.path.
    """
    versions: dict[str, str] = {}
    origins: dict[str, dict[str, Any]] = {}
    for entry in dict.fromkeys(path if path is not None else sys.path):
        for folder in _distributions(entry or os.curdir):
            name, version = _name_and_version(folder)
            if name is None or version is None or name in versions:  # the first one on the path is imported
                continue
            versions[name] = version
            with contextlib.suppress(OSError):
                origins[name] = _origin(Path(folder, "direct_url.json").read_text(encoding="utf-8", errors="replace"))
    return dict(sorted(versions.items())), dict(sorted(origins.items()))


def _distributions(entry: str) -> list[str]:
    try:
        return [f"{entry}/{name}" for name in os.listdir(entry) if name.endswith((".dist-info", ".egg-info"))]  # noqa: PTH208
    except OSError:  # a zip file, or nothing
        return []


def _name_and_version(folder: str) -> tuple[str | None, str | None]:
    stem, kind = os.path.splitext(os.path.basename(folder))  # noqa: PTH119, PTH122
    name, _, version = stem.partition("-")
    if kind != ".dist-info" or not version or "_" in version:  # an escaped version, or setuptools' egg-info
        distribution = metadata.PathDistribution(Path(folder))
        with contextlib.suppress(Exception):  # damaged metadata: the folder's name is all there is
            name, version = str(distribution.metadata["Name"] or name), distribution.version
    return re.sub(r"[-_.]+", "-", name).lower() or None, version or None


def _origin(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
        origin: dict[str, Any] = {"url": str(record["url"])}
        if (record.get("dir_info") or {}).get("editable"):
            origin["editable"] = True
        vcs = record.get("vcs_info") or {}
        return origin | {key: str(vcs[key]) for key in ("vcs", "commit_id") if key in vcs}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {"url": "unreadable"}


def libraries() -> dict[str, Any]:
    """Return the versions of torch and its libraries, and its threads, if this process has loaded torch; else {}."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "version"):
        return {}
    versions: dict[str, Any] = {"torch": str(torch.__version__), "torch_revision": torch.version.git_version}
    versions |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    versions["cpu_kernels"] = torch.backends.cpu.get_cpu_capability()
    if torch.version.cuda is not None and torch.cuda.is_initialized():
        versions["cudnn"] = torch.backends.cudnn.version()
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
        versions["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl
    versions["threads"] = torch.get_num_threads()
    return {key: value for key, value in versions.items() if value is not None}


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that may matter, by name, each cut to 4,096 characters."""
    return {
        name: value[:_LONGEST]
        for name, value in sorted(environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def modules() -> list[str]:
    """Return the modules that `module load` has loaded (Environment Modules, Lmod)."""
    return [module for module in os.environ.get("LOADEDMODULES", "").split(":") if module]


_LARGEST_READ = 64 * 2**20


def packages_digest(versions: Mapping[str, str]) -> str:
    """Return the SHA-256 of the lines NAME==VERSION of all distributions, as sorted `pip freeze` lines would be."""
    return hashlib.sha256("".join(f"{name}=={versions[name]}\n" for name in sorted(versions)).encode()).hexdigest()


def file_facts(path: str, seen: str | None = None) -> dict[str, Any]:
    """Return size, time of change and SHA-256 of a file; a file of more than 64 MiB has no SHA-256.

    Args:
        path: path of the file; inside a container it may not exist.
        seen: "SIZE SECONDS" of the file as another process saw it; used if this process cannot see it.
    """
    facts: dict[str, Any] = {"path": path, "bytes": None, "changed": None, "sha256": None}
    try:
        info = os.stat(path)  # noqa: PTH116
        facts |= {"bytes": info.st_size, "changed": int(info.st_mtime)}
        if info.st_size <= _LARGEST_READ:
            facts["sha256"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        size, _, changed = (seen or "").replace("-", " ").partition(" ")
        if size.isdecimal() and changed.isdecimal():
            facts |= {"bytes": int(size), "changed": int(changed)}
    return facts


def conda_digest(prefix: str) -> str | None:
    """Return the SHA-256 of the names of all packages of a conda environment; None for any other folder."""
    try:
        names = sorted(name for name in os.listdir(f"{prefix}/conda-meta") if name.endswith(".json"))  # noqa: PTH208
    except OSError:
        return None
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def system() -> dict[str, Any]:
    """Return kernel, C library, distribution and container."""
    libc = " ".join(platform.libc_ver()).strip()
    return {
        "system": platform.system(), "kernel": platform.release(), "machine": platform.machine(), "libc": libc or None,
        "distribution": _distribution(), "container": container(),
    }  # fmt: skip


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


@functools.cache
def container() -> str | None:
    """Return kind and, if known, image of the container that this process is in; None if no container is known."""
    return next(_containers(), None)


def _containers() -> Iterator[str]:
    for name, kind in (("APPTAINER_CONTAINER", "apptainer"), ("SINGULARITY_CONTAINER", "singularity")):
        if os.environ.get(name):
            yield f"{kind} {os.environ[name]}"
    if os.environ.get("SLURM_CONTAINER"):
        yield f"slurm {os.environ['SLURM_CONTAINER']}"
    if os.environ.get("ENROOT_ROOTFS"):
        yield f"enroot {os.environ['ENROOT_ROOTFS']}"
    if Path("/run/.containerenv").exists():
        yield "podman"
    if Path("/.dockerenv").exists():
        yield "docker"
