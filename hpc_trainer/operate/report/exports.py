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
    """One export, or the original model measured for comparison. `latency_s` has medians, by the size of the batch."""

    name: str
    run_id: str
    step: int
    num_bytes: int
    metrics: Mapping[str, float]
    latency_s: Mapping[str, float]


def read_exports(folders: Sequence[Path]) -> list[ExportReport]:
    """Return the exports in `folders`, each checkpoint's original before its exports.

    Args:
        folders: folders that are exports or hold exports.

    Raises:
        RunStateError: a folder holds no export, or an export is damaged or was not measured.
        UntrustedFileError: others may have changed an export.
    """
    reports: list[ExportReport] = []
    for folder in folders:
        own = [folder] if (folder / CARD).exists() else sorted(path.parent for path in folder.glob(f"*/{CARD}"))
        if not own:
            raise RunStateError(f"{folder} holds no export. Name a folder that `hpc-trainer export` has made.")
        for export in own:
            card = read_card(export)
            measured = card["measured"]
            if measured is None:
                raise RunStateError(f"{export} was not measured. Export it without --no-measure, where its data are.")
            if (card["run_id"], card["step"]) not in {(report.run_id, report.step) for report in reports}:
                reports.append(_side(card, measured[ORIGINAL], f"{ORIGINAL} (PyTorch, fp32)"))
            pruned = card.get("prune")  # cards of earlier versions have no such key
            ways = [card["to"], card["quantize"], f"pruned {pruned}" if pruned else None]
            name = " ".join(filter(None, ways))
            reports.append(_side(card, measured["exported"], name))
    return reports


def _side(card: Mapping[str, Any], side: Mapping[str, Any], name: str) -> ExportReport:
    return ExportReport(
        name=name, run_id=card["run_id"], step=card["step"], num_bytes=side["num_bytes"], metrics=side["metrics"],
        latency_s={batch: timing["median_s"] for batch, timing in side["latency"].items()},
    )  # fmt: skip
