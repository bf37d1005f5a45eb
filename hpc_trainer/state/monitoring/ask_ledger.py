"""The ledgers of a sweep's runs, with what Slurm's accounting says of their attempts: asked once for each attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpc_trainer.errors import SlurmError
from hpc_trainer.runs.monitoring.ledger import Allocation, append_allocations, read_ledger_file
from hpc_trainer.runs.reading import Faults
from hpc_trainer.runs.states import RunState
from hpc_trainer.slurm.elapsed import read_allocations
from hpc_trainer.slurm.queue import array_of
from hpc_trainer.state.journal import Attempt
from hpc_trainer.state.monitoring.ledger import RunLedger, ledger_of, match
from hpc_trainer.state.status import RunStatus, SweepStatus

_MOST = 200
_FEW = 20
"""Of more elements than these their arrays are asked about as a whole."""


def ledger_of_run(status: SweepStatus, run: RunStatus) -> RunLedger | None:
    """The ledger of one run, by its files alone; None if it has none."""
    shape = run.spec.shape
    return ledger_of(
        status.sweep.run(run.run_id), run.attempts, num_gpus=shape.num_nodes * shape.gpus_per_node,
        faults=status.faults_of(run.run_id),
    )  # fmt: skip


def goodputs(status: SweepStatus, runs: Sequence[RunStatus]) -> dict[str, float]:
    """Run id -> goodput, by their files alone, of those of these runs that have a ledger; {} of more than 200 runs.

    A ledger is two small files: a look at 10,000 runs does without them.
    """
    if len(runs) > _MOST:
        return {}
    found = {run.run_id: ledger_of_run(status, run) for run in runs if run.attempts}
    return {
        run_id: round(ledger.goodput, 4)
        for run_id, ledger in found.items()
        if ledger is not None and ledger.goodput is not None
    }


def ask_ledgers(status: SweepStatus, runs: Iterable[RunStatus], notes: list[str]) -> dict[str, RunLedger]:
    """Run id -> its ledger, of those of these runs that have one.

    At most one sacct, whatever the number of runs: none if every attempt's Elapsed is known from the time before. What
    it says is kept in the runs' ledger.jsonl, for accountings forget.

    Args:
        notes: gets what could not be asked.
    """
    runs = list(runs)
    unknown = [each for run in runs for each in _unknown(status, run)]
    if unknown and status.silence is None:
        try:
            told = read_allocations(_ids(unknown), min(each.start_time for each in unknown))
        except SlurmError as error:
            notes.append(f"sacct did not answer ({error}): where the time went is from the run folders alone.")
        else:
            for run in runs:
                _keep(status, run, told)
    found = {run.run_id: ledger_of_run(status, run) for run in runs}
    return {run_id: ledger for run_id, ledger in found.items() if ledger is not None}


def _unknown(status: SweepStatus, run: RunStatus) -> list[Attempt]:
    """The attempts on Slurm that have ended, of whose allocations no line tells."""
    ended = run.attempts if run.state is not RunState.RUNNING else run.attempts[:-1]
    on_slurm = [each for each in ended if each.executor == "slurm"]
    if not on_slurm:
        return []
    file = read_ledger_file(status.sweep.run(run.run_id), Faults())
    known = match(run.attempts, file.allocations)
    return [each for each in on_slurm if each.attempt not in known] if file.spent else []


def _ids(attempts: Sequence[Attempt]) -> set[str]:
    ids = {each.job_id for each in attempts}
    return ids if len(ids) <= _FEW else {array_of(each) for each in ids}


def _keep(status: SweepStatus, run: RunStatus, told: Sequence[Allocation]) -> None:
    """The run's ledger.jsonl gets what it has not yet of its own jobs."""
    jobs = {each.job_id for each in run.attempts}
    paths = status.sweep.run(run.run_id)
    known = {(each.job_id, each.start_time) for each in read_ledger_file(paths, Faults()).allocations}
    news = [each for each in told if each.job_id in jobs and (each.job_id, each.start_time) not in known]
    append_allocations(paths, news)
