"""Rules of `checkpoint/`: where `resume_from` may point before anything is read, and which checkpoints stay."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.config.schema.checkpoint import BestMode, CheckpointConfig
from hpc_trainer.config.user_files import home_problems, is_file, is_folder


def resume_from_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield each problem with `resume_from`, and with the names in `allow_changes`."""
    for name in checkpoint.allow_changes:
        if not name.strip() or "=" in name or " " in name:
            yield f"checkpoint.allow_changes holds {name!r}: it takes keys alone, as checkpoint.allow_changes=[seed]."
    if checkpoint.resume_from is None:
        return
    unknown = list(home_problems("checkpoint.resume_from", checkpoint.resume_from))
    if unknown:
        yield from unknown
        return
    path = Path(checkpoint.resume_from).expanduser()
    if not is_folder(path / "checkpoints") and not is_file(path / "manifest.json"):
        yield (
            f"checkpoint.resume_from={checkpoint.resume_from} must be the folder of a run (it holds checkpoints/) or "
            "of one checkpoint (it holds manifest.json). `hpc-trainer status --json` has the run ids; a run's folder "
            "is RUNS_DIR/SWEEP/RUN_ID."
        )


def with_absolute_origin(checkpoint: CheckpointConfig) -> CheckpointConfig:
    """Return the section with an absolute `resume_from`: the worker's working folder may be another one."""
    if checkpoint.resume_from is None:
        return checkpoint
    return dataclasses.replace(checkpoint, resume_from=str(Path(checkpoint.resume_from).expanduser().absolute()))


_SMALL_IS_GOOD = re.compile(r"loss|err|perplexity|ppl|nll|mae|mse|rmse|wer|cer")
_LARGE_IS_GOOD = re.compile(r"acc|score|f1|auc|map|iou|bleu|precision|recall|reward|psnr|ssim|r2|mfu")


def best_is_max(checkpoint: CheckpointConfig) -> bool:
    """Return True if the largest value of `keep_best` is the best."""
    if checkpoint.best_mode is BestMode.auto:
        return not _means_small(checkpoint.keep_best or "")
    return checkpoint.best_mode is BestMode.max


def retention_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield each problem with the section."""
    name = checkpoint.keep_best
    if name is None or checkpoint.best_mode is not BestMode.auto:
        return
    if _means_small(name) == bool(_LARGE_IS_GOOD.search(name.lower())):
        yield (
            f"checkpoint.keep_best={name} does not tell by its name whether small or large values are good. Set "
            "checkpoint.best_mode=min or checkpoint.best_mode=max."
        )


def _means_small(name: str) -> bool:
    return bool(_SMALL_IS_GOOD.search(name.lower()))
