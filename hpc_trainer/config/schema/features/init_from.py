"""`init_from`: weights that exist, for the first step of a new run (docs/weights.md)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, APART, key, only_with


class WhichCheckpoint(str, enum.Enum):
    """Which checkpoint of a run is meant."""

    last = "last"
    best = "best"


_WITH_PATH = only_with("init_from.path")


@dataclass(kw_only=True, slots=True)
class InitFromConfig:
    path: str | None = key(None, ALWAYS, APART)
    """What to take weights from: a run (its id, or the beginning or end of it, or its folder), one of its checkpoints,
    a .safetensors file, or a folder of such files as Hugging Face writes it. `init_from=PATH` is short for it. null:
    weights begin as the model makes them. Of the identity it is the content that counts (`digest`), not the place."""
    checkpoint: WhichCheckpoint = key(WhichCheckpoint.last, _WITH_PATH, APART)
    """Of a run: its last checkpoint, or the best by its own `checkpoint.keep_best`."""
    include: list[str] = key([], _WITH_PATH)
    """Names of the model's weights and buffers, with * and ?, that are taken; []: all. The others begin anew."""
    exclude: list[str] = key([], _WITH_PATH)
    """Of those the ones that begin anew all the same, as ['head.*']."""
    rename: dict[str, str] = key({}, _WITH_PATH)
    """Names there -> names in the model, as {'bert.*': 'encoder.*'}: what a * stands for is carried over."""
    digest: str | None = key(None, _WITH_PATH)
    """SHA-256 of the content; filled in by `plan`. Set by you: other content is refused."""
