"""Carries out a plan: specs, then for each array intent, sbatch, confirmation. Killed anywhere, nothing is lost."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import SlurmError, SubmitError
from hpc_trainer.launch.plan import ArrayPlan, SweepPlan, specs_to_write
from hpc_trainer.launch.provenance import code_revision
from hpc_trainer.launch.snapshot import Snapshot, read_code, store_code
from hpc_trainer.runs.files import check_trusted, write_json
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.local_process import find_process, process_name
from hpc_trainer.runs.spec import append_specs, read_specs
from hpc_trainer.runs.submissions import (
    Submission,
    read_submissions,
    write_confirmation,
    write_dropped,
    write_intent,
)
from hpc_trainer.slurm.queue import find_by_comment, read_queue


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedArray:
    """One array that the scheduler accepted."""

    job_id: str
    hardware: str
    run_ids: tuple[str, ...]


def freeze_code(plan: SweepPlan) -> Snapshot | None:
    """The code as it stands now, as the plan's runs will import it; None if nothing is to be frozen. Writes nothing.

    Raises:
        ConfigError: it cannot be frozen, see `read_code`.
    """
    return read_code([spec for array in plan.arrays for spec in array.specs], plan.grid.sweep.folder.parent)


def array_script_of(plan: SweepPlan, array: ArrayPlan, uuid: str = "UUID", code: Snapshot | None = None) -> str:
    """The batch script that `submit` would hand to sbatch; "" for the local executor."""
    if plan.grid.executor is not Executor.slurm:
        return ""
    from hpc_trainer.launch import submitit_bridge as bridge

    folder, parameters, command = _slurm_request(plan, array, uuid, code)
    return bridge.array_script(folder, parameters, command, len(array.specs))


def settle_intents(paths: SweepPaths) -> None:
    """Finds out what became of intents without an answer: the writer was killed between sbatch and its reply.

    The job carries the intent's uuid as its comment, a local queue as an argument. Call it under the sweep's lock.

    Raises:
        SlurmError: Slurm does not answer; submitting again now could submit twice.
    """
    for intent in (each for each in read_submissions(paths) if each.job_id is None):
        on_slurm = intent.executor == Executor.slurm.value
        job_id = _find_job(intent) if on_slurm else find_process(intent.uuid)
        if job_id is not None:
            write_confirmation(paths, intent, job_id)
        else:
            write_dropped(paths, intent, "the scheduler does not know it")


# What sbatch has handed over may take this long to show in squeue.
_ACCEPT_LAG_S = 10.0


def _find_job(intent: Submission) -> str | None:
    while True:
        job_id = find_by_comment(list(read_queue().values()), intent.uuid)
        if job_id is not None or time.time() - intent.time > _ACCEPT_LAG_S:
            return job_id
        time.sleep(_ACCEPT_LAG_S / 2)  # three looks at most: design, section 9


def submit_plan(plan: SweepPlan, *, command_line: Sequence[str]) -> list[SubmittedArray]:
    """Submits every array of the plan. Call it under the sweep's lock.

    Raises:
        SubmitError: the scheduler refused an array; those before it stand, and are not submitted again.
    """
    paths = plan.grid.sweep
    check_trusted(paths.folder)
    for folder in (paths.run(spec.run_id).folder for array in plan.arrays for spec in array.specs):
        if folder.is_symlink() or folder.exists():
            check_trusted(folder)  # the worker would refuse it, where nobody watches
    code = freeze_code(plan)
    if code is not None:
        store_code(paths, code)
    known = read_specs(paths)
    append_specs(paths, specs_to_write(plan, known))
    write_json(
        paths.sweep,
        {
            "sweep": paths.name,
            "command": list(command_line),
            "time": time.time(),
            "run_ids": [spec.run_id for spec in plan.grid.specs],
            "axes": sorted({axis for spec in plan.grid.specs for axis in spec.axes}),
            "code": code_revision(code),
        },
    )
    if plan.grid.executor is Executor.slurm:
        return [_submit_slurm(plan, array, code) for array in plan.arrays]
    return _submit_local(plan, code) if plan.arrays else []


def _submit_slurm(plan: SweepPlan, array: ArrayPlan, code: Snapshot | None) -> SubmittedArray:
    from hpc_trainer.launch import submitit_bridge as bridge

    paths = plan.grid.sweep
    run_ids = [spec.run_id for spec in array.specs]
    digest = None if code is None else code.digest
    intent = write_intent(paths, executor="slurm", hardware=array.hardware, run_ids=run_ids, code=digest)
    folder, parameters, command = _slurm_request(plan, array, intent.uuid, code)
    try:
        job_id = bridge.submit_array(folder, parameters, command, len(run_ids))
    except bridge.UnclearSubmitError:
        # "Socket timed out" may come after the controller accepted: look before calling it refused.
        with contextlib.suppress(SlurmError):
            settle_intents(paths)
        settled = _find(paths, intent)
        if settled is None or settled.job_id is None:
            raise
        job_id = settled.job_id
    except SubmitError as error:
        write_dropped(paths, intent, str(error))
        raise
    else:
        write_confirmation(paths, intent, job_id)
    return SubmittedArray(job_id=job_id, hardware=array.hardware, run_ids=tuple(run_ids))


def _find(paths: SweepPaths, intent: Submission) -> Submission | None:
    return next((each for each in read_submissions(paths) if each.uuid == intent.uuid), None)


def _slurm_request(
    plan: SweepPlan, array: ArrayPlan, uuid: str, code: Snapshot | None
) -> tuple[Path, dict[str, object], str]:
    from hpc_trainer.launch import submitit_bridge as bridge

    cluster = array.specs[0].config["cluster"]
    paths = plan.grid.sweep
    parameters = bridge.slurm_parameters(array.shape, cluster, folder=paths.scripts, job_name=paths.name, comment=uuid)
    archive = None if code is None else code.archive(paths)
    command = bridge.worker_command(paths.folder, ["--array", uuid], cluster["python"], archive)
    return paths.scripts, parameters, command


def _submit_local(plan: SweepPlan, code: Snapshot | None) -> list[SubmittedArray]:
    """Starts one detached queue for all arrays; it outlives this command and its terminal."""
    paths = plan.grid.sweep
    paths.local_logs.mkdir(parents=True, exist_ok=True)
    digest = None if code is None else code.digest
    intents = [
        write_intent(
            paths, executor="local", hardware=a.hardware, run_ids=[spec.run_id for spec in a.specs], code=digest
        )
        for a in plan.arrays
    ]
    run_ids = [run_id for intent in intents for run_id in intent.run_ids]
    argv = [sys.executable, "-m", "hpc_trainer.launch.local_queue", "--sweep-dir", str(paths.folder)]
    for intent in intents:
        argv += ["--intent", intent.uuid]
    if code is not None:
        argv += ["--archive", str(code.archive(paths))]
    with (paths.local_logs / "queue.log").open("ab") as log:
        process = subprocess.Popen(
            [*argv, "--max-parallel", str(plan.grid.max_parallel), *run_ids],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # neither Ctrl-C nor the end of the terminal reaches it
        )
    job_id = process_name(process.pid)
    for intent in intents:
        write_confirmation(paths, intent, job_id)
    return [SubmittedArray(job_id=job_id, hardware=intent.hardware, run_ids=intent.run_ids) for intent in intents]
