"""Section of `hpc-trainer report` that compares exports: a metric over size and latency."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.output import CheckpointConfig, compared_by
from hpc_trainer.deploy.exported import CARD, read_card
from hpc_trainer.errors import RunStateError
from hpc_trainer.operate.report.charts import NUM_COLOURS, Line, figure, legend, line_chart
from hpc_trainer.operate.report.data import ReportPart
from hpc_trainer.operate.report.page import metric_text, table

_ORIGINAL = "original"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Exported model, or the original for comparison. `latency_s` maps batch sizes to median latencies in seconds."""

    name: str
    run_id: str
    step: int
    num_bytes: int
    metrics: Mapping[str, float]
    latency_s: Mapping[str, float]


def report_part(folders: Sequence[Path]) -> ReportPart:
    """Return the section that `--exports` adds to a report. Raises as `read_exports`."""
    exports = read_exports(folders)
    return ReportPart(section=_html(exports), content={"exports": [dataclasses.asdict(export) for export in exports]})


REPORT_OPTIONS = {"exports": report_part}


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
                raise RunStateError(
                    f"{export} was not measured. Export it without --no-measure, on a machine that has its data."
                )
            if (card["run_id"], card["step"]) not in {(report.run_id, report.step) for report in reports}:
                reports.append(_report(card, measured[_ORIGINAL], f"{_ORIGINAL} (PyTorch, fp32)"))
            pruned = card.get("prune")  # cards of earlier versions have no such key
            options = [card["to"], card["quantize"], f"pruned {pruned}" if pruned else None]
            reports.append(_report(card, measured["exported"], " ".join(filter(None, options))))
    return reports


def _report(card: Mapping[str, Any], side: Mapping[str, Any], name: str) -> ExportReport:
    return ExportReport(
        name=name, run_id=card["run_id"], step=card["step"], num_bytes=side["num_bytes"], metrics=side["metrics"],
        latency_s={batch: timing["median_s"] for batch, timing in side["latency"].items()},
    )  # fmt: skip


def _html(exports: Sequence[ExportReport]) -> str:
    """Return charts of the first metric that an export has, over size and over each batch's latency, and a table."""
    known = {name for export in exports for name in export.metrics}
    metric = compared_by(CheckpointConfig(), known)
    if metric is None:
        return ""
    sides: dict[str, Callable[[ExportReport], float]] = {
        "megabytes": lambda export: export.num_bytes / 1e6,
        **{f"ms, batch of {batch}": _milliseconds(batch) for batch in exports[0].latency_s},
    }
    charts = []
    for label, value in sides.items():
        lines = [
            Line(name=export.name, points=[(value(export), export.metrics[metric])], colour=index % NUM_COLOURS)
            for index, export in enumerate(exports)
            if metric in export.metrics
        ]
        chart = line_chart(label, lines, x_label=label, y_label=metric, is_log_x=True)
        charts.append(figure(f"{metric} by {label}", chart, legend(lines)))
    columns = ["Export", "Step", *sides, *exports[0].metrics]
    rows = [
        [f"{export.run_id} {export.name}", str(export.step), *(f"{value(export):.4g}" for value in sides.values())]
        + [metric_text(export.metrics, name) for name in exports[0].metrics]
        for export in exports
    ]
    return f'<h2>Exports</h2><div class="charts">{"".join(charts)}</div>{table(columns, rows, first_num=1)}\n'


def _milliseconds(batch: str) -> Callable[[ExportReport], float]:
    return lambda export: 1e3 * export.latency_s[batch]
