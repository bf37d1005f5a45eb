"""The software that this process runs with: Python, packages, libraries, modules, variables."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

# What changes results, speed or what is found. Others are nobody's business.
_PREFIXES = (
    "SLURM_", "CUDA_", "NVIDIA_", "NCCL_", "RCCL_", "HIP_", "ROCR_", "HSA_", "OMP_", "MKL_", "KMP_", "GOMP_",
    "OPENBLAS_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUBLAS_", "CUDNN_", "XLA_", "PJRT_", "GLOO_",
    "UCX_", "FI_", "HPC_TRAINER_", "PYTHON", "HF_", "TRANSFORMERS_",
)  # fmt: skip
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "MALLOC_CONF")
_LONGEST = 4_096


def python() -> dict[str, Any]:
    """The interpreter, and the environment that it belongs to."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "compiler": platform.python_compiler(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "conda": os.environ.get("CONDA_DEFAULT_ENV"),
    }


def packages() -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Name -> version of every distribution that is installed; and where those come from that no index has.

    The latter as PEP 610 has it: the `url`, `editable`, and the revision that a version control system had.
    """
    versions: dict[str, str] = {}
    origins: dict[str, dict[str, Any]] = {}
    for each in metadata.distributions():
        name = str(each.metadata["Name"] or "").lower().replace("_", "-")
        if not name or name in versions:  # the first on the path is the one that is imported
            continue
        versions[name] = each.version
        text = each.read_text("direct_url.json")
        if text is not None:
            origins[name] = _origin(text)
    return dict(sorted(versions.items())), dict(sorted(origins.items()))


def _origin(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        origin: dict[str, Any] = {"url": str(found["url"])}
        if (found.get("dir_info") or {}).get("editable"):
            origin["editable"] = True
        vcs = found.get("vcs_info") or {}
        return origin | {key: str(vcs[key]) for key in ("vcs", "commit_id") if key in vcs}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {"url": "unreadable"}


def libraries() -> dict[str, Any]:
    """Of torch and what it computes with, where this process has loaded it; else what is installed."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "version"):
        return {}
    found: dict[str, Any] = {"torch": str(torch.__version__), "torch_revision": torch.version.git_version}
    found |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    found["cpu_kernels"] = torch.backends.cpu.get_cpu_capability()
    if torch.version.cuda is not None and torch.cuda.is_initialized():
        found["cudnn"] = torch.backends.cudnn.version()
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
        found["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl
    found["threads"] = torch.get_num_threads()
    return {key: value for key, value in found.items() if value is not None}


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables that may matter, by name."""
    return {
        name: value[:_LONGEST]
        for name, value in sorted(environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def modules() -> list[str]:
    """What `module load` has loaded (Environment Modules, Lmod)."""
    return [each for each in os.environ.get("LOADEDMODULES", "").split(":") if each]


def system() -> dict[str, Any]:
    """Kernel, C library, distribution, container."""
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
    """The container that this process is in, by its kind and image as far as it is told; None: none is known."""
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
