"""The verb `doctor`: it makes all checks side by side, and prints what they found.

Every command line imports this file at its start: functions import what they need.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_trainer.cli.options import Json, RunsDir, Verb

if TYPE_CHECKING:
    from hpc_trainer.doctor.findings import Finding, Status

verbs = typer.Typer()


@verbs.command(cls=Verb)
def doctor(
    purge_days: Annotated[
        int | None,
        typer.Option(
            "--purge-days",
            min=1,
            metavar="DAYS",
            help="Days after which the site deletes unused files; by default cluster.purge_days of each run.",
        ),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Check Python, Slurm and the folder of sweeps: what is wrong, why it matters, and how to fix it."""
    from hpc_trainer.doctor.findings import Status
    from hpc_trainer.errors import HpcTrainerError
    from hpc_trainer.operate.find import configured_runs_dir
    from hpc_trainer.record.layout import default_runs_dir

    Path.cwd()  # nothing can be checked from a folder that was removed
    try:
        folder = configured_runs_dir(runs_dir)
    except HpcTrainerError:  # of the user's settings: one of the findings
        folder = default_runs_dir()
    report = examine(folder, purge_days)
    if as_json:
        from hpc_trainer.cli.common import print_json

        print_json(_as_json(report))
    else:
        _print(report)
    if report.count(Status.broken):
        sys.exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings, in the order in which they are shown."""

    runs_dir: Path
    findings: tuple[Finding, ...]
    seconds: float
    num_slurm_calls: int

    def count(self, status: Status) -> int:
        """Return the number of findings with this status."""
        return sum(finding.status is status for finding in self.findings)


def examine(runs_dir: Path, purge_days: int | None = None) -> Report:
    """Make all checks; the groups run side by side, and each bounds its own time.

    Args:
        runs_dir: the folder of sweeps, which need not exist.
        purge_days: days after which the site deletes unused files there; None: as `cluster.purge_days` of each run.
    """
    from concurrent.futures import ThreadPoolExecutor

    from hpc_trainer.doctor.cluster import Cluster
    from hpc_trainer.doctor.folder import folder_findings
    from hpc_trainer.doctor.machine import machine_findings

    begin = time.monotonic()
    cluster = Cluster()
    groups: tuple[Callable[[], Iterator[Finding]], ...] = (
        machine_findings,
        lambda: folder_findings(runs_dir, purge_days),
        cluster.findings,
    )
    with ThreadPoolExecutor(max_workers=len(groups)) as pool:
        results = [*pool.map(lambda group: list(group()), groups)]
    return Report(
        runs_dir=runs_dir,
        findings=(*(finding for group in results for finding in group), *cluster.more_findings(runs_dir)),
        seconds=time.monotonic() - begin,
        num_slurm_calls=cluster.num_calls,
    )


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "runs_dir": str(report.runs_dir.absolute()),
        "findings": [_record(finding) for finding in report.findings],
        "seconds": round(report.seconds, 3),
        "slurm_calls": report.num_slurm_calls,
    }


def _record(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check, "status": finding.status.value, "what": finding.what, "why": finding.why,
        "fix": finding.fix,
    }  # fmt: skip


def _print(report: Report) -> None:
    from hpc_trainer.cli.common import as_typed, say
    from hpc_trainer.doctor.findings import Status

    colours = {Status.ok: "green", Status.warning: "yellow", Status.broken: "red"}
    width = max(len(finding.check) for finding in report.findings)
    for finding in report.findings:
        word = finding.status.value.upper()
        say(f" {finding.check:<{width}}  {finding.what}", lead=f"[{colours[finding.status]}]{word:<8}[/]")
        for name, text in (("why", finding.why), ("fix", finding.fix)):
            if text:
                say(as_typed(f"{'':9}{name}: {text}"))
    say(
        f"{report.count(Status.broken)} broken, {report.count(Status.warning)} to look at, {report.count(Status.ok)} "
        f"fine; {report.seconds:.1f} s, {report.num_slurm_calls} request(s) to Slurm."
    )
