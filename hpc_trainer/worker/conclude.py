"""End of an attempt whose run is not done: ask Slurm, decide, record the cause, and bring the run back at most once.

Nothing here imports torch. `decide.py` has the decisions. After an error the first rank that failed is recorded. A stop
that cannot reach the end of a step (a data wait, a compilation) ends the run without a save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_trainer.config.schema.output import OnOverheat
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import (
    ConfigError,
    DivergedError,
    ExitCode,
    HpcTrainerError,
    IncompatibleResumeError,
    LowGoodputError,
    MissingCommandError,
    PeerLostError,
    RefusedError,
    SlurmError,
    StuckError,
)
from hpc_trainer.record.bad_nodes import keep_if_of_node
from hpc_trainer.record.files import claim, to_json, write_atomic, write_json
from hpc_trainer.record.journal import (
    MOVE_CAUSES,
    Journal,
    Move,
    failures_of_storage,
    failures_untold,
    log_header,
    own_frame,
    read_failure,
    read_move,
)
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.ledger import append_spent
from hpc_trainer.record.reading import is_storage_error, is_there, read_json
from hpc_trainer.record.states import CANCEL, HOLD, LOW_GOODPUT, OUT_OF_MEMORY, POOL, UNEXPLAINED, RunState
from hpc_trainer.runtime.pace import DEADLINE, job_end_time, last_moment
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.start import start_words
from hpc_trainer.runtime.stop import DEVICE, StopFlag, stop_signals_held_back
from hpc_trainer.slurm.commands import has_slurm
from hpc_trainer.slurm.jobs import DEFAULT_KILL_WAIT_S, WORKER_TIMEOUT_S, requeue, show_job, show_preemption, update_job
from hpc_trainer.slurm.queue import keeps_accounting, read_accounting
from hpc_trainer.slurm.shape import shape_of
from hpc_trainer.slurm.terms import AT_WORK
from hpc_trainer.worker.decide import (
    Action,
    Answer,
    Decision,
    StopFacts,
    cancelled,
    decide_answer,
    decide_failure,
    decide_stop,
    decide_successor,
)
from hpc_trainer.worker.line import stop_the_line, tell_end

if TYPE_CHECKING:
    from hpc_trainer.runtime.rank_group import RankGroup

# sbatch asks a busy controller again and again; a job that is being killed has KillWait (30 s by default) anyway.
_SUCCESSOR_TIMEOUT_S = 120.0
_SUCCESSOR = "hpc_trainer.launch.later_jobs"

# sacct reports an end some tenths of a second after it (22.05: 0.3 s); Slurm kills us after KillWait, 30 s by default.
_ASK_AGAIN_S = (0.3, 0.6, 1.2)

# Accounting is read for the last day: our own job ends at this moment, by the clock of its node.
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Attempt that was asked to stop. `saved_step` is None if nothing is saved yet."""

    config: TrainConfig
    paths: RunPaths
    env: RankEnv
    flag: StopFlag
    attempt: int
    saved_step: int | None
    spent: Callable[[], tuple[int, Mapping[str, Any]]] | None = None
    """Function that returns (step that rank 0 is at, its time by `Spans.spent`); None if no time is counted."""

    def tell_spent(self) -> None:
        """Append the line of this attempt to the run's ledger. Call this before anything that may end the process."""
        if self.env.rank == 0 and self.spent is not None:
            append_spent(self.paths, self.attempt, *self.spent())


def conclude_stop(stop: Stop, group: RankGroup) -> ExitCode:
    """Decide, journal and act, all on rank 0, and return the same exit code on every rank. Collective.

    The checkpoint must be complete before this call. The journal is written before the requeue: Slurm may kill the job
    as soon as it agrees.
    """
    code = int(_conclude(stop)) if group.is_rank_zero else 0
    # A barrier too: srun --kill-on-bad-exit would kill ranks that are still at work.
    return ExitCode(group.broadcast(code))


def conclude_start(stop: Stop) -> ExitCode:
    """Conclude a stop that came before the ranks could communicate. Not collective: the journal is the barrier."""
    if stop.env.rank == 0:
        return _conclude(stop)
    deadline = time.monotonic() + 2 * WORKER_TIMEOUT_S + 10
    while time.monotonic() < deadline:
        attempts = Journal(stop.paths).read()
        if attempts and attempts[-1].attempt == stop.attempt and attempts[-1].has_ended:
            # Rank 0 acts after the record, and must not be killed while it acts because this rank has left.
            time.sleep(WORKER_TIMEOUT_S if attempts[-1].action != Action.none.value else 1.0)
            break
        time.sleep(0.2)
    return ExitCode.REQUEUED


