"""One rank from its command line to its exit code. Imports torch only when there is work to do."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, ExitCode, HpcTrainerError, RunStateError, SlurmError
from hpc_trainer.record.chain import started
from hpc_trainer.record.files import make_folder, set_umask
from hpc_trainer.record.holds import read_hold, write_hold
from hpc_trainer.record.journal import Journal, failures_of_storage, log_header, read_failure
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.ledger import Kind
from hpc_trainer.record.reading import Faults, is_storage_error, is_there, names_in
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.spec import RunSpec, read_spec
from hpc_trainer.record.states import CANCEL, DONE, HOLD, POOL, RunState
from hpc_trainer.record.submissions import (
    Job,
    Submission,
    claim_run,
    newest_of_run,
    read_submissions,
    rivals_of_each_run,
    winner_of,
)
from hpc_trainer.record.trust import check_place, check_trusted
from hpc_trainer.runtime.pace import job_start_time
from hpc_trainer.runtime.rank_env import BY_OUR_TORCHRUN, RankEnv, read_rank_env
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.slurm.jobs import cancel_named
from hpc_trainer.slurm.queue import job_name
from hpc_trainer.worker.follow import look_before_start


def run(argv: list[str] | None, stop: StopFlag) -> int:
    """Run this rank to its end, and return the exit code."""
    if BY_OUR_TORCHRUN in os.environ:
        from hpc_trainer.worker.agent import end_with_agent

        end_with_agent()
    spans = Spans.of_process()
    parser = argparse.ArgumentParser(prog="python -m hpc_trainer.worker", description=__doc__)
    parser.add_argument("--sweep-dir", type=Path, required=True, help="runs/<sweep>")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--array", metavar="UUID", help="the submission; SLURM_ARRAY_TASK_ID tells the run in it")
    which.add_argument("--run", metavar="RUN_ID", help="one run")
    which.add_argument("--pool", metavar="UUID", help="the pool whose runs this slot works through")
    parser.add_argument("--slots", type=int, default=0, metavar="N", help="start all N slots of a local pool")
    parser.add_argument("--choice", type=int, default=0, help="item of the run's list of hardware, from 0")
    parser.add_argument("--torchrun", type=int, metavar="RANKS", help="start that many ranks of this node by torchrun")
    arguments = parser.parse_args(argv)

    def work() -> int:
        sweep = SweepPaths(arguments.sweep_dir.resolve())
        check_place(sweep.folder)
        if arguments.pool:
            from hpc_trainer.worker.slot import run_slot

            return run_slot(sweep, arguments.pool, stop, run_turn, arguments.slots)
        run_id = arguments.run or _run_of_element(sweep, arguments.array)
        if arguments.torchrun is not None:
            from hpc_trainer.worker.agent import run_agent

            config = read_spec(sweep, run_id).on(arguments.choice).typed()
            set_umask(config.paths.group_readable)
            return run_agent(config, sweep.run(run_id), read_rank_env(), stop, arguments.torchrun)
        job = _Job(uuid=arguments.array, choice=arguments.choice)
        return run_rank(sweep, run_id, read_rank_env(), stop, spans, job)

    return _exit_code_of(work)


def run_turn(
    sweep: SweepPaths, spec: RunSpec, env: RankEnv, stop: StopFlag, spans: Spans, config: TrainConfig | None = None
) -> int:
    """Run one rank of a run that a slot of a pool has claimed, and return the exit code; `config` as in `run_rank`."""
    return _exit_code_of(lambda: run_rank(sweep, spec.run_id, env, stop, spans, spec=spec, config=config))


def _exit_code_of(work: Callable[[], int]) -> int:
    """Return the exit code of `work`, also if it ends by an error that came before the attempt had a journal."""
    try:
        return work()
    except HpcTrainerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # A spec that cannot be read or built now never can be: a retry is useless.
        return ExitCode.CONFIG if isinstance(error, (ConfigError, RunStateError)) else error.exit_code
    except OSError as error:
        if not is_storage_error(error):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return ExitCode.STORAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Submission to which this job belongs, None for a single run's job; and the item of its run's hardware list."""

    uuid: str | None = None
    choice: int = 0


def run_rank(
    sweep: SweepPaths, run_id: str, env: RankEnv, stop: StopFlag, spans: Spans, job: _Job = _Job(), *,
    spec: RunSpec | None = None, config: TrainConfig | None = None,
) -> int:  # fmt: skip
    """Run one rank of one run, and return its exit code; at once, without torch, if the run is done or cancelled.

    `spec` is the run's spec, and `config` its configuration, if the caller has read them.
    """
    paths = sweep.run(run_id)
    spec = read_spec(sweep, run_id) if spec is None else spec
    config = spec.typed() if config is None else config
    set_umask(config.paths.group_readable)
    # A node that worked for this run before may still see the folder as it was then: with a marker that `retry` has
    # removed, or without the line of a newer attempt.
    look_anew(paths.folder)
    present = names_in(paths.folder) or ()
    for marker in (DONE, CANCEL):
        if marker in present:
            print(f"{run_id}: the marker {marker} exists; nothing to do.")
            return ExitCode.OK
    if _is_held(sweep, paths, present, env):
        print(f"{run_id}: the run is held; nothing to do until `hpc-trainer release`.")
        return ExitCode.OK
    try:
        return _start_attempt(config, sweep, paths, env, stop, spans, job, spec)
    except OSError as error:
        if not is_storage_error(error):
            raise
        return _storage_failed(error, config, paths, env, stop)


