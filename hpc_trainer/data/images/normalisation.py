"""Normalisation of pixels, from the configuration or from statistics.json."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from hpc_trainer.config.schema.data.images import ImagesConfig
from hpc_trainer.errors import DataError

STATISTICS = "statistics.json"
_USUAL = 0.5


class Normalisation:
    """Normalisation (pixel / 255 - mean) / std of each channel."""

    def __init__(self, mean: list[float], std: list[float]) -> None:
        self.mean, self.std = tuple(mean), tuple(std)
        self._shift = torch.tensor([255 * value for value in mean]).view(-1, 1, 1)
        self._scale = torch.tensor([1 / (255 * value) for value in std]).view(-1, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Convert uint8 [batch, height, width, channels] to normalised float32 [batch, channels, height, width].

        The operations are separate, because a fused operation rounds differently at the end of a vector. A pixel would
        then depend on its place in the batch.
        """
        return pixels.permute(0, 3, 1, 2).contiguous().float().sub_(self._shift).mul_(self._scale)

    def facts(self) -> dict[str, list[float]]:
        """Return mean and std for the fingerprint of the data."""
        return {"mean": list(self.mean), "std": list(self.std)}


def normalisation_of(config: ImagesConfig) -> Normalisation:
    """Return the normalisation by `data.mean` and `data.std`.

    If one is null, it comes from statistics.json in `data.path` or its folder `train`; without that file it is 0.5.

    Raises:
        DataError: statistics.json does not have mean and std as one number for each channel.
    """
    statistics = _statistics(config) if config.mean is None or config.std is None else {}
    usual = [_USUAL] * config.num_channels
    mean = config.mean if config.mean is not None else statistics.get("mean", usual)
    std = config.std if config.std is not None else statistics.get("std", usual)
    return Normalisation([float(value) for value in mean], [float(value) for value in std])


def _statistics(config: ImagesConfig) -> dict[str, Any]:
    folder = config.folder
    path = next((place / STATISTICS for place in (folder, folder / "train") if (place / STATISTICS).is_file()), None)
    if path is None:
        return {}
    try:
        statistics = json.loads(path.read_text(encoding="utf-8"))
        wrong = [key for key in ("mean", "std") if not _are_numbers(statistics[key], config.num_channels)]
        if wrong or min(statistics["std"]) <= 0:
            raise ValueError(f"{(wrong or ['std'])[0]} must be {config.num_channels} number(s), std greater than 0")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} must be a JSON object with mean and std, lists of a number for each of "
            f"data.num_channels={config.num_channels}: {type(error).__name__} {error}. Fix: write it anew with "
            "hpc-trainer data prepare, or set data.mean and data.std."
        ) from error
    return dict(statistics)


def _are_numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)
    )