@stop_signals_held_back()
def conclude_failure(stop: Stop, *, cause: str, error: Mapping[str, Any], is_first: bool) -> None:
    """Journal an error, and restart the run if the error may pass and the budget allows it.

    Not collective, and may be called by any rank: rank 0 journals, and the rank that failed first acts.

    Args:
        error: record of the rank that failed first, with its `exit_code`.
        is_first: True if this rank failed first.
    """
    stop.tell_spent()

    def record(decision: Decision) -> None:
        if stop.env.rank == 0:
            state, why, act = decision.state, decision.cause, decision.action.value
            with _disk_may_be_full(f"that it ended as {state.value}"):
                Journal(stop.paths).end(stop.attempt, state=state, cause=why, error=dict(error), action=act)

    failed = Decision(
        action=Action.none, state=RunState.OUT_OF_MEMORY if cause == OUT_OF_MEMORY else RunState.FAILED, cause=cause,
        exit_code=ExitCode(error["exit_code"]),
    )  # fmt: skip
    made = None
    if error["exit_code"] == ExitCode.STORAGE:  # for other errors Slurm need not be asked
        made = decide_failure(
            _facts(stop), cause=cause, num_failures=_num_failures(stop), max_failures=stop.config.cluster.max_failures
        )
    record(made or failed)
    if is_first:
        keep_if_of_node(stop.paths, stop.attempt, error)
    if made is None and is_first:
        stop_the_line(stop.paths, stop.config.cluster.stop_after_alike, cause, error)
        tell_end(stop.config, stop.paths, failed.state, cause, error)
    if made is None or made.action is Action.none or not is_first:
        return
    ended = _bring_back(stop, made)
    if ended.state is not RunState.REQUEUED:
        record(ended if ended.state is RunState.CANCELLED else failed)


def _num_failures(stop: Stop) -> int:
    """Return how often storage or data ended the run, including this time.

    A full disk takes no record of the failure. Then each start in a row that recorded no other end counts, or a run on
    a disk that stays full would restart without end.
    """
    if is_there(stop.paths.failure(stop.attempt), parents=0):
        return failures_of_storage(stop.paths)
    return failures_untold(Journal(stop.paths).read(), stop.env.job_id, stop.env.restart_count)


@contextlib.contextmanager
def _disk_may_be_full(what: str) -> Iterator[None]:
    """Continue without a record if the disk is full: the restart of the run must not wait for free space."""
    try:
        yield
    except OSError as error:
        if not is_storage_error(error):
            raise
        print(f"{what} could not be recorded: {error}", file=sys.stderr)


@stop_signals_held_back()
def _conclude(stop: Stop) -> ExitCode:
    stop.tell_spent()
    decision = decide_stop(_facts(stop))
    _record(stop, decision)
    for pause_s in _ASK_AGAIN_S if decision.cause == UNEXPLAINED else ():
        time.sleep(pause_s)
        decision = decide_stop(_facts(stop))
        if decision.cause != UNEXPLAINED:
            _record(stop, decision)
            break
    took = "" if stop.flag.time is None else f", {time.time() - stop.flag.time:.1f} s after the signal"
    what = "before the first step" if stop.saved_step is None else f"at step {stop.saved_step}, saved"
    if stop.config.train.command is not None:  # only the program knows what it has saved
        what = "" if stop.saved_step is None else f"after step {stop.saved_step}"
    print(f"stopped{what and ' '}{what}: {decision.cause} ({stop.flag.signal_name}){took}.")
    ended = _bring_back(stop, decision)
    if Action.successor in (decision.action, ended.action) or ended != decision:
        # A second record of the same end: the action in the first one failed, or another action succeeded.
        _record(stop, ended)
    if ended.state is RunState.CANCELLED:
        tell_end(stop.config, stop.paths, ended.state, ended.cause)
    return ended.exit_code


