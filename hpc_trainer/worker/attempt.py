"""One attempt of one rank: build its context, train, and turn how it ended into a journal record and an exit code."""

from __future__ import annotations

import os
import sys
import time
import traceback
from functools import partial
from typing import Any, NoReturn

import torch

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ExitCode, HpcTrainerError
from hpc_trainer.runs.files import read_json, write_json
from hpc_trainer.runs.journal import Journal
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.states import CANCEL, DONE, RunState
from hpc_trainer.runtime.process_group import StoppedWhileStarting, process_group
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import NoProgressError, Outcome, RunContext
from hpc_trainer.training.tracker import build_tracker
from hpc_trainer.worker.call_main import run_main
from hpc_trainer.worker.conclude import Stop, conclude_start, conclude_stop


def run_attempt(config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, attempt: int) -> int:
    """Trains as one rank and returns the exit code; an error ends the process here, the other ranks follow."""
    journal = Journal(paths)
    if env.rank == 0:
        journal.start(
            attempt,
            job_id=env.job_id,
            restart_count=env.restart_count,
            node=env.node,
            pid=os.getpid(),
            executor=env.launcher,
            world_size=env.world_size,
        )

    def ended(saved_step: int | None) -> Stop:
        return Stop(config=config, paths=paths, env=env, flag=stop, attempt=attempt, saved_step=saved_step)

    try:
        device = _device(config, env)
        torch.set_num_threads(config.hardware.cpus_per_rank)  # the number of threads decides the order of sums
        with process_group(
            env,
            device,
            rendezvous=paths.rendezvous,
            address=config.cluster.master_addr,
            timeout_s=config.parallel.timeout_s,
            should_stop=lambda: stop.is_set or paths.marker(CANCEL).exists(),
            has_failed=lambda: paths.failure(attempt).exists(),
        ) as group:
            run = RunContext(
                paths=paths,
                env=env,
                group=group,
                stop=stop,
                store=CheckpointStore(
                    paths.checkpoints, group=group, keep_last=config.checkpoint.keep_last, attempt=attempt
                ),
                attempt=attempt,
                num_steps=config.train.num_steps,
                save_every_steps=config.checkpoint.every_steps,
                make_tracker=partial(build_tracker, config.tracker, paths.folder / "tensorboard"),
                heartbeat_every_s=config.monitor.heartbeat_every_s,
                max_no_progress=config.cluster.max_no_progress,
            )
            if run_main(config, run) is Outcome.done:
                if run.is_rank_zero:
                    journal.end(
                        attempt,
                        state=RunState.COMPLETED,
                        cause="done",
                        step=run.step,
                        saved_step=run.saved_step,
                    )
                code = ExitCode.OK
            else:
                code = conclude_stop(ended(run.saved_step), group)
        return code
    except StoppedWhileStarting:
        return conclude_start(ended(None))
    except BaseException as error:  # SystemExit too: code that calls sys.exit(0) has not completed the run
        if paths.marker(DONE).exists():
            # Rank 0 wrote it after everything was saved: only the farewell went wrong (a peer left first).
            traceback.print_exc()
            return ExitCode.OK
        _fail(error, paths, env, attempt)


def _device(config: TrainConfig, env: RankEnv) -> torch.device:
    if config.hardware.device_type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise HpcTrainerError(
            f"hardware={config.hardware.name} asks for GPUs and torch sees none on {env.node} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Use hardware=cpu_x1, or a GPU node."
        )
    # Where Slurm binds one GPU to each task, every rank sees a single device 0.
    return torch.device("cuda", env.local_rank % count)


def _fail(error: BaseException, paths: RunPaths, env: RankEnv, attempt: int) -> NoReturn:
    """Records the error and exits at once: the process group is broken, so nothing may wait for it."""
    traceback.print_exc()
    record: dict[str, Any] = {
        "rank": env.rank,
        "node": env.node,
        "type": type(error).__name__,
        "message": str(error)[:2000],
        "traceback": traceback.format_exc()[-8000:],
        "time": time.time(),
    }
    code = error.exit_code if isinstance(error, HpcTrainerError) else ExitCode.FAILED
    code = ExitCode.CONFIG if code is ExitCode.USAGE else code
    if isinstance(error, NoProgressError):
        code = ExitCode.NO_PROGRESS
    try:
        first = _first_failure(paths, attempt, record)
        if env.rank == 0:
            cause = "no_progress" if isinstance(error, NoProgressError) else "exception"
            Journal(paths).end(attempt, state=RunState.FAILED, cause=cause, error=first)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(int(code))  # whatever happens: a full disk must not keep the allocation


def _first_failure(paths: RunPaths, attempt: int, record: dict[str, Any]) -> dict[str, Any]:
    """Keeps the first failing rank's error; later ones are mostly its echo (connection closed by peer)."""
    path = paths.failure(attempt)
    mine = path.with_name(f".{path.name}.{record['rank']}.tmp")
    write_json(mine, record)
    try:
        os.link(mine, path)  # fails if there is one: the first stays
    except OSError:
        return read_json(path) or record
    finally:
        mine.unlink(missing_ok=True)
    return record
