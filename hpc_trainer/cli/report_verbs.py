"""`hpc-trainer report` and `sync`: metrics of runs on one page, and in trackers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import counts_line, print_json, print_next, print_table, say, short_number, warn
from hpc_trainer.cli.run_verbs import print_next_of_failed
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.find import configured_runs_dir, find_sweep, prepare_to_write
from hpc_trainer.operate.report.data import WARMUP_STEPS, Report, Scaling, build_report
from hpc_trainer.operate.report.page import render_page
from hpc_trainer.operate.sync import sync_named, tracker_named
from hpc_trainer.record.files import write_atomic
from hpc_trainer.record.ledger import ledger_json
from hpc_trainer.record.status import read_status


def run_report(
    name: str | None, runs_dir: Path | None, *, output: Path | None, warmup_steps: int | None,
    exports: Sequence[Path], as_json: bool,
) -> None:  # fmt: skip
    """Write the page and print its scaling studies.

    Raises:
        ConfigError: `warmup_steps` is negative, or the folder of `output` does not exist.
        RunStateError: `exports` holds a folder without a measured export.
        UntrustedFileError: the page would lie in the sweep's folder, and others may write there.
    """
    if warmup_steps is not None and warmup_steps < 0:
        raise ConfigError(f"--warmup-steps={warmup_steps} must be at least 0. Use 0.")
    status = read_status(find_sweep(configured_runs_dir(runs_dir), name), is_look=True)
    warmup_steps = WARMUP_STEPS if warmup_steps is None else warmup_steps
    report = build_report(status, warmup_steps=warmup_steps, options={"exports": exports})
    page = (output or status.sweep.folder / "report.html").absolute()
    if not page.parent.is_dir():
        raise ConfigError(f"--output={output}: there is no folder {page.parent}. Make it, or name another file.")
    prepare_to_write(status.sweep, page=page)
    write_atomic(page, render_page(report))
    if as_json:
        print_json(report_json(report, page))
        return
    for scaling in report.scaling:
        _print_scaling(scaling)
    say(f"Sweep {report.sweep}: {counts_line(dict(report.counts))}.")
    for line in report.advice:
        say(f"Advice: {line}")
    for note in report.notes:
        say(f"Note: {note}")
    say(f"Page: {page}")
    if report.next is not None:
        print_next(report.next)
    else:
        print_next_of_failed(status)


def report_json(report: Report, page: Path) -> dict[str, Any]:
    """Return the stable form of `report --json` (docs/json.md); curves are only in the page."""
    left_out = ("curves", "gpu_type", "ledger")
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
            say(f"{len(result.failed)} could not be synced.{rest} The same command goes on from there.")
    if result.failed:
        sys.exit(1)
