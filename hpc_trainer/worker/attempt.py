"""One attempt of one rank: build its context, train, and turn its end into a journal record and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from hpc_trainer.config.rules.retention import best_is_max
from hpc_trainer.config.schema.checkpoint import SaveEvery
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.declarations import num_threads
from hpc_trainer.errors import ConfigError, ExitCode, HpcTrainerError, PeerLostError, StuckError
from hpc_trainer.runs.failure import read_failure
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.shared_folder import Watch, is_there
from hpc_trainer.runs.states import CANCEL, DONE, OUT_OF_MEMORY, RunState
from hpc_trainer.runtime.device_memory import is_out_of_memory
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.pace import job_end_time
from hpc_trainer.runtime.process_group import StoppedWhileStarting, process_group
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.rank_group import RankGroup, is_lost_peer
from hpc_trainer.runtime.spans import Kind, Spans
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.runtime.watchdog import SHORTEST_S, Watchdog
from hpc_trainer.state.journal import Journal
from hpc_trainer.training.checkpoint.retention import Retention
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.contract import ResumeContract
from hpc_trainer.training.ending import Outcome
from hpc_trainer.training.save_timer import SaveTimer
from hpc_trainer.training.telemetry.life_signs import SupersededError
from hpc_trainer.worker.begin import begin_attempt, check_goodput
from hpc_trainer.worker.call_main import run_main
from hpc_trainer.worker.conclude import Stop, conclude_start, conclude_stop
from hpc_trainer.worker.environment import recording
from hpc_trainer.worker.failure import conclude_error, record_of_error
from hpc_trainer.worker.flight_recorder import FlightRecorder
from hpc_trainer.worker.late_stop import LateStop
from hpc_trainer.worker.probe import context_class
from hpc_trainer.worker.telemetry.sampler import sampler_of
from hpc_trainer.worker.tracker import build_tracker


def run_attempt(config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, attempt: int, spans: Spans) -> int:
    """Train as one rank, and return the exit code; an error ends the process here, and the other ranks follow."""
    journal = begin_attempt(paths, env, attempt)
    run: RunContext | None = None

    def spent() -> tuple[int, Mapping[str, Any]]:
        return (0, spans.spent(0)) if run is None else (run.step, run.spent(run.step))

    def ended(saved_step: int | None) -> Stop:
        return Stop(config=config, paths=paths, env=env, flag=stop, attempt=attempt, saved_step=saved_step, spent=spent)

    recorder = FlightRecorder(ended(None), spans)
    try:
        device = _device(config, env)
        torch.set_num_threads(num_threads(config))
        is_cancelled = Watch(paths.marker(CANCEL))
        ranks = process_group(
            env,
            device,
            rendezvous=paths.rendezvous,
            address=config.cluster.master_addr,
            timeout_s=config.parallel.timeout_s,
            should_stop=lambda: stop.is_set or is_cancelled.has_come(),
            has_failed=Watch(paths.failure(attempt)).has_come,
        )
        with contextlib.ExitStack() as stack:
            with spans.within(Kind.rendezvous):
                group = stack.enter_context(ranks)
            check_goodput(config, paths, journal.read() if env.rank == 0 else [], group)
            run = recorder.run = _context(config, paths, env, stop, attempt, group, journal, spans)
            gpu = kind_of(device).names(device)
            with (
                _watched(run, ended(None), recorder),
                sampler_of(config, paths, env, attempt, stop, step=lambda: run.step, gpu=gpu),
                recording(
                    config,
                    paths,
                    env,
                    attempt,
                    stop,
                    has_begun=lambda: run.step > run.first_step,
                    facts=run.contract.told,
                ),  # fmt: skip
            ):
                outcome = run_main(config, run)
            if outcome is not Outcome.done:
                code = conclude_stop(ended(run.saved_step), group)
            else:
                code = ExitCode.OK
                if run.is_rank_zero:
                    ended(None).tell_spent()
                    journal.end(
                        attempt,
                        state=RunState.COMPLETED,
                        cause=run.cause,
                        step=run.step,
                        saved_step=run.saved_step,
                    )
        return code
    except StoppedWhileStarting:
        return conclude_start(ended(None))
    except SupersededError as error:
        print(error)
        return ExitCode.REQUEUED
    except BaseException as error:  # SystemExit too: code that calls sys.exit(0) has not completed the run
        if is_there(paths.marker(DONE)):
            # Rank 0 wrote the marker after everything was saved: only the shutdown failed (a peer left first).
            traceback.print_exc()
            return ExitCode.OK
        _fail(error, ended(None), recorder)


def _context(
    config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, attempt: int, group: RankGroup,
    journal: Journal, spans: Spans,
) -> RunContext:  # fmt: skip
    """Return the context that the loop gets in this attempt."""
    checkpoint = config.checkpoint
    return context_class(config)(
        paths=paths,
        env=env,
        group=group,
        stop=stop,
        store=CheckpointStore(
            paths.checkpoints,
            group=group,
            keep_last=checkpoint.keep_last,
            attempt=attempt,
            retention=Retention(keep_every_steps=checkpoint.keep_every_steps, best_is_max=best_is_max(checkpoint)),
        ),
        is_asynchronous=checkpoint.asynchronous,
        keep_best=checkpoint.keep_best,
        attempt=attempt,
        num_steps=config.train.num_steps,
        seed=config.seed,
        saves=SaveTimer(
            checkpoint.every_steps,
            is_auto=checkpoint.every is SaveEvery.auto,
            end_time=job_end_time(config.hardware.time_limit_min),
            attempts=journal.read(),
        ),
        contract=ResumeContract.of(config, group),
        make_tracker=partial(build_tracker, config, paths.folder / config.tracker.name.value),
        heartbeat_every_s=config.monitor.heartbeat_every_s,
        max_no_progress=config.cluster.max_no_progress,
        spans=spans,
    )


@contextlib.contextmanager
def _watched(run: RunContext, stop: Stop, recorder: FlightRecorder) -> Iterator[None]:
    """End this rank if it shows no sign of life for `monitor.watchdog_s` seconds."""
    limit_s = stop.config.monitor.watchdog_s
    if stop.env.world_size > 1:
        limit_s = min(limit_s, max(SHORTEST_S, 0.8 * stop.config.parallel.timeout_s))
    if not limit_s:
        yield
        return

    def give_up(why: str) -> None:
        run.spans.hang(watchdog.silent_s)
        with contextlib.suppress(OSError):
            run.flush_metrics()
        _fail(
            StuckError(f"{why}; the stacks of its threads are in {stop.paths.log(stop.attempt, stop.env.rank)}."),
            stop, recorder,
        )  # fmt: skip

    late = LateStop(
        stop, lambda: run.saver.standing_step, leave=lambda: recorder.write("it left without a save, before a kill")
    )

    def look(silent_s: float) -> None:
        recorder.look(silent_s)
        late.look(silent_s)

    watchdog = Watchdog(
        limit_s,
        has_failed=Watch(stop.paths.failure(stop.attempt)).has_come,
        give_up=give_up,
        follows=stop.env.launcher != "slurm",  # srun ends the ranks that are left
        look=look,
        record=recorder.write,
    )
    with watchdog.watching():
        run.beat = watchdog.beat
        try:
            yield
        except BaseException:
            if read_failure(stop.paths.failure(stop.attempt)).get("type") == StuckError.__name__:
                run.spans.hang(watchdog.silent_s)  # this rank waited for the stuck one, which has left
            raise


def _device(config: TrainConfig, env: RankEnv) -> torch.device:
    hardware = config.hardware
    try:
        return kind_of(hardware.device_type).device(env.local_rank)
    except HpcTrainerError as error:
        raise type(error)(
            f"hardware={hardware.name} computes on {hardware.device_type}, which {env.node} has not: {error} Use "
            "hardware=cpu_x1, or a node that has it."
        ) from error


def _fail(error: BaseException, stop: Stop, recorder: FlightRecorder) -> NoReturn:
    """Record the error, and exit at once: the process group is broken, so nothing may wait for it."""
    traceback.print_exception(error)
    if not isinstance(error, (StuckError, ConfigError)):  # a hang is recorded; a wrong configuration did nothing
        recorder.write("it failed", error)
    if is_lost_peer(error):
        lost = PeerLostError(
            f"lost another rank: it was killed, or its node failed (its log says more, if it could write). {error}"
        )
        error = lost.with_traceback(error.__traceback__)
    record = record_of_error(stop, error)
    if is_out_of_memory(error):
        record |= {"cause": OUT_OF_MEMORY, "memory": getattr(error, "memory", {})}
    try:
        conclude_error(stop, record)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(record["exit_code"])  # whatever happens: a full disk must not keep the allocation
