"""Which GPUs of a node are this process's: CUDA's numbers are not NVML's.

CUDA counts what CUDA_VISIBLE_DEVICES lists, in that order; an entry is a number, a UUID or its beginning, or a part of
a GPU (MIG-..), and at the first that is none of these the list ends (CUDA programming guide, environment variables).
NVML counts all GPUs by their place on the bus, and refuses those that Slurm's control group keeps from us: CUDA's
numbers leave these out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from hpc_trainer.runtime.counters.notes import Notes

_LIST, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def visible_devices(nvml: Any, environ: Mapping[str, str], notes: Notes) -> list[Any]:
    """NVML's handles of what CUDA sees, in CUDA's order; [] where nobody knows which these are.

    Raises nvml.NVMLError.
    """
    whole = _whole_devices(nvml)
    told = environ.get(_LIST)
    words = [str(index) for index in range(len(whole))] if told is None else [each.strip() for each in told.split(",")]
    if len(whole) > 1 and environ.get(_ORDER) != "PCI_BUS_ID" and any(word.isdecimal() for word in words):
        # By default CUDA puts the fastest first: only of one kind that is the order on the bus.
        names = {nvml.nvmlDeviceGetName(each) for each in whole}
        if len(names) > 1:
            notes.tell(
                "order",
                f"the GPUs of this node are of several kinds ({', '.join(sorted(names))}), and which is number "
                f"{words[0]} depends on {_ORDER}: no GPU figures. Set cluster.env.{_ORDER}=PCI_BUS_ID.",
            )
            return []
    found: list[Any] = []
    for word in words:
        handle = _device(nvml, whole, word)
        if handle is None:
            break
        found.append(handle)
    return found


def device_of_uuid(nvml: Any, uuid: str) -> Any | None:
    """The handle of the device that torch has, by its UUID with or without `GPU-`; None: there is none, or in parts.

    Raises nvml.NVMLError.
    """
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    for name in (f"GPU-{bare}", f"MIG-{bare}"):
        with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
            return None if name.startswith("GPU-") and parts_of(nvml, handle) else handle
    return None


def parts_of(nvml: Any, device: Any) -> list[Any]:
    """The handles of the MIG devices of a GPU; [] if it is one whole."""
    try:
        if nvml.nvmlDeviceGetMigMode(device)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(device)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return []
    found = []
    for index in range(count):
        with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index))
    return found


def _whole_devices(nvml: Any) -> list[Any]:
    """All that this process may use, by their place on the bus."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError_NoPermission):
            found.append(nvml.nvmlDeviceGetHandleByIndex(index))
    return found


def _device(nvml: Any, whole: list[Any], word: str) -> Any | None:
    """What one entry of the list means; None: nothing."""
    if word.isdecimal():
        device = whole[int(word)] if int(word) < len(whole) else None
        parts = [] if device is None else parts_of(nvml, device)
        return parts[0] if parts else device  # CUDA takes one part of a GPU only
    if word.startswith("MIG-"):
        parts = [part for each in whole for part in parts_of(nvml, each)]
        return _by_beginning(nvml, parts, word)
    return _by_beginning(nvml, whole, word) if word.startswith("GPU-") else None


def _by_beginning(nvml: Any, devices: list[Any], word: str) -> Any | None:
    found = [each for each in devices if str(nvml.nvmlDeviceGetUUID(each)).startswith(word)]
    return found[0] if len(found) == 1 else None
