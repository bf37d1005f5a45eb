"""The header of a safetensors file, read without torch: names, number formats and shapes. Nothing in it is trusted.

Eight bytes of length, a JSON object, then the bytes of the tensors (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.errors import ConfigError

_LONGEST = 100_000_000  # bytes; the library's own limit
_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
"""Of an element, by the name of its format: those that training/checkpoint/trees.py reads."""


def read_names(path: Path) -> list[str]:
    """The names of the tensors in a file, each of which lies in it whole.

    Raises:
        ConfigError: it is no safetensors file, it is damaged, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST):
                raise ConfigError(
                    f"{path} is no safetensors file, or a damaged one: its header would have {length:,} bytes, and the "
                    f"file has {size:,}. Copy it again."
                )
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        header = json.loads(text)
        for name, entry in header.items():
            _check(name, entry, size - 8 - length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said = str(error)[:200]
        raise ConfigError(
            f"{path} is no safetensors file that we can read, or a damaged one: {type(error).__name__}: {said}. "
            "Copy it again."
        ) from error
    return [name for name in header if name != "__metadata__"]


def _check(name: str, entry: Mapping[str, Any], size: int) -> None:
    """Raises ValueError and the like unless the tensor lies within `size` bytes."""
    if name == "__metadata__":
        return
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if not all(type(each) is int and each >= 0 for each in (*shape, begin, end)):
        raise ValueError(f"{name} has other shapes or offsets than whole numbers")
    if entry["dtype"] not in _BYTES:
        raise ValueError(f"{name} has the number format {entry['dtype']}, and we read {', '.join(_BYTES)}")
    if end - begin != math.prod(shape) * _BYTES[entry["dtype"]] or not begin <= end <= size:
        raise ValueError(f"{name} does not lie in the file")
