"""Ledgers of a sweep's runs with data of Slurm's accounting, which is asked once about each attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpc_trainer.errors import SlurmError
from hpc_trainer.runs.monitoring.allocations import Allocation, keep_allocations, read_allocations
from hpc_trainer.runs.monitoring.ledger import read_spent
from hpc_trainer.runs.reading import Faults
from hpc_trainer.runs.states import RunState
from hpc_trainer.slurm.accounting import ask_allocations
from hpc_trainer.slurm.queue import array_of
from hpc_trainer.state.journal import Attempt
from hpc_trainer.state.monitoring.ledger import RunLedger, ledger_of, match
from hpc_trainer.state.status import RunStatus, SweepStatus

_MOST = 200
_FEW = 20
"""Largest number of array elements about which sacct is asked one by one; above it, about whole arrays."""


def ledger_of_run(status: SweepStatus, run: RunStatus, told: Sequence[Allocation] = ()) -> RunLedger | None:
    """Return the ledger of one run from its files and `told`, the accounting's new answer; None if it has none."""
    shape = run.spec.shape
    return ledger_of(
        status.sweep.run(run.run_id), run.attempts, num_gpus=shape.num_nodes * shape.gpus_per_node,
        allocations=told, faults=status.faults_of(run.run_id),
    )  # fmt: skip


def goodputs(status: SweepStatus, runs: Sequence[RunStatus]) -> dict[str, float]:
    """Return run id -> goodput, from files alone, for runs that have a ledger; {} for more than 200 runs.

    A ledger is two small files, which a command about 10,000 runs must not read.
    """
    if len(runs) > _MOST:
        return {}
    ledgers = {run.run_id: ledger_of_run(status, run) for run in runs if run.attempts}
    return {
        run_id: round(ledger.goodput, 4)
        for run_id, ledger in ledgers.items()
        if ledger is not None and ledger.goodput is not None
    }


def ask_ledgers(status: SweepStatus, runs: Iterable[RunStatus], notes: list[str]) -> dict[str, RunLedger]:
    """Return run id -> ledger for the runs that have one.

    At most one sacct is called for all runs, and none if the Elapsed of every attempt is known from earlier. Its answer
    is kept beside the runs' ledgers, because the accounting forgets.

    Args:
        status: status of the sweep.
        runs: the runs.
        notes: gets a note if sacct did not answer.
    """
    runs = list(runs)
    unknown = [attempt for run in runs for attempt in _unknown(status, run)]
    allocations: list[Allocation] = []
    if unknown and status.silence is None:
        try:
            allocations = ask_allocations(_ids(unknown), min(attempt.start_time for attempt in unknown))
        except SlurmError as error:
            notes.append(f"sacct did not answer ({error}): where the time went is from the run folders alone.")
    for run in runs if allocations else ():
        jobs = {attempt.job_id for attempt in run.attempts}
        keep_allocations(
            status.sweep.run(run.run_id), [allocation for allocation in allocations if allocation.job_id in jobs]
        )
    ledgers = {run.run_id: ledger_of_run(status, run, allocations) for run in runs}
    return {run_id: ledger for run_id, ledger in ledgers.items() if ledger is not None}


def _unknown(status: SweepStatus, run: RunStatus) -> list[Attempt]:
    """Return the ended attempts on Slurm whose allocation is not recorded; [] if the run has no ledger."""
    ended = run.attempts if run.state is not RunState.RUNNING else run.attempts[:-1]
    on_slurm = [attempt for attempt in ended if attempt.executor == "slurm"]
    if not on_slurm:
        return []
    paths = status.sweep.run(run.run_id)
    allocated = match(run.attempts, read_allocations(paths, Faults()))
    return [attempt for attempt in on_slurm if attempt.attempt not in allocated] if read_spent(paths, Faults()) else []


def _ids(attempts: Sequence[Attempt]) -> set[str]:
    ids = {attempt.job_id for attempt in attempts}
    return ids if len(ids) <= _FEW else {array_of(job_id) for job_id in ids}
