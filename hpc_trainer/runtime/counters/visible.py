"""GPUs that this process may use: CUDA's indices, translated to NVML's handles.

CUDA counts the entries of CUDA_VISIBLE_DEVICES, in that order. An entry is an index, a UUID or its beginning, or a part
of a GPU (MIG-..). The list ends at the first entry that is none of these (CUDA programming guide, environment
variables). NVML counts all GPUs by their place on the bus, and refuses those that Slurm's control group keeps from us:
CUDA's indices leave the refused GPUs out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from hpc_trainer.runtime.counters.notes import Notes

_LIST, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def visible_devices(nvml: Any, environ: Mapping[str, str], notes: Notes) -> list[Any]:
    """Return NVML's handles of the devices that CUDA sees, in CUDA's order; [] if that order is unknown.

    Raises nvml.NVMLError.
    """
    whole = _whole_devices(nvml)
    text = environ.get(_LIST)
    entries = (
        [str(index) for index in range(len(whole))] if text is None else [part.strip() for part in text.split(",")]
    )
    if len(whole) > 1 and environ.get(_ORDER) != "PCI_BUS_ID" and any(entry.isdecimal() for entry in entries):
        # By default CUDA lists the fastest GPU first: the order on the bus only if all GPUs are of one kind.
        names = {nvml.nvmlDeviceGetName(device) for device in whole}
        if len(names) > 1:
            notes.tell(
                "order",
                f"the GPUs of this node are of several kinds ({', '.join(sorted(names))}), and which is number "
                f"{entries[0]} depends on {_ORDER}: no GPU figures. Set cluster.env.{_ORDER}=PCI_BUS_ID.",
            )
            return []
    handles: list[Any] = []
    for entry in entries:
        handle = _device(nvml, whole, entry)
        if handle is None:
            break
        handles.append(handle)
    return handles


def device_of_uuid(nvml: Any, uuid: str) -> Any | None:
    """Return the handle of the device with torch's UUID, with or without `GPU-`; None if absent or divided by MIG.

    Raises nvml.NVMLError.
    """
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    for name in (f"GPU-{bare}", f"MIG-{bare}"):
        with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
            return None if name.startswith("GPU-") and parts_of(nvml, handle) else handle
    return None


def parts_of(nvml: Any, device: Any) -> list[Any]:
    """Return the handles of the MIG devices of a GPU; [] if the GPU is not divided."""
    try:
        if nvml.nvmlDeviceGetMigMode(device)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(device)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return []
    parts = []
    for index in range(count):
        with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index))
    return parts


def _whole_devices(nvml: Any) -> list[Any]:
    """Return the handles of all GPUs that this process may use, in the order of the bus."""
    handles = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError_NoPermission):
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
    return handles


def _device(nvml: Any, whole: list[Any], word: str) -> Any | None:
    """Return the device that one entry of the list names; None if there is none."""
    if word.isdecimal():
        device = whole[int(word)] if int(word) < len(whole) else None
        parts = [] if device is None else parts_of(nvml, device)
        return parts[0] if parts else device  # CUDA uses only one part of a GPU
    if word.startswith("MIG-"):
        parts = [part for gpu in whole for part in parts_of(nvml, gpu)]
        return _by_beginning(nvml, parts, word)
    return _by_beginning(nvml, whole, word) if word.startswith("GPU-") else None


def _by_beginning(nvml: Any, devices: list[Any], word: str) -> Any | None:
    matches = [device for device in devices if str(nvml.nvmlDeviceGetUUID(device)).startswith(word)]
    return matches[0] if len(matches) == 1 else None
