"""`data=text_bytes`: its keys, and its windows as far as the login node can check them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpc_trainer.config.schema.data import BYTES, DataConfig
from hpc_trainer.config.schema.key import ALWAYS, COUNTS, SAFE, key
from hpc_trainer.config.user_files import is_file

_BUILT_IN_TEXT = "pydoc_data.topics"
_NUM_BYTES = 256


@dataclass(kw_only=True, slots=True)
class TextBytesConfig(DataConfig):
    """Windows of bytes of one file, memory-mapped: next-byte prediction on any text."""

    is_text: ClassVar[bool | None] = True
    name: str = "text_bytes"
    _target_: str = "hpc_trainer.datasets.text_bytes.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Text file; null: the language reference text that ships inside Python (pydoc_data)."""
    seq_len: int = key(128, ALWAYS, COUNTS, limits="≥ 2")
    """Bytes that a sample predicts."""
    eval_fraction: float = key(0.1, ALWAYS, COUNTS, limits="(0, 1)")
    """Share of the file, at its end, held out for evaluation."""

    def num_train_samples(self) -> int | None:
        parts = _parts(self)
        return None if parts is None else max(0, (parts[0] - 1) // self.seq_len)

    def vocabulary(self) -> int:
        return _NUM_BYTES

    def problems(self) -> Iterator[str]:
        """Yield the problem with a missing file, or with a window that does not fit into a part."""
        if self.path is not None and not is_file(Path(self.path).expanduser()):
            yield f"data.path={self.path} must be a readable file; there is none."
            return
        parts = _parts(self)
        if parts is None or min(parts) > self.seq_len:
            return
        smaller = min(parts)
        fix = f"data.seq_len={smaller - 1}" if smaller > 2 else "a larger file"
        yield (
            f"data.seq_len={self.seq_len} is too long for data.path={self.path or 'null'}: of its {sum(parts)} bytes "
            f"{parts[0]} are for training and {parts[1]} for evaluation (data.eval_fraction={self.eval_fraction:g}), "
            f"and each needs data.seq_len + 1. Use {fix}."
        )

    def model_facts(self) -> dict[str, Any]:
        return {**DataConfig.model_facts(self), "num_classes": _NUM_BYTES}

    def preprocessing(self, mean: Any = None, std: Any = None) -> dict[str, Any]:
        from hpc_trainer.training.data.preprocessing import tokens

        return tokens(seq_len=self.seq_len, vocab_size=_NUM_BYTES, tokenizer=BYTES)


def _parts(data: TextBytesConfig) -> tuple[int, int] | None:
    """Return the bytes for training and for evaluation, as `dataset.py` cuts them; None if unknown."""
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