def _bring_back(stop: Stop, decision: Decision) -> Decision:
    """Carry out the decision and those that follow from Slurm's answers; return the decision that succeeded.

    The cancel marker is read last, right before each action: Slurm may have taken half a minute to report the job's
    state.
    """
    done = decision
    if done.action is not Action.none and _is_cancelled(stop):
        return cancelled()
    if done.action is Action.requeue:
        with _disk_may_be_full("the requeue"):
            write_json(stop.paths.requeue_token, _incarnation(stop.env))
        answer = _ask_requeue(stop.env.job_id)
        made = decide_answer(done, answer, can_submit=has_slurm())
        if made.action is Action.none and made.state is RunState.REQUEUED:
            _leave_node(stop)
            return done
        done = made
        if _is_cancelled(stop):
            return cancelled()
    if done.action is Action.batch_requeue:
        sweep = SweepPaths(stop.paths.folder.parent)
        try:
            write_atomic(sweep.requeue_request(stop.env.job_id, stop.env.restart_count), f"{stop.paths.folder}\n")
        except OSError as error:
            print(f"the batch script could not be asked to requeue the job: {error}", file=sys.stderr)
            return dataclasses.replace(done, action=Action.none, state=done.fallback or RunState.PREEMPTED)
        print("the batch script will requeue the job.")
    if done.action is Action.successor:
        is_accepted = _submit_successor(stop)
        ended = decide_successor(done, is_accepted=is_accepted)
        # The action is kept: it tells the journal's reader how the run came back.
        return dataclasses.replace(ended, action=done.action if is_accepted else Action.none, fallback=None)
    return done


def bring_back(stop: Stop) -> bool:
    """Send the job of a run that does not start yet back into the queue; return False if that failed."""
    wanted = Decision(
        action=Action.requeue, state=RunState.REQUEUED, cause="follows", exit_code=ExitCode.REQUEUED,
        fallback=RunState.PREEMPTED,
    )  # fmt: skip
    return _bring_back(stop, wanted).state is not RunState.PREEMPTED


def _ask_requeue(job_id: str) -> Answer:
    try:
        answer = Answer(requeue(job_id))
    except SlurmError as error:
        print(f"job {job_id} was not requeued: {error}")
        if isinstance(error, RefusedError):
            return Answer.refused
        return Answer.no_scontrol if isinstance(error, MissingCommandError) else Answer.silent
    print(f"job {job_id}: {answer.value}")
    return answer


def _leave_node(stop: Stop) -> None:
    """Exclude the node that the run leaves from the requeued job. Slurm refuses this before the requeue (22.05)."""
    move = _move(stop)
    if move is None:
        return
    try:
        update_job(stop.env.job_id, [f"ExcNodeList={_excluded(stop, move)}"], timeout_s=WORKER_TIMEOUT_S)
    except SlurmError as error:
        print(f"job {stop.env.job_id} may get {move.node} again: {error}")
    else:
        print(f"job {stop.env.job_id} leaves {move.node}.")


def _move(stop: Stop) -> Move | None:
    return read_move(stop.paths, stop.attempt) if stop.config.monitor.on_overheat is OnOverheat.move else None


def _excluded(stop: Stop, move: Move | None) -> str:
    """Return the host list that the job must not get: the hosts excluded before, and the node that it leaves now."""
    excluded = stop.config.hardware.exclude
    with contextlib.suppress(SlurmError):
        excluded = show_job(stop.env.job_id).excluded or excluded
    return ",".join(filter(None, (excluded, None if move is None else move.node)))


def _submit_successor(stop: Stop) -> bool:
    """Submit the successor job in another process (`launch.successor.main`), and return True if it was accepted.

    A submission needs modules that no rank has imported, and may hang.
    """
    argv = [sys.executable, *start_words(_SUCCESSOR), str(stop.paths.folder), stop.env.job_id]
    if stop.config.monitor.on_overheat is OnOverheat.move:
        argv.append(_excluded(stop, _move(stop)))
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SUCCESSOR_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"no successor job: {error}. `hpc-trainer submit` brings the run back.")
        return False
    print(done.stdout.strip() or done.stderr.strip())
    return done.returncode == 0


def _record(stop: Stop, decision: Decision) -> None:
    state = decision.state
    if decision.action is Action.successor and decision.fallback is not None:
        state = decision.fallback  # true until sbatch has accepted
    with _disk_may_be_full(f"that it ended as {state.value}"):
        Journal(stop.paths).end(
            stop.attempt,
            state=state,
            cause=decision.cause,
            step=stop.saved_step,
            saved_step=stop.saved_step,
            action=decision.action.value,
            signal=DEVICE if decision.cause in MOVE_CAUSES else stop.flag.signal_name,
        )


