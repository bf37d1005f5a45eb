"""Page of a report: its place, its kind, and the file that is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.config.packages import missing
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.find import prepare_to_write
from hpc_trainer.operate.report.data import POINTS_A_CURVE, WARMUP_STEPS, Report, build_report, most_records
from hpc_trainer.operate.report.interactive import (
    PLOTLY,
    ReportedSweep,
    asked_importance,
    find_importance,
    render_interactive,
)
from hpc_trainer.operate.report.page import render_page
from hpc_trainer.operate.results import result_table
from hpc_trainer.record.files import write_atomic
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.status import SweepStatus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """Options of `report` that choose the content of the page."""

    output: Path | None = None
    warmup_steps: int | None = None
    exports: Sequence[Path] = ()
    plain: bool = False

    @property
    def is_interactive(self) -> bool:
        """True if the page is the interactive one."""
        return not self.plain and missing("", PLOTLY) is None


def place_of_page(sweeps: Sequence[SweepPaths], options: PageOptions) -> Path:
    """Return the absolute path of the page of these sweeps.

    Raises:
        ConfigError: an option is wrong, plotly is missing for several sweeps, or the folder of the page does not exist.
    """
    if options.warmup_steps is not None and options.warmup_steps < 0:
        raise ConfigError(f"--warmup-steps={options.warmup_steps} must be at least 0. Use 0.")
    if len(sweeps) > 1 and not options.is_interactive:
        why = missing(f"a report of {len(sweeps)} sweeps", PLOTLY) or "--plain is a page of one sweep"
        raise ConfigError(f"{why}. Or name one sweep.")
    page = (options.output or sweeps[0].folder / ("report.html" if len(sweeps) == 1 else "compare.html")).absolute()
    if options.output is not None and not page.parent.is_dir():
        raise ConfigError(
            f"--output={options.output}: there is no folder {page.parent}. Make it, or name another file."
        )
    return page


def write_page(statuses: Sequence[SweepStatus], page: Path, options: PageOptions) -> list[Report]:
    """Write the page and return the reports of the sweeps.

    Raises:
        RunStateError: `exports` holds a folder without a measured export.
        UntrustedFileError: the page would be in the sweep's folder, and others may write there.
    """
    if options.is_interactive:
        tables = [result_table(status, typed=True) for status in statuses]
        with asked_importance(tables) as asked:  # meanwhile the metrics are read
            reports = _reports(statuses, options, most_records(sum(len(status.specs) for status in statuses)))
            triples = zip(statuses, reports, tables, strict=True)
            text = render_interactive([ReportedSweep(*triple) for triple in triples], asked.result)
    else:
        reports = _reports(statuses, options, POINTS_A_CURVE)
        tables = [result_table(statuses[0], typed=True)] if reports[0].ranked_by is not None else []
        text = render_page(reports[0], importance=find_importance(tables))
    prepare_to_write(statuses[0].sweep, page=page)
    write_atomic(page, text)
    return reports


def _reports(statuses: Sequence[SweepStatus], options: PageOptions, most_points: int) -> list[Report]:
    """Return the report of each sweep; exports are drawn with the first one."""
    warmup_steps = WARMUP_STEPS if options.warmup_steps is None else options.warmup_steps
    exports = [options.exports, *((),) * (len(statuses) - 1)]
    return [
        build_report(status, warmup_steps=warmup_steps, options={"exports": paths}, most_points=most_points)
        for status, paths in zip(statuses, exports, strict=True)
    ]
