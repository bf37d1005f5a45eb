"""Start of a run that follows others: one look at them, before the first attempt. No torch.

Slurm has started the job because the followed jobs had ended, which says neither that the runs are complete nor that no
successor has them. Rank 0 decides: the run starts, goes back into the queue behind their newest jobs, is held, or is
cancelled. Once it has started, it never looks again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from hpc_trainer.config.program import followed_places
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, ExitCode, RunStateError, SlurmError
from hpc_trainer.record.chain import (
    LOOK_AGAIN_S,
    MOST_AWAITED,
    Awaited,
    Waits,
    awaited_of,
    cancel_follower,
    held_reason,
    look_at,
    on_failure_of,
    read_decision,
    run_named,
    told,
    write_decision,
)
from hpc_trainer.record.checkpoint_folders import committed
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import AFTER_BACK, AFTER_HELD, AFTER_START, POOL, RunState
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag, stop_signals_held_back
from hpc_trainer.slurm.jobs import WORKER_TIMEOUT_S, requeue_held, update_job
from hpc_trainer.worker.begin import begin_attempt

# Other ranks wait so long for rank 0 to decide, which may ask a busy controller.
_LONGEST_S = 600.0
_POLL_S = 0.5


def look_before_start(spec: RunSpec, config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag) -> int | None:
    """Return the exit code of a rank whose run does not start now; None if the run starts, or follows no other run.

    Raises:
        RunStateError: rank 0 has not decided in time.
    """
    awaited = awaited_of(spec.config, paths.folder.parent.parent)
    if not awaited or read_decision(paths).get("decision") == AFTER_START:
        return None
    if env.rank != 0:
        return None if _decision_of_rank_0(paths, env) == AFTER_START else ExitCode.OK
    for followed in awaited:
        with contextlib.suppress(OSError):
            look_anew(followed.folder)
            if followed.run_id is not None:
                look_anew(followed.sweep.run(followed.run_id).folder)
    waits = Waits.of(look_at(awaited), on_failure_of(spec))
    if waits.may_start:
        try:
            sources = _found(config, awaited, paths)
        except ConfigError as error:
            return _refused(error, config, paths, env, stop)
        write_decision(paths, AFTER_START, **_incarnation(env), **sources)
        return None
    return _do_not_start(config, paths, env, stop, waits)


def _incarnation(env: RankEnv) -> dict[str, Any]:
    return {"job_id": env.job_id, "restart_count": env.restart_count}


def _decision_of_rank_0(paths: RunPaths, env: RankEnv) -> str:
    deadline = time.monotonic() + _LONGEST_S
    own = _incarnation(env)
    while True:
        look_anew(paths.folder)
        decided = read_decision(paths)
        if all(decided.get(key) == value for key, value in own.items()):
            return str(decided.get("decision"))
        if time.monotonic() > deadline:
            raise RunStateError(f"rank {env.rank} waited {_LONGEST_S:.0f} s for rank 0 to look at followed runs.")
        time.sleep(_POLL_S)


def _found(config: TrainConfig, awaited: Sequence[Awaited], paths: RunPaths) -> dict[str, Any]:
    """Return the weights, and the checkpoints for its command, that the run takes from the runs that it follows."""
    taken: dict[str, Any] = {}
    if config.init_from.awaits:
        from hpc_trainer.features.init_from.source import resolve_awaited  # reads headers of weights

        _, taken["init_from"] = resolve_awaited(config.init_from, paths.folder.parent.parent)
        print(f"{paths.run_id}: init_from={config.init_from.path} is {taken['init_from']['path']}", flush=True)
    places = followed_places(config.train.command or "")
    if places:
        taken["places"] = {
            place: _place_of(run_named(name, awaited), name, word) for place, (name, word) in places.items()
        }
    return taken


def _place_of(followed: Awaited, name: str, word: str) -> str:
    """Return the name of a followed run, or its newest checkpoint: for a program the folder of its own checkpoints."""
    if word == "run":
        return f"{followed.folder.name}/{followed.run_id}"
    run = followed.sweep.run(str(followed.run_id))
    saved = committed(run.checkpoints)
    if saved:
        return str(saved[0][1])
    if run.own_checkpoints.is_dir() and any(run.own_checkpoints.iterdir()):
        return str(run.own_checkpoints)
    raise ConfigError(
        f"{{after.{name}.checkpoint}}: {run.folder} has no checkpoint. A program keeps its checkpoints in "
        "{run.checkpoints}."
    )


def _do_not_start(config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, waits: Waits) -> int:
    """Cancel or hold the run, or send its job back into the queue; return the exit code."""
    if waits.is_cancelled:
        cancel_follower(paths, waits.failed)
        print(f"{paths.run_id}: cancelled (after.on_failure=cancel): it follows {told(waits.failed)}.", flush=True)
        return ExitCode.OK
    reason = held_reason(waits.idle) if waits.idle else f"follows {told(waits.active)}"
    write_decision(paths, AFTER_HELD if waits.idle else AFTER_BACK, reason=reason, **_incarnation(env))
    print(f"{paths.run_id}: does not start yet: it {reason}.", flush=True)
    if not env.job_id[:1].isdecimal() or env.launcher == POOL:
        return _stopped(paths, env, reason)  # a local queue asks before it starts a run, and no pool takes such runs
    with stop_signals_held_back():
        if waits.idle:
            with contextlib.suppress(SlurmError):
                requeue_held(env.job_id)
                return ExitCode.REQUEUED
        return _go_back(config, paths, env, stop, waits, reason)


def _go_back(config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, waits: Waits, reason: str) -> int:
    """Requeue the job behind the newest jobs of the followed runs, or in ten minutes if they have none."""
    from hpc_trainer.worker.conclude import Stop, bring_back

    ended = Stop(config=config, paths=paths, env=env, flag=stop, attempt=0, saved_step=None)
    if not bring_back(ended):
        return _stopped(paths, env, reason)
    jobs = [stand.job for stand in waits.active if stand.job is not None]
    changes = [f"Dependency=afterany:{':'.join(jobs[-MOST_AWAITED:])}"] if jobs else [f"StartTime=now+{LOOK_AGAIN_S}"]
    try:
        update_job(env.job_id, changes, timeout_s=WORKER_TIMEOUT_S)
    except SlurmError as error:  # Slurm holds a requeued job back for two minutes anyway
        print(f"job {env.job_id} looks again soon: {error}", flush=True)
    return ExitCode.REQUEUED


def _refused(error: ConfigError, config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag) -> int:
    """Record that the run cannot use the runs that it follows: no checkpoint, or no metric that decides on the best."""
    from hpc_trainer.worker.conclude import Stop, conclude_error, record_of_error

    print(f"{type(error).__name__}: {error}", flush=True)
    attempt = Journal(paths).attempt_number(env.job_id, env.restart_count)
    begin_attempt(paths, env, attempt)
    ended = Stop(config=config, paths=paths, env=env, flag=stop, attempt=attempt, saved_step=None)
    conclude_error(ended, record_of_error(ended, error))
    return ExitCode.CONFIG


def _stopped(paths: RunPaths, env: RankEnv, reason: str) -> int:
    """Record a run that could not be requeued as PREEMPTED: the next `submit` gives it a job that waits."""
    attempt = Journal(paths).attempt_number(env.job_id, env.restart_count)
    begin_attempt(paths, env, attempt).end(attempt, state=RunState.PREEMPTED, cause=reason)
    return ExitCode.REQUEUED
