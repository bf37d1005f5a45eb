"""Request to a running run for a profile of some steps, and the wait for the profile."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.observe.profile_request import (
    FAILED,
    MAX_STEPS,
    WATCHING,
    ProfileAnswer,
    ProfileRequest,
    read_answer,
    read_request,
    withdraw,
    write_request,
)
from hpc_trainer.operate.find import prepare_to_write
from hpc_trainer.record.journal import read_heartbeat
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.trust import check_trusted

# Answers are files; the run's state may need a question to Slurm.
_POLL_S, _STATUS_S = 0.25, 10.0
_LONGEST_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """Profile of one rank: its answer, and the files of table and trace."""

    rank: int
    answer: ProfileAnswer
    table: Path
    trace: Path


def ask_for_profile(
    sweep: SweepPaths, run: RunStatus, *, num_steps: int, ranks: Sequence[int], timeout_s: float
) -> ProfileRequest:
    """Write a request for a profile; the run looks for requests about once a second.

    Args:
        sweep: the sweep.
        run: the run.
        num_steps: number of steps, 1 to 1000.
        ranks: the ranks to profile.
        timeout_s: seconds after which no attempt begins the profile, > 0 and at most 86,400.

    Raises:
        ConfigError: an argument is out of range; the message names the legal values.
        RunStateError: the run is not running, has no shared loop to profile, or is being profiled already.
        UntrustedFileError: others may write the sweep's folder or the run's.
    """
    paths = sweep.run(run.run_id)
    _check(run, num_steps, ranks, timeout_s)
    before = read_request(paths)
    if before is not None and before.is_wanted() and any(_is_open(paths, rank, before) for rank in before.ranks):
        age = time.time() - before.time
        raise RunStateError(
            f"{run.run_id} has an open request for a profile, {age:.0f} s old. Wait for its profile, or until the "
            f"request expires at {before.keep_s:.0f} s."
        )
    request = ProfileRequest(
        id=uuid.uuid4().hex, time=time.time(), keep_s=timeout_s, num_steps=num_steps, ranks=tuple(sorted({*ranks}))
    )
    prepare_to_write(sweep, [run.run_id])
    if os.path.lexists(paths.profile):
        check_trusted(paths.profile)
    write_request(paths, request)
    return request


def _check(run: RunStatus, num_steps: int, ranks: Sequence[int], timeout_s: float) -> None:
    if not 1 <= num_steps <= MAX_STEPS:
        nearest = min(max(num_steps, 1), MAX_STEPS)
        raise ConfigError(f"--steps={num_steps} must be 1 to {MAX_STEPS}. Use {nearest}.")
    if not 0 < timeout_s <= _LONGEST_S:
        raise ConfigError(f"--timeout={timeout_s:g} must be greater than 0 and at most {_LONGEST_S:g} s. Use 600.")
    world = run.spec.shape.world_size
    wrong = [rank for rank in ranks if not 0 <= rank < world]
    if wrong or not ranks:
        what = f"{wrong[0]} is none" if wrong else "names none"
        legal = f"0 to {world - 1}, or all" if world > 1 else "0"
        raise ConfigError(f"--ranks: {what} of the {world} rank(s) of {run.run_id}. Use {legal}.")
    if run.spec.is_own_loop:
        key = "train.command" if run.spec.is_program else "train.main"
        raise RunStateError(
            f"{run.run_id} runs your own code ({key}), and only steps of the shared loop can be profiled. Use "
            "torch.profiler in your code."
        )
    if run.state is not RunState.RUNNING:
        later = (
            "Ask again when it runs."
            if run.state.is_active
            else ("Name a running run, or start another: the same command with debug=profile sweep_name=NEW.")
        )
        raise RunStateError(f"{run.run_id} is {run.state.value}, and only a running run can be profiled. {later}")


def await_profile(
    sweep: SweepPaths, run_id: str, request: ProfileRequest, say: Callable[[str], None] = lambda _: None
) -> list[RankProfile]:
    """Wait for the profiles of all requested ranks and return them. The request is withdrawn in any case.

    Args:
        sweep: the sweep.
        run_id: the run.
        request: the request.
        say: called with a line about the progress.

    Raises:
        RunStateError: a rank failed, the run ended, or the profiles did not come in time. The message says what the run
            did meanwhile.
    """
    paths = sweep.run(run_id)
    try:
        return _await(sweep, run_id, request, say)
    finally:
        withdraw(paths, request)


def _await(sweep: SweepPaths, run_id: str, request: ProfileRequest, say: Callable[[str], None]) -> list[RankProfile]:
    paths, begin = sweep.run(run_id), time.monotonic()
    look_again, announced = begin + _STATUS_S, set[int]()
    while True:
        answers = {rank: _answer(paths, rank, request) for rank in request.ranks}
        for rank, answer in answers.items():
            if answer is not None and answer.state == WATCHING and rank not in announced:
                announced.add(rank)
                say(f"rank {rank} is profiled from step {answer.step + 1} on.")
        missing = [rank for rank, answer in answers.items() if answer is None or answer.state == WATCHING]
        if not missing:
            return [_profile(paths, run_id, rank, answer) for rank, answer in answers.items() if answer is not None]
        now = time.monotonic()
        if now > begin + request.keep_s:
            raise RunStateError(_too_late(paths, run_id, missing, answers, request.keep_s))
        if now > look_again:
            look_again = now + _STATUS_S
            run = read_status(sweep).run(run_id)
            # The answer of a rank that has just ended may arrive a moment later.
            if not run.state.is_active and all(_answer(paths, rank, request) == answers[rank] for rank in missing):
                raise RunStateError(
                    f"{run_id} is {run.state.value} at step {run.step}: rank {missing[0]} has no profile."
                )
            newest = read_request(paths)
            if newest is None or newest.id != request.id:
                raise RunStateError(f"another command has replaced this request for a profile of {run_id}.")
        time.sleep(_POLL_S)


def _too_late(
    paths: RunPaths, run_id: str, missing: Sequence[int], answers: dict[int, ProfileAnswer | None], timeout_s: float
) -> str:
    beat = read_heartbeat(paths.heartbeat, Faults())
    age = time.time() - float(beat.get("time", 0.0))
    begun = [rank for rank in missing if answers[rank] is not None]
    what = (
        f"rank {begun[0]} has not recorded all its steps yet"
        if begun
        else f"rank {missing[0]} has not started recording"
    )
    sign = f"its last sign of life is of step {beat['step']}, {age:.0f} s ago" if "step" in beat else "it never began"
    return (
        f"no profile of {run_id} after {timeout_s:g} s: {what}; {sign}. An evaluation, a save or a compilation between "
        f"two steps may take long: use a longer --timeout or fewer --steps. If the run hangs: hpc-trainer why {run_id}"
    )


def _answer(paths: RunPaths, rank: int, request: ProfileRequest) -> ProfileAnswer | None:
    answer = read_answer(paths, rank)
    return answer if answer is not None and answer.id == request.id else None


def _is_open(paths: RunPaths, rank: int, request: ProfileRequest) -> bool:
    answer = _answer(paths, rank, request)
    return answer is None or answer.state == WATCHING


def _profile(paths: RunPaths, run_id: str, rank: int, answer: ProfileAnswer) -> RankProfile:
    if answer.state == FAILED:
        raise RunStateError(f"rank {rank} of {run_id} made no profile: {answer.error}.")
    table, trace = paths.profile_files(rank)
    return RankProfile(rank=rank, answer=answer, table=table, trace=trace)
