"""`hpc-trainer report` and `sync`: metrics of runs on one page, and in trackers."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import as_typed, counts_line, print_json, print_next, print_table, say, short_number, warn
from hpc_trainer.cli.live import telling
from hpc_trainer.cli.run_verbs import print_next_of_failed
from hpc_trainer.config.packages import missing
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.find import configured_runs_dir, find_sweep
from hpc_trainer.operate.report.data import Report, Scaling
from hpc_trainer.operate.report.interactive import PLOTLY
from hpc_trainer.operate.report.write import PageOptions, place_of_page, write_page
from hpc_trainer.operate.sync import sync_named, tracker_named
from hpc_trainer.operate.waits import looks
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.ledger import ledger_json
from hpc_trainer.record.status import read_status

# A page is written anew at most so often in seconds, and its making takes at most a tenth of a core.
_LEAST_PAUSE_S, _SHARE = 10.0, 0.1


def run_report(
    names: Sequence[str], runs_dir: Path | None, options: PageOptions, *, watch: bool = False, as_json: bool
) -> None:
    """Write the page of a sweep, or of several sweeps that are compared, and print what the page holds.

    Raises:
        ConfigError: an option is wrong, plotly is missing for several sweeps, or the folder of the page does not exist.
        RunStateError: `exports` holds a folder without a measured export.
        UntrustedFileError: the page would be in the sweep's folder, and others may write there.
    """
    folder = configured_runs_dir(runs_dir)
    sweeps = [find_sweep(folder, name) for name in dict.fromkeys(names)] or [find_sweep(folder, None)]
    _check_watch(sweeps, watch=watch, as_json=as_json)
    page = place_of_page(sweeps, options)
    if watch:
        _watch(sweeps[0], page, options)
        return
    statuses = [read_status(sweep, is_look=True) for sweep in sweeps]
    reports = write_page(statuses, page, options)
    if as_json:
        documents = [report_json(report, page) for report in reports]
        print_json(documents[0] if len(documents) == 1 else {"page": str(page), "sweeps": documents})
        return
    for report in reports:
        _print_report(report)
    say(f"Page: {page}")
    if not options.is_interactive and not options.plain:
        say(f"Note: {missing('a page to sort, filter and zoom', PLOTLY)}")
    if len(reports) > 1:
        return
    if reports[0].next is not None:
        print_next(reports[0].next)
    else:
        print_next_of_failed(statuses[0])


def _check_watch(sweeps: Sequence[SweepPaths], *, watch: bool, as_json: bool) -> None:
    if watch and len(sweeps) > 1:
        raise ConfigError(f"--watch follows one sweep, and {len(sweeps)} are named. Name one.")
    if watch and as_json:
        raise ConfigError("--watch writes pages, and --json one document. Leave one of them out.")


def _watch(sweep: SweepPaths, page: Path, options: PageOptions) -> None:
    """Write the page anew until no run of the sweep is pending or running; looks are those of `status --watch`."""
    run_ids = set(read_status(sweep, is_look=True).specs)
    next_at, before, report, status = 0.0, None, None, None
    for status in telling(looks(sweep, run_ids), say):
        stands = [(run.state, run.step, len(run.attempts)) for run in status.open_runs.values()]
        now = time.monotonic()
        if now < next_at or stands == before or status.is_away:
            continue
        (report,) = write_page([status], page, options)
        before, next_at = stands, now + max(_LEAST_PAUSE_S, (time.monotonic() - now) / _SHARE)
        say(f"{time.strftime('%H:%M:%S')}  {counts_line(dict(report.counts))}. Page: {page}")
    if status is not None and not status.is_away:
        (report,) = write_page([status], page, options)
        _print_report(report)
        say(f"Page: {page}")


def _print_report(report: Report) -> None:
    for scaling in report.scaling:
        _print_scaling(scaling)
    say(f"Sweep {report.sweep}: {counts_line(dict(report.counts))}.")
    for line in report.advice:
        say(f"Advice: {line}")
    for note in report.notes:
        say(f"Note: {note}")


def report_json(report: Report, page: Path) -> dict[str, Any]:
    """Return the stable form of `report --json` (docs/json.md); curves are only in the page."""
    left_out = ("curves", "gpu_type", "ledger", "is_sampled")
    runs = [
        {key: value for key, value in dataclasses.asdict(dataclasses.replace(run, ledger=None)).items()
         if key not in left_out}
        | {"ledger": None if run.ledger is None else ledger_json(run.ledger)}
        for run in report.runs
    ]  # fmt: skip
    scaling = [dataclasses.asdict(study) for study in report.scaling]
    return {
        "sweep": report.sweep, "page": str(page), "counts": dict(report.counts), "runs": runs, "scaling": scaling,
        "notes": report.notes, **report.content,
        "advice": list(report.advice),
    }  # fmt: skip


def _print_scaling(scaling: Scaling) -> None:
    where = "".join(f" {key}={value}" for key, value in scaling.axes.items())
    say(where, f"[bold]{scaling.kind.capitalize()} scaling[/]")
    print_table(
        ["HARDWARE", "RANKS", "BATCH", "STEP", "THROUGHPUT", "SPEED-UP", "EFFICIENCY", "DATA WAIT", "MFU"],
        [
            [
                point.hardware, str(point.ranks), str(point.global_batch_size),
                "-" if point.step_time_s is None else f"{1000 * point.step_time_s:.4g} ms",
                f"{short_number(point.throughput)} {scaling.unit}", f"{point.speedup:.2f}", f"{point.efficiency:.0%}",
                _share(point.data_wait_share), _share(point.mfu),
            ]
            for point in scaling.points
        ],
        least=("MFU", "BATCH", "DATA WAIT", "STEP"),
    )  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# --- sync ---


def run_sync(names: list[str], sweep: str | None, runs_dir: Path | None, *, to: str | None, as_json: bool) -> None:
    """Send new steps to the trackers, and exit with 1 if a tracker did not accept a run.

    Raises:
        ConfigError: `to` is not a tracker that can be synced.
    """
    tracker = None if to is None else tracker_named(to, "--to ")
    status, result = sync_named(configured_runs_dir(runs_dir), names, sweep, tracker)
    warn(status)
    if as_json:
        print_json({
            "sweep": status.sweep.name,
            "runs": [{**dataclasses.asdict(run), "state": run.state.value} for run in result.synced],
            "failed": result.failed,
            "not_begun": result.num_not_begun,
        })  # fmt: skip
    else:
        print_table(
            ["RUN", "STATE", "STEP", "NEW", "WHERE"],
            [
                [run.run_id, run.state, "-" if run.step is None else str(run.step), str(run.num_new), run.where]
                for run in result.synced
            ],
        )
        if result.num_not_begun:
            say(f"{result.num_not_begun} more have not begun.")
        for run_id, message in result.failed.items():
            say(as_typed(f"{run_id}: {message}"))
        if result.failed:
            rest = " The rest was not tried." if result.has_given_up else ""
            say(f"{len(result.failed)} could not be synced.{rest} The same command continues from there.")
    if result.failed:
        sys.exit(1)
