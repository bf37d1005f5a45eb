"""`init_from`: existing weights for the first step of a new run (docs/weights.md)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, APART, key, only_with


class WhichCheckpoint(str, enum.Enum):
    """Checkpoint of a run to load."""

    last = "last"
    best = "best"


_WITH_PATH = only_with("init_from.path")


@dataclass(kw_only=True, slots=True)
class InitFromConfig:
    path: str | None = key(None, ALWAYS, APART)
    """Source of the weights: a run (its id, or the beginning or end of the id, or its folder), one of its checkpoints,
    a .safetensors file, or a folder of such files as Hugging Face writes it. `init_from=PATH` is short for it. null:
    the model's own initial weights. The run's identity includes the content (`digest`), not the path."""
    checkpoint: WhichCheckpoint = key(WhichCheckpoint.last, _WITH_PATH, APART)
    """For a run: its last checkpoint, or the best one by its own `checkpoint.keep_best`."""
    include: list[str] = key([], _WITH_PATH)
    """Names of the model's weights and buffers, with * and ?, to load; []: all. The others keep their initial
    values."""
    exclude: list[str] = key([], _WITH_PATH)
    """Names, with * and ?, that keep their initial values although `include` names them, as ['head.*']."""
    rename: dict[str, str] = key({}, _WITH_PATH)
    """Names in the source -> names in the model, as {'bert.*': 'encoder.*'}: the text that a * matches is kept."""
    digest: str | None = key(None, _WITH_PATH)
    """SHA-256 of the content; filled in by `plan`. If you set it, other content is refused."""