def _is_held(sweep: SweepPaths, paths: RunPaths, present: Sequence[str], env: RankEnv) -> bool:
    """Return True if the run or its sweep was held before this job began: Slurm started it in spite of the hold.

    All ranks compare with the start of the job, so that a hold that comes meanwhile does not divide them. Rank 0 copies
    the hold of a sweep into the run's folder, by which readers know why the job ended.
    """
    begin = job_start_time()
    if begin is None:
        return False  # the local queue starts no held run
    if HOLD in present:
        return read_hold(paths.marker(HOLD), Faults()).time < begin
    if not is_there(sweep.hold, parents=0):
        return False
    hold = read_hold(sweep.hold, Faults())
    if hold.time >= begin:
        return False
    if env.rank == 0:
        make_folder(paths.folder)
        write_hold(paths.marker(HOLD), hold.why, user=hold.user)
    return True


def _start_attempt(
    config: TrainConfig, sweep: SweepPaths, paths: RunPaths, env: RankEnv, stop: StopFlag, spans: Spans, job: _Job,
    spec: RunSpec,
) -> int:  # fmt: skip
    run_id = paths.run_id
    make_folder(paths.folder)
    check_trusted(paths.folder)
    # A slot has claimed the run: that decides.
    newer = None if env.launcher == POOL else _newer_job(sweep, paths, env, job.uuid)
    if newer is not None:
        print(f"{run_id}: job {newer} has this run now; nothing to do for job {env.job_id}.")
        return ExitCode.OK
    config = spec.on(job.choice).typed() if spec.others else config
    code = look_before_start(spec, config, paths, env, stop)
    if code is not None:
        return code
    config = started(config, paths)
    for folder in (paths.logs, paths.checkpoints):
        make_folder(folder)
    look_anew(paths.logs, parents=0)  # failure files of other nodes
    failed = failed_before(paths, env, config.cluster.max_failures)
    if failed is not None:
        print(f"{run_id}: {failed}; Slurm has started this job once more. Another try: hpc-trainer retry {run_id}")
        return ExitCode.FAILED
    attempt = Journal(paths).attempt_number(env.job_id, env.restart_count)
    _redirect_output(paths, attempt, env)

    os.environ.update(config.cluster.env)
    if config.train.command is not None:
        from hpc_trainer.worker.program import run_program

        return run_program(config, paths, env, stop, attempt, spans)
    # cuBLAS needs a fixed workspace, or its reductions may differ between runs (CUDA toolkit, cuBLAS 2.1.4).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with spans.within(Kind.imports):
        from hpc_trainer.worker.attempt import run_attempt

    return run_attempt(config, paths, env, stop, attempt, spans)


