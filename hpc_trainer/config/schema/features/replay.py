"""`replay`: a run goes on from another one with new data, and sees the old ones again (docs/weights.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.key import ALWAYS, key, only_with


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    share: float | None = key(None, ALWAYS, limits="[0, 1)")
    """Share of an epoch's training samples that are old ones: those of the run that `init_from` names. Evaluations tell
    of its held-out samples too, as `eval_old_loss`. 0: none is trained on, and they are only told of. null: off."""
    data: list[Any] = key([], only_with("replay.share"))
    """The old data sets, each as a section `data`: [{name: image_folder, path: /data/old}]. []: the data of the run of
    `init_from`, and those that it replayed itself; filled in by `plan`."""
