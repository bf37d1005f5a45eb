"""Machine that this process runs on: processor, driver, devices."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

_NVIDIA = Path("/proc/driver/nvidia")
_VERSION = re.compile(r"Kernel Module(?: for \w+)?\s+([0-9.]+)")


def cpu() -> dict[str, Any]:
    """Return the processor's model, the number of processors, and the number that this process may use."""
    model = None
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model or platform.processor() or None, "count": os.cpu_count(), "allowed": allowed}


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