def _incarnation(env: RankEnv) -> dict[str, object]:
    return {"job_id": env.job_id, "restart_count": env.restart_count}


def _is_cancelled(stop: Stop) -> bool:
    return is_there(stop.paths.marker(CANCEL))


def _facts(stop: Stop) -> StopFacts:
    has_cancel_marker, has_hold_marker = _is_cancelled(stop), is_there(stop.paths.marker(HOLD))
    job_id = stop.env.job_id
    on_slurm = job_id[:1].isdecimal()  # torchrun inside a Slurm job has that job's id
    move = _move(stop)
    if stop.env.launcher == POOL:
        return StopFacts(
            on_slurm=on_slurm, has_cancel_marker=has_cancel_marker, has_hold_marker=has_hold_marker, in_pool=True,
            is_deadline=stop.flag.signal_name == DEADLINE, move_cause="" if move is None else move.cause,
        )  # fmt: skip
    if not on_slurm:
        return StopFacts(on_slurm=False, has_cancel_marker=has_cancel_marker, has_hold_marker=has_hold_marker)
    facts = StopFacts(
        on_slurm=True,
        move_cause="" if move is None else move.cause,
        has_cancel_marker=has_cancel_marker,
        has_hold_marker=has_hold_marker,
        has_token=read_json(stop.paths.requeue_token) == _incarnation(stop.env),
        can_submit=has_slurm(),
        is_deadline=stop.flag.signal_name == DEADLINE,
        signal_lead_s=shape_of(stop.config).signal_lead_s,
    )
    try:
        job = show_job(job_id)
    except SlurmError as error:
        print(f"Slurm did not say in which state job {job_id} is: {error}")
        return facts
    now = time.time()
    preemption = None
    if job.preempt_time is not None and job.state not in AT_WORK:
        with contextlib.suppress(SlurmError):
            preemption = show_preemption(job.partition)
    accounting, is_kept = (None, True) if job.state in AT_WORK else _accounting(job_id)
    return dataclasses.replace(
        facts,
        preempts_by_requeue=None if preemption is None else preemption.brings_back,
        # Slurm's times are whole seconds.
        is_in_grace=preemption is not None and now < (job.preempt_time or now) + preemption.grace_s - 2,
        job_state=job.state,
        seconds_left=job.seconds_left(stop.flag.time),
        ran_full_time=job.ran_full_time,
        was_preempted=job.preempt_time is not None,
        was_requeued=job.restarts > stop.env.restart_count,
        accounting_state=accounting,
        keeps_accounting=is_kept,
        reason=job.reason,
    )


def _accounting(job_id: str) -> tuple[str | None, bool]:
    """Return (the job's state by sacct, None if unknown; False if the site keeps no accounting)."""
    try:
        entry = read_accounting([job_id], time.time() - _DAY_S, timeout_s=WORKER_TIMEOUT_S).get(job_id)
    except SlurmError:
        return None, True
    # Job ids are reused, and our own row may not be there yet.
    if entry is None or os.environ.get("SLURM_JOB_NAME") not in (None, entry.name):
        return None, keeps_accounting(timeout_s=WORKER_TIMEOUT_S)
    return entry.state, True


_CAUSES = {
    StuckError.__name__: "stuck",
    PeerLostError.__name__: "peer_lost",
    DivergedError.__name__: "diverged",
    IncompatibleResumeError.__name__: "incompatible_resume",
    ConfigError.__name__: "invalid_config",
    LowGoodputError.__name__: LOW_GOODPUT,
}
_CAUSES_BY_CODE = {int(ExitCode.NO_PROGRESS): "no_progress", int(ExitCode.STORAGE): "storage"}


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a rank that ends by this error."""
    code = error.exit_code if isinstance(error, HpcTrainerError) else ExitCode.FAILED
    code = ExitCode.STORAGE if is_storage_error(error) else code  # an unreadable data set or journal
    return ExitCode.CONFIG if code is ExitCode.USAGE else code


def record_of(stop: Stop, code: ExitCode, **fields: Any) -> dict[str, Any]:
    """Return this rank's record for the failure file, with `type` and `message` among the fields."""
    return {
        "rank": stop.env.rank, "node": stop.env.node, "exit_code": int(code), "time": time.time(),
        "start": log_header(stop.attempt, stop.env.job_id, stop.env.restart_count), **fields,
    }  # fmt: skip


