"""Rules for the keys that decide which checkpoints stay."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpc_trainer.config.schema.checkpoint import BestMode, CheckpointConfig

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
