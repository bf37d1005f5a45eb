"""Energy use of a run, for `results`."""

from __future__ import annotations

from typing import Any

from hpc_trainer.runs.monitoring.telemetry import J_PER_KWH, newest_energy_j
from hpc_trainer.runs.record_values import is_number
from hpc_trainer.state.status import RunStatus, SweepStatus


def energy_columns(status: SweepStatus, run: RunStatus) -> dict[str, Any]:
    """Return `energy_kwh` of all attempts and ranks, `j_per_sample` trained, and `co2_g`; {} if energy is not known."""
    if not run.attempts:
        return {}
    used = newest_energy_j(status.sweep.run(run.run_id), status.faults_of(run.run_id))
    if used is None:
        return {}
    config = run.spec.config
    num_samples = run.step * int(config.get("train", {}).get("global_batch_size") or 0)
    factor = config.get("monitor", {}).get("co2_g_per_kwh")
    return {
        "energy_kwh": round(used / J_PER_KWH, 6),
        **({"j_per_sample": round(used / num_samples, 6)} if num_samples else {}),
        **({"co2_g": round(used / J_PER_KWH * factor, 3)} if is_number(factor) else {}),
    }
