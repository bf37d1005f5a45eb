"""`hpc-trainer verify preempt`: interruption of a run, and a report on its recovery."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from hpc_trainer.cli.common import print_json
from hpc_trainer.cli.given import resolve_runs_dir
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.errors import RunStateError
from hpc_trainer.launch.grids import retry
from hpc_trainer.operate.find import select
from hpc_trainer.verify.interruptions import Drill
from hpc_trainer.verify.preempt import DrillReport, choose_run, run_drill


def run_preempt(
    what: Drill, names: list[str], sweep: str | None, runs_dir: Path | None, *, timeout_s: float, as_json: bool
) -> None:
    """Interrupt a run; exit with 1 if it did not come back, or resumed at another step than the saved one."""
    status, chosen = select(resolve_runs_dir(runs_dir), names, sweep)
    if len(chosen) > 1 and names != [status.sweep.name]:
        listed = ", ".join(chosen[:5])
        raise RunStateError(f"verify preempt takes one run, and {len(chosen)} fit: {listed}. Name one, or its sweep.")
    report = run_drill(
        what, status.sweep, choose_run(status, chosen),
        bring_back=lambda run_id: retry(status.sweep, [run_id], take_back=what is Drill.cancel),
        timeout_s=timeout_s, say=(lambda _: None) if as_json else print,
    )  # fmt: skip
    if as_json:
        print_json({**dataclasses.asdict(report), "drill": report.drill.value})
    else:
        print(as_typed(_verdict(report, status.sweep.name)))
    if report.problems:
        sys.exit(1)


def _verdict(report: DrillReport, sweep: str) -> str:
    check = f"verify preempt --kind {report.drill.value}"
    if report.problems:
        return f"{check}: FAILED: {'; '.join(report.problems)}. Read: hpc-trainer logs {report.run_id}"
    return f"{check}: passed: nothing was lost but the time. Next: hpc-trainer status --watch {sweep}"
