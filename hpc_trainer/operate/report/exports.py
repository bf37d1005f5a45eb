"""Exports of trained models in a report: accuracy against size and latency, from their cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.errors import RunStateError
from hpc_trainer.runs.exported import CARD, read_card

ORIGINAL = "original"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """One export, or the original that it was measured beside. `latency_s`: medians, by the size of the batch."""

    name: str
    run_id: str
    step: int
    num_bytes: int
    metrics: Mapping[str, float]
    latency_s: Mapping[str, float]


def read_exports(folders: Sequence[Path]) -> list[ExportReport]:
    """The exports in `folders`: each is one, or holds some; before those of a checkpoint its original.

    Raises:
        RunStateError: there is none, one is damaged, or was not measured.
        UntrustedFileError: others may have changed one.
    """
    found: list[ExportReport] = []
    for folder in folders:
        own = [folder] if (folder / CARD).exists() else sorted(path.parent for path in folder.glob(f"*/{CARD}"))
        if not own:
            raise RunStateError(f"{folder} holds no export. Name a folder that `hpc-trainer export` has made.")
        for each in own:
            card = read_card(each)
            measured = card["measured"]
            if measured is None:
                raise RunStateError(f"{each} was not measured. Export it without --no-measure, where its data are.")
            if (card["run_id"], card["step"]) not in {(known.run_id, known.step) for known in found}:
                found.append(_side(card, measured[ORIGINAL], f"{ORIGINAL} (PyTorch, fp32)"))
            pruned = card.get("prune")  # cards of before have none
            ways = [card["to"], card["quantize"], f"pruned {pruned}" if pruned else None]
            name = " ".join(filter(None, ways))
            found.append(_side(card, measured["exported"], name))
    return found


def _side(card: Mapping[str, Any], side: Mapping[str, Any], name: str) -> ExportReport:
    return ExportReport(
        name=name, run_id=card["run_id"], step=card["step"], num_bytes=side["num_bytes"], metrics=side["metrics"],
        latency_s={batch: told["median_s"] for batch, told in side["latency"].items()},
    )  # fmt: skip
