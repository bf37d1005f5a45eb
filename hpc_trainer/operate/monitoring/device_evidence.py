"""What was wrong with a run's devices, and what to do about it, for `why`."""

from __future__ import annotations

from hpc_trainer.runs.monitoring.warnings import DeviceWarning, Trouble, read_warnings
from hpc_trainer.state.status import RunStatus, SweepStatus

_MOST_LINES = 4
_ADVICE = {
    Trouble.slowed: "tell your centre which node it is; monitor.on_overheat=lower_power, if you may set power limits",
    Trouble.ecc: "tell your centre which node it is, and leave it out: cluster.sbatch.exclude=NODE",
}
_SAME = {Trouble.hot: Trouble.slowed, Trouble.xid: Trouble.ecc, Trouble.lost: Trouble.ecc}


def device_evidence(status: SweepStatus, run: RunStatus) -> tuple[list[str], list[str]]:
    """(evidence, advice) of the newest attempt; of a run that has failed, too, what its device had before."""
    if not run.attempts:
        return [], []
    found = read_warnings(status.sweep.run(run.run_id), run.attempts[-1].attempt, status.faults_of(run.run_id))
    lines = [each.text for each in found[:_MOST_LINES]]
    if len(found) > _MOST_LINES:
        lines.append(f"and {len(found) - _MOST_LINES} more such warnings")
    return lines, list(dict.fromkeys(_advice(each) for each in found))


def _advice(warning: DeviceWarning) -> str:
    return _ADVICE[_SAME.get(warning.trouble, warning.trouble)].replace("NODE", warning.node)
