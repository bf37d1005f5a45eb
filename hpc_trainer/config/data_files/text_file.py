"""Windows of `data=text_bytes`, as far as this machine can check them: the data set itself is built on the nodes."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.config.schema.data.shipped import TextBytesConfig
from hpc_trainer.config.user_files import is_file

_BUILT_IN_TEXT = "pydoc_data.topics"


def num_train_windows(data: TextBytesConfig) -> int | None:
    """Return the number of training samples; None if the file cannot be read here, or a value is out of range."""
    parts = _parts(data)
    return None if parts is None else max(0, (parts[0] - 1) // data.seq_len)


def window_problems(data: TextBytesConfig) -> Iterator[str]:
    """Yield the problem with a missing file, or with a window that does not fit into a part."""
    if data.path is not None and not is_file(Path(data.path).expanduser()):
        yield f"data.path={data.path} must be a readable file; there is none."
        return
    parts = _parts(data)
    if parts is None or min(parts) > data.seq_len:
        return
    smaller = min(parts)
    fix = f"data.seq_len={smaller - 1}" if smaller > 2 else "a larger file"
    yield (
        f"data.seq_len={data.seq_len} is too long for data.path={data.path or 'null'}: of its {sum(parts)} bytes "
        f"{parts[0]} are for training and {parts[1]} for evaluation (data.eval_fraction={data.eval_fraction:g}), and "
        f"each needs data.seq_len + 1. Use {fix}."
    )


def _parts(data: TextBytesConfig) -> tuple[int, int] | None:
    """Return the bytes for training and for evaluation, as `data/tokens/text_bytes.py` cuts them; None if unknown."""
    if not (0 < data.eval_fraction < 1 and data.seq_len >= 2):
        return None
    path = _built_in() if data.path is None else Path(data.path)
    try:
        size = 0 if path is None else path.expanduser().stat().st_size
    except (OSError, RuntimeError, ValueError):
        return None
    num_eval = round(size * data.eval_fraction)
    return (size - num_eval, num_eval) if path is not None else None


@functools.cache
def _built_in() -> Path | None:
    try:
        spec = importlib.util.find_spec(_BUILT_IN_TEXT)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)