def _storage_failed(error: OSError, config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag) -> int:
    """Handle a disk that is full before the attempt begins: rank 0 brings the run back, as after any storage error."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if env.rank == 0:
        from hpc_trainer.worker.conclude import Stop, conclude_error, record_of_error

        attempt = Journal(paths).attempt_number(env.job_id, env.restart_count)
        ended = Stop(config=config, paths=paths, env=env, flag=stop, attempt=attempt, saved_step=None)
        conclude_error(ended, record_of_error(ended, error))
    return ExitCode.STORAGE


def failed_before(paths: RunPaths, env: RankEnv, max_failures: int) -> str | None:
    """Return a sentence that names the failed attempt if this job's previous start failed for good; else None.

    Such a start was not requested: since 24.05 Slurm requeues a job with a noted preemption once more, however it ends,
    and sites requeue by exit codes (RequeueExit).
    """
    earlier = [attempt for attempt in Journal(paths).read() if attempt.job_id == env.job_id]
    newest = earlier[-1] if earlier else None
    if newest is None or newest.restart_count >= env.restart_count or newest.state is RunState.REQUEUED:
        return None
    code = read_failure(paths.failure(newest.attempt)).get("exit_code")
    if code == ExitCode.STORAGE and failures_of_storage(paths) <= max_failures:
        return None  # a lost node looks like this, and Slurm has started the job elsewhere
    # srun may have ended rank 0 before it could journal another rank's error.
    is_final = (newest.state is not None and newest.state.has_failed) or code not in (None, ExitCode.STORAGE)
    return f"attempt {newest.attempt} has failed for good" if is_final else None


def _newer_job(sweep: SweepPaths, paths: RunPaths, env: RankEnv, uuid: str | None = None) -> str | None:
    """Return the job that has the run in place of this rank's job, if any.

    A job that Slurm requeues late must not start the run, nor one whose rival on other hardware has claimed it.

    Args:
        uuid: the submission of our array; None for the job of a single run.
    """
    in_sweep = [submission for submission in read_submissions(sweep) if paths.run_id in submission.run_ids]
    own = read_submissions(paths)
    job_ids = {
        submission.element_id(submission.run_ids.index(paths.run_id))
        for submission in (*in_sweep, *own)
        if submission.executor == "slurm"
    }
    latest = in_sweep[-1] if in_sweep else None
    rivals = rivals_of_each_run(in_sweep).get(paths.run_id)
    if latest is not None and rivals is not None:
        latest = _winner(paths, env, rivals, uuid) or latest
        if latest.uuid != uuid and any(rival.uuid == uuid for rival, _ in rivals):
            return latest.element_id(latest.run_ids.index(paths.run_id)) or "of another submission"
    newest = newest_of_run(paths, None if latest is None else (latest, latest.run_ids.index(paths.run_id)))
    if env.job_id not in job_ids or newest is None or newest[0].executor != "slurm":
        return None  # ours is not among them: its confirmation is still being written
    job_id = newest[0].element_id(newest[1])
    return job_id if job_id != env.job_id else None


# Seconds for which other ranks wait for the claim of their rank 0; srun ends them if it has failed.
_LONGEST_CLAIM_S = 600.0
_CLAIM_POLL_S = 0.5


def _winner(paths: RunPaths, env: RankEnv, rivals: Sequence[Job], uuid: str | None) -> Submission | None:
    """Return the submission that has claimed a run among several; rank 0 claims it for its own job if none has.

    The winner's rank 0 then cancels the other jobs, which would end by themselves once they start.

    Raises:
        RunStateError: rank 0 of this job has not claimed the run in time.
    """
    own = next((rival for rival, _ in rivals if rival.uuid == uuid), None)
    if own is None:  # a successor job, or a job of an earlier submission
        won = winner_of(paths, rivals)
        return None if won is None else won[0]
    if env.rank == 0 and claim_run(paths, own):
        _end_rivals(SweepPaths(paths.folder.parent), rivals, own)
    deadline = time.monotonic() + _LONGEST_CLAIM_S
    while (won := winner_of(paths, rivals)) is None:
        if time.monotonic() > deadline:
            raise RunStateError(f"rank {env.rank} waited {_LONGEST_CLAIM_S:.0f} s for rank 0 to claim {paths.run_id}.")
        time.sleep(_CLAIM_POLL_S)
        look_anew(paths.folder)
    return won[0]


def _end_rivals(sweep: SweepPaths, rivals: Sequence[Job], own: Submission) -> None:
    """Cancel the other jobs of a run beside the start of this one; a controller that does not answer costs nothing."""
    names = {
        element: job_name(sweep.name, rival.uuid)
        for rival, index in rivals
        if rival.uuid != own.uuid and (element := rival.element_id(index)) is not None
    }

    def work() -> None:
        for element, name in names.items():
            with contextlib.suppress(SlurmError):
                cancel_named(element, name)

    with contextlib.suppress(RuntimeError):  # no more threads for this user: the others end when they start
        threading.Thread(target=work, name="rivals", daemon=True).start()


def _run_of_element(sweep: SweepPaths, uuid: str) -> str:
    index = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    for submission in read_submissions(sweep):
        if submission.uuid == uuid and index.isdecimal() and int(index) < len(submission.run_ids):
            return submission.run_ids[int(index)]
    raise RunStateError(f"{sweep.folder} holds no run for array {uuid}, element {index!r}.")


def _redirect_output(paths: RunPaths, attempt: int, env: RankEnv) -> None:
    """Redirect the output of this rank, and of all it starts, to the rank's own log, whose header names the attempt."""
    log = paths.log(attempt, env.rank)
    print(f"{paths.run_id}: attempt {attempt}, rank {env.rank} logs to {log}", flush=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, f"{log_header(attempt, env.job_id, env.restart_count)}\n".encode())
    except OSError as error:
        if not is_storage_error(error):
            raise
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        kind(io.BufferedWriter(_Log(number, "w", closefd=False)), stream.encoding, stream.errors, line_buffering=True)
        for kind, number, stream in ((TimedLines, 1, sys.stdout), (io.TextIOWrapper, 2, sys.stderr))
    )


class TimedLines(io.TextIOWrapper):
    """Standard output of a rank: each line begins with the time, as `why` writes it. Tracebacks stay as they are."""

    _is_at_begin = True

    def write(self, text: str, /) -> int:
        """Write the text, and return its length."""
        now = time.strftime("%Y-%m-%d %H:%M:%S ")
        lines = text.split("\n")
        timed = [f"{now}{line}" if line and (index or self._is_at_begin) else line for index, line in enumerate(lines)]
        super().write("\n".join(timed))
        self._is_at_begin = not lines[-1] and (len(lines) > 1 or self._is_at_begin)
        return len(text)


class _Log(io.FileIO):
    """Log file that drops text if the disk is full: a line of text must not end a training."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if not is_storage_error(error):
                raise
            return memoryview(data).nbytes
