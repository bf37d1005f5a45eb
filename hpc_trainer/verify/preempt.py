"""Interruption of a running run, as Slurm would cause it, and a check that the run resumes at the right step.

Only the rights of the job's owner are needed. An interruption that an owner cannot cause (a node goes down) is
imitated as closely as possible, and the report says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from hpc_trainer.errors import RunStateError, SlurmError
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.checkpoint_folders import committed
from hpc_trainer.record.journal import Attempt, Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.processes import is_alive
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import CANCEL, DONE, RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.slurm.jobs import cancel_jobs, requeue_by_hand, update_job
from hpc_trainer.verify.interruptions import InterruptionKind

# Files are read often. Slurm, which others need too, is asked seldom.
_POLL_S, _POLL_SLURM_S = 0.5, 3.0
# Seconds that a cancelled run is watched: longer than an attempt needs to end and Slurm to look at its queue.
_STAYS_DOWN_S = 10.0


_ON_SLURM = {
    InterruptionKind.preempt: "SIGTERM to every rank, as at the beginning of a grace period",
    InterruptionKind.timeout: "SIGUSR2 to every rank, as Slurm's warning before the time limit",
    InterruptionKind.cancel: "hpc-trainer cancel --save, then retry",
    InterruptionKind.nodefail: "scontrol requeue: Slurm takes the nodes away (only administrators may mark nodes down)",
    InterruptionKind.kill: "SIGKILL to every rank, then retry",
}
_LOCALLY = {
    InterruptionKind.preempt: "SIGTERM to one rank, then retry",
    InterruptionKind.timeout: "SIGUSR2 to one rank, then retry",
    InterruptionKind.cancel: "hpc-trainer cancel, then retry",
    InterruptionKind.nodefail: "SIGKILL to every rank and to the queue that started them, then retry",
    InterruptionKind.kill: "SIGKILL to every rank, then retry",
}


_SIGNALS = {
    InterruptionKind.preempt: signal.SIGTERM,
    InterruptionKind.timeout: signal.SIGUSR2,
    InterruptionKind.kill: signal.SIGKILL,
}


@dataclass(slots=True, kw_only=True)
class PreemptReport:
    """Result of `verify preempt`. Steps are optimizer steps; times are seconds since the interruption."""

    run_id: str
    kind: InterruptionKind
    how: str
    newest_checkpoint: int | None
    """Step of the newest checkpoint before the interruption."""
    stopped_s: float | None = None
    saved_step: int | None = None
    cause: str | None = None
    back_s: float | None = None
    resumed_step: int | None = None
    problems: list[str] = field(default_factory=list)


def choose_run(status: SweepStatus, run_ids: Sequence[str]) -> RunStatus:
    """Return the run to interrupt: the first of `run_ids` that is running and past its first step.

    Raises:
        RunStateError: none of the runs is training now.
    """
    open_runs = status.open_among(run_ids)
    training = [run for run in open_runs if run.state is RunState.RUNNING and run.attempts and run.step > 0]
    if not training:
        first = map(status.run, run_ids[:3])
        seen = ", ".join(f"{run.run_id} is {run.state.value} at step {run.step}" for run in first)
        raise RunStateError(
            f"verify preempt needs a run that trains, past its first step, in {status.sweep.name}: {seen}."
        )
    return training[0]


def interrupt_and_check(
    kind: InterruptionKind, sweep: SweepPaths, run: RunStatus, *, bring_back: Callable[[str], object], timeout_s: float,
    say: Callable[[str], None] = lambda _: None,
) -> PreemptReport:  # fmt: skip
    """Interrupt `run`, wait until it trains again, and report each difference from what is promised.

    Args:
        bring_back: submits a run again by its id (`retry`); called if neither Slurm nor the run does so.
        timeout_s: seconds for the run to stop, and as many for it to train again.
        say: called with a line about the progress.

    Raises:
        RunStateError: the job does not surely belong to the run.
        SlurmError: Slurm did not do what was asked.
    """
    paths, attempt = sweep.run(run.run_id), run.attempts[-1]
    on_slurm = attempt.executor == "slurm"
    report = PreemptReport(
        run_id=run.run_id, kind=kind, how=(_ON_SLURM if on_slurm else _LOCALLY)[kind],
        newest_checkpoint=_newest_checkpoint(paths),
    )  # fmt: skip
    newest = "" if run.spec.is_program else f", its newest checkpoint at {report.newest_checkpoint}"
    say(f"{run.run_id} is at step {max(run.step, report.newest_checkpoint or 0)}{newest}. {report.how}.")
    begin = time.monotonic()
    _interrupt(kind, sweep, run, on_slurm=on_slurm)
    # A killed process reports nothing: then only Slurm knows that it ended.
    ask = on_slurm and kind in (InterruptionKind.kill, InterruptionKind.nodefail)
    poll_s = _POLL_SLURM_S if ask else _POLL_S
    if not _wait(lambda: _has_stopped(sweep, run.run_id, attempt, ask=ask), timeout_s, poll_s):
        report.problems.append(f"it had not stopped after {timeout_s:g} s")
        return report
    report.stopped_s = time.monotonic() - begin
    _see_the_end(report, paths, attempt)
    saved = "" if report.saved_step is None else f", saved step {report.saved_step}"
    if run.spec.is_program:
        saved = "" if report.saved_step is None else f", after step {report.saved_step}"
    say(f"stopped after {report.stopped_s:.1f} s: {report.cause or 'without a message'}{saved}.")
    if paths.marker(DONE).exists():
        report.problems.append("it was done before it could be interrupted; take a longer run")
        return report
    if kind is InterruptionKind.cancel:
        _stays_down(report, sweep)
    _come_back(report, sweep, attempt, bring_back, begin, timeout_s)
    if report.back_s is not None:
        say(f"back after {report.back_s:.1f} s, at step {report.resumed_step}.")
    return report


def _interrupt(kind: InterruptionKind, sweep: SweepPaths, run: RunStatus, *, on_slurm: bool) -> None:
    attempt = run.attempts[-1]
    if kind is InterruptionKind.cancel:
        cancel_runs(read_status(sweep), [run], save=True)
    elif on_slurm and run.own_job != attempt.job_id:
        raise RunStateError(f"job {attempt.job_id} may not be the job of {run.run_id} (see status). Try again.")
    elif on_slurm and kind is InterruptionKind.nodefail:
        requeue_by_hand(attempt.job_id)
    elif on_slurm:
        # SIGKILL of a job cancels it; SIGKILL of a step only kills its processes.
        what = f"{attempt.job_id}.0" if kind is InterruptionKind.kill else attempt.job_id
        cancel_jobs([what], signal=_SIGNALS[kind].name.removeprefix("SIG"))
    elif kind in (InterruptionKind.preempt, InterruptionKind.timeout):
        _signal(attempt.pid, _SIGNALS[kind])
    else:
        _kill_local(attempt, with_queue=kind is InterruptionKind.nodefail)


def _kill_local(attempt: Attempt, *, with_queue: bool) -> None:
    """Kill all ranks, children of one controller; `with_queue` kills the controller and its parent, the queue, too."""
    controller = psutil.Process(attempt.pid).parent()
    ranks = controller.children(recursive=True) if controller is not None else []
    parents = [parent for parent in (controller, controller.parent() if controller else None) if parent is not None]
    for process in (*(parents if with_queue else ()), *ranks):
        if process.pid > 1 and process.uids().real == os.getuid():
            _signal(process.pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _has_stopped(sweep: SweepPaths, run_id: str, attempt: Attempt, *, ask: bool) -> bool:
    """Return True if the attempt recorded its end, another began, or the scheduler (if `ask`) says that it ended."""
    newest = Journal(sweep.run(run_id)).read()[-1]
    if newest.attempt != attempt.attempt:
        return True
    if newest.has_ended:
        return attempt.executor == "slurm" or not is_alive(attempt.process)
    if attempt.executor != "slurm":
        return is_alive(attempt.process) is False
    return ask and _status_of(sweep, run_id).state is not RunState.RUNNING


def _see_the_end(report: PreemptReport, paths: RunPaths, attempt: Attempt) -> None:
    ended = next(entry for entry in Journal(paths).read() if entry.attempt == attempt.attempt)
    report.cause, report.saved_step = ended.cause, ended.saved_step
    if (
        report.kind in (InterruptionKind.preempt, InterruptionKind.timeout, InterruptionKind.cancel)
        and ended.saved_step is None
    ):
        report.problems.append("it was asked to stop, and recorded no saved step")


def _stays_down(report: PreemptReport, sweep: SweepPaths) -> None:
    if _wait(lambda: _status_of(sweep, report.run_id).state is not RunState.CANCELLED, _STAYS_DOWN_S, _POLL_SLURM_S):
        state = _status_of(sweep, report.run_id).state
        report.problems.append(f"it was cancelled, and is {state.value}")


def _come_back(
    report: PreemptReport, sweep: SweepPaths, attempt: Attempt, bring_back: Callable[[str], object], begin: float,
    timeout_s: float,
) -> None:  # fmt: skip
    """Submit the run again if nothing else restarts it, and compare the step of its resume with the saved step."""
    paths = sweep.run(report.run_id)
    expected = report.saved_step if report.saved_step is not None else _newest_checkpoint(paths)
    run = _settled(sweep, report.run_id, timeout_s)
    if report.kind is not InterruptionKind.cancel and paths.marker(CANCEL).exists():
        report.problems.append("it was cancelled in the meantime, so it stays cancelled")
        return
    if not run.state.is_active:
        bring_back(report.run_id)
    elif run.state is RunState.REQUEUED and run.own_job is not None:
        # Slurm holds a requeued job back for two minutes (22.05 to 24.11).
        with contextlib.suppress(SlurmError):
            update_job(run.own_job, ["StartTime=now+2"])

    def resumed() -> Attempt | None:
        later = [entry for entry in Journal(paths).read() if entry.attempt > attempt.attempt]
        return next((entry for entry in later if entry.resumed_step is not None), None)

    if not _wait(lambda: resumed() is not None, timeout_s):
        state = _status_of(sweep, report.run_id).state
        report.problems.append(f"it had not resumed after {timeout_s:g} s, and is {state.value}")
        return
    back = resumed()
    assert back is not None
    report.back_s, report.resumed_step = time.monotonic() - begin, back.resumed_step
    if run.spec.is_program:  # only check that the program found its own checkpoint, whatever that holds
        if (report.resumed_step or 0) <= (Journal(paths).read()[0].resumed_step or 0):
            report.problems.append(
                f"it began anew at step {report.resumed_step}: it saves no checkpoint of its own, or does not find it"
            )
    elif report.resumed_step != (expected or 0):
        report.problems.append(f"it resumed at step {report.resumed_step}, and step {expected or 0} was saved")


def _settled(sweep: SweepPaths, run_id: str, timeout_s: float) -> RunStatus:
    """Wait at most 90 s until the old attempt has ended and Slurm has reported how; return the run's status."""
    between = (RunState.RUNNING, RunState.UNKNOWN)
    _wait(lambda: _status_of(sweep, run_id).state not in between, min(timeout_s, 90.0), _POLL_SLURM_S)
    return _status_of(sweep, run_id)


def _status_of(sweep: SweepPaths, run_id: str) -> RunStatus:
    return read_status(sweep).run(run_id)


def _newest_checkpoint(paths: RunPaths) -> int | None:
    """Return the step of the newest checkpoint by the folders' names; the run itself checks that it is valid."""
    return next((step for step, _ in committed(paths.checkpoints)), None)


def _wait(holds: Callable[[], bool], timeout_s: float, poll_s: float = _POLL_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