def record_of_error(stop: Stop, error: BaseException) -> dict[str, Any]:
    """Return this rank's record of an exception for the failure file."""
    text = "".join(traceback.format_exception(error))
    frame = own_frame(text, stop.config.trust)
    return record_of(
        stop, exit_code_of(error), type=type(error).__name__,
        message=str(error)[:4000],  # a refused resume names the flag that allows it at its end
        traceback=text[-8000:], **({} if frame is None else {"frame": frame}),
    )  # fmt: skip


def conclude_error(stop: Stop, record: dict[str, Any]) -> None:
    """Record the error of this rank, unless another failed before, and conclude the attempt by the first error."""
    first = record
    try:
        first = _first_failure(stop.paths, stop.attempt, record)
    except OSError as full:  # most likely the disk is full; the journal may still take a line
        print(f"the error could not be recorded: {full}", file=sys.stderr)
    cause = first.get("cause") or _CAUSES.get(first["type"]) or _CAUSES_BY_CODE.get(first["exit_code"], "exception")
    conclude_failure(stop, cause=cause, error=first, is_first=first is record)


def _first_failure(paths: RunPaths, attempt: int, record: dict[str, Any]) -> dict[str, Any]:
    """Record the error if it is the first one, and return the first; later errors mostly follow from that one.

    An example of a later error is "connection closed by peer".
    """
    path = paths.failure(attempt)
    is_first = claim(path, f"{to_json(record)}\n".encode())
    return record if is_first else {**record, **read_failure(path)}


# After this many seconds of silence in a step or a batch, Slurm is asked, once, for the time when it ends the job.
_SILENT_S = 8.0


class LateStop:
    """End of this rank shortly before Slurm kills it, if it was asked to stop and has shown no sign of life since.

    Work since the last checkpoint is lost. The run itself is restarted, and its end has a cause in the journal. All
    ranks are silent then, because those that are not stuck wait for the one that is: each of them exits by itself.
    This works only on Slurm: nothing else kills at a known time.

    Args:
        saved_step: returns the step that is saved by now.
        leave: ends the work of this rank outside this process, before the run is restarted.
    """

    def __init__(
        self, stop: Stop, saved_step: Callable[[], int | None], leave: Callable[[], None] = lambda: None
    ) -> None:
        self._stop, self._saved_step, self._leave = stop, saved_step, leave
        self._is_on_slurm = stop.env.job_id[:1].isdecimal()
        self._last_moment: float | None = None
        self._has_asked = False

    def look(self, silent_s: float) -> None:
        """Exit if it is time, without returning. For the watchdog's thread."""
        flag = self._stop.flag
        flag.look()
        if not self._is_on_slurm or flag.time is None or min(silent_s, flag.age_s) < _SILENT_S:
            return
        if not self._has_asked:
            self._has_asked, self._last_moment = True, self._ask(flag.time)
        if self._last_moment is None or time.time() < self._last_moment:
            return
        self._leave()
        saved_step = self._saved_step()
        kept = "no checkpoint" if saved_step is None else f"the checkpoint of step {saved_step}"
        print(
            f"no step has ended in the {flag.age_s:.0f} s since {flag.signal_name}, and Slurm ends this job soon: "
            f"the rank exits now, with {kept}."
        )
        code = 1
        try:
            code = conclude_start(dataclasses.replace(self._stop, saved_step=saved_step))
            sys.stdout.flush()
        finally:
            os._exit(int(code))

    def _ask(self, signal_time: float) -> float | None:
        end_time = job_end_time(self._stop.config.hardware.time_limit_min)
        try:
            job = show_job(self._stop.env.job_id)
            preemption = show_preemption(job.partition)
        except SlurmError as error:
            print(f"Slurm did not say when it ends this job: {error}")
            return last_moment(
                signal_time=signal_time, end_time=end_time, is_at_work=True, kill_wait_s=DEFAULT_KILL_WAIT_S
            )
        return last_moment(
            signal_time=signal_time,
            end_time=end_time if job.end_time is None else job.end_time,
            is_at_work=job.state in AT_WORK,
            preempt_time=job.preempt_time,
            grace_s=0.0 if preemption is None else preemption.grace_s,
            kill_wait_s=DEFAULT_KILL_WAIT_S if preemption is None else preemption.kill_wait_s,
        )
