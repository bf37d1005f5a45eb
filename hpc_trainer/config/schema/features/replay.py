"""`replay`: continue another run with new data, and train on its old data again (docs/weights.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.key import ALWAYS, key, only_with


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    share: float | None = key(None, ALWAYS, limits="[0, 1)")
    """Share of an epoch's training samples that are old: samples of the run that `init_from` names. Evaluations also
    report its held-out samples, as `eval_old_loss`. 0: old samples are evaluated, not trained on. null: off."""
    data: list[Any] = key([], only_with("replay.share"))
    """Old data sets, each as a section `data`: [{name: image_folder, path: /data/old}]. []: the data of the run of
    `init_from`, and the data that it replayed itself; filled in by `plan`."""
