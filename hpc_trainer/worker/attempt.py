"""One attempt of one rank: build its context, call `main(config, run)`, and record how it ended.

`main` is the shared loop or the function that `train.main` names; both are called in the same way. Event files of a
tracker are beside metrics.jsonl. The end becomes a journal record and an exit code.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, but not to type checkers

from hpc_trainer.config.load import hyperparameters, to_plain
from hpc_trainer.config.packages import missing_package
from hpc_trainer.config.resume_contract import flatten
from hpc_trainer.config.schema.output import SaveEvery, TrackerName, best_is_max
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.declarations import num_threads
from hpc_trainer.config.targets import locate
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, ExitCode, HpcTrainerError, PeerLostError, RankEnvError, StuckError
from hpc_trainer.record.checkpoint_folders import Retention
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import Journal, read_failure
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import Kind
from hpc_trainer.record.reading import Watch, is_there, names_in, read_json
from hpc_trainer.record.rungs import pause_step
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.states import CANCEL, DONE, OUT_OF_MEMORY, RUNG, RunState
from hpc_trainer.runtime.cores import bind_rank
from hpc_trainer.runtime.devices import is_out_of_memory, kind_of
from hpc_trainer.runtime.pace import SaveTimer, job_end_time
from hpc_trainer.runtime.rank_env import PROBE_VARIABLE, RankEnv
from hpc_trainer.runtime.rank_group import RankGroup, is_lost_peer
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.runtime.watchdog import SHORTEST_S, Watchdog
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import Outcome, RunContext
from hpc_trainer.training.contract import ResumeContract
from hpc_trainer.training.loop import train
from hpc_trainer.training.reporter import NoTracker, SupersededError, Tracker
from hpc_trainer.training.rng import seed_everything
from hpc_trainer.worker.begin import begin_attempt, check_goodput, recording, sampled
from hpc_trainer.worker.conclude import LateStop, Stop, conclude_error, conclude_start, conclude_stop, record_of_error
from hpc_trainer.worker.line import Canary, end_well, tell_end


class TensorBoardTracker:
    """Event files in `folder`; steps after `first_step` of earlier attempts are superseded (purge_step)."""

    def __init__(self, folder: Path, first_step: int, hparams: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter, summary

        self._writer = cast("Any", SummaryWriter(str(folder), purge_step=first_step + 1))
        summaries: Any = summary.hparams
        shown = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in hparams.items()}
        for event in summaries(shown, {}):  # SummaryWriter.add_hparams would make a folder of its own
            self._writer.file_writer.add_summary(event)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add each value as a scalar."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def build_tracker(config: TrainConfig, folder: Path, first_step: int) -> Tracker:
    """Return a tracker that writes into `folder`, or one that does nothing, by `tracker=`. Call this on rank 0 only.

    Raises:
        ConfigError: the tracker's package is not installed.
    """
    if config.tracker.name is not TrackerName.tensorboard:
        return NoTracker()
    missing = missing_package(config.tracker.name)
    if missing is not None:
        raise ConfigError(f"{missing}, or tracker=none.")
    return TensorBoardTracker(folder, first_step, flatten(hyperparameters(to_plain(config))))


Main = Callable[[TrainConfig, RunContext], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacements:
    """Replacements for parts of a rank whose run is tested; the defaults are those of an ordinary run."""

    context: Callable[..., RunContext] = RunContext
    main: Main | None = None
    """Loop in place of the run's own."""


def find_replacements(config: TrainConfig) -> Replacements:
    """Return the replacements by the module that `PROBE_VARIABLE` names; none without this variable.

    Raises:
        ConfigError: the variable does not name a module of this package.
    """
    name = os.environ.get(PROBE_VARIABLE)
    if name is None:
        return Replacements()
    if not name.startswith("hpc_trainer."):
        raise ConfigError(f"{PROBE_VARIABLE}={name} must name a module of hpc_trainer. Unset it.")
    replacements: Replacements = importlib.import_module(name).replacements(config)
    return replacements


def run_main(config: TrainConfig, run: RunContext) -> Outcome:
    """Run the loop to its end, or to an agreed stop, and return which of them was reached. Collective.

    Raises:
        ConfigError: `train.main` is not trusted, does not exist, or cannot be called.
        LoopError: main broke a rule of RunContext.
        Exception: any error that main raises.
    """
    main = find_main(config)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=False)
    # Trying cuDNN's kernels for a new shape costs the first step a second or more, and may round differently each time.
    torch.backends.cudnn.benchmark = not config.train.deterministic
    seed_everything(config.seed, run.rank)
    try:
        main(config, run)
    except BaseException:
        run.tell_last()
        raise
    finally:
        run.spans.rest(Kind.shutdown)
        run.close()
    return run.conclude(config.train.main or "the shared loop")


def find_main(config: TrainConfig) -> Main:
    """Return the loop of this configuration. Raises ConfigError as `run_main` does."""
    name = config.train.main
    replacement = find_replacements(config).main
    if replacement is not None:
        return replacement
    if name is None:
        return train
    target = locate("train.main", name, config.trust)
    if not callable(target):
        raise ConfigError(f"train.main={name} must be a function main(config, run), not {type(target).__name__}.")
    main: Main = target
    return main


class Recorder(Protocol):
    """Recorder of a rank's last moments, which a domain contributes (hook `recorders`)."""

    run: RunContext | None
    """Context of the run; None until it exists."""

    def write(self, why: str, error: BaseException | None = None) -> None:
        """Record the present moment, with `why` as the reason. Any thread may call this; it raises nothing."""

    def look(self, silent_s: float) -> None:
        """Check, in the watchdog's thread, if there is a reason to record; `silent_s` as in `Watchdog`."""


@dataclass(frozen=True, slots=True)
class Recorders:
    """Recorders of all domains, for one rank of one attempt."""

    recorders: Sequence[Recorder]

    def follow(self, run: RunContext) -> None:
        """Give the recorders the context of the run."""
        for recorder in self.recorders:
            recorder.run = run

    def write(self, why: str, error: BaseException | None = None) -> None:
        """Call `Recorder.write` of each."""
        for recorder in self.recorders:
            recorder.write(why, error)

    def look(self, silent_s: float) -> None:
        """Call `Recorder.look` of each."""
        for recorder in self.recorders:
            recorder.look(silent_s)


def run_attempt(config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, attempt: int, spans: Spans) -> int:
    """Train as one rank, and return the exit code; an error ends the process here, and the other ranks follow."""
    journal = begin_attempt(paths, env, attempt)
    run: RunContext | None = None

    def spent() -> tuple[int, Mapping[str, Any]]:
        return (0, spans.spent(0)) if run is None else (run.step, run.spent(run.step))

    def ended(saved_step: int | None) -> Stop:
        return Stop(config=config, paths=paths, env=env, flag=stop, attempt=attempt, saved_step=saved_step, spent=spent)

    recorder = Recorders([make(ended(None), spans) for make in contributions("recorders")])
    try:
        device = _device(config, env)
        _use_cores(config, env)
        with contextlib.ExitStack() as stack:
            with spans.within(Kind.rendezvous):
                group = stack.enter_context(_all_ranks(config, paths, env, stop, attempt, device))
            check_goodput(config, paths, journal.read() if env.rank == 0 else [], group)
            run = _context(config, paths, env, stop, attempt, group, journal, spans)
            recorder.follow(run)
            gpu = kind_of(device).names(device)
            with (
                _watched(run, ended(None), recorder),
                sampled(config, paths, env, attempt, stop, step=lambda: run.step, gpu=gpu),
                recording(
                    config, paths, env, attempt, stop, has_begun=lambda: run.step > run.first_step,
                    facts=run.contract.recorded,
                ),
            ):  # fmt: skip
                outcome = run_main(config, run)
            if outcome is Outcome.stopped:
                return conclude_stop(ended(run.saved_step), group)
            if run.is_rank_zero:
                _record_end(ended(None), journal, run, outcome)
            return ExitCode.OK
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


def _use_cores(config: TrainConfig, env: RankEnv) -> None:
    """Bind this rank to its cores if `hardware.bind_cores` says so, and set the number of torch's threads."""
    bound = bind_rank(env, config.hardware.cpus_per_rank) if config.hardware.bind_cores else None
    if bound is not None:
        print(f"bound to cores {', '.join(map(str, sorted(bound)))} of {env.node}.")
    torch.set_num_threads(num_threads(config))


def _all_ranks(
    config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, attempt: int, device: torch.device
) -> contextlib.AbstractContextManager[RankGroup]:
    """Return the process group of the attempt; entering it waits for all ranks, and ends at a stop or a cancel."""
    is_cancelled = Watch(paths.marker(CANCEL))
    return process_group(
        env,
        device,
        rendezvous=paths.rendezvous,
        address=config.cluster.master_addr,
        timeout_s=config.parallel.timeout_s,
        should_stop=lambda: stop.is_set or is_cancelled.has_come(),
        has_failed=Watch(paths.failure(attempt)).has_come,
    )


def _record_end(stop: Stop, journal: Journal, run: RunContext, outcome: Outcome) -> None:
    """Record on rank 0 that the run is complete, or paused at a rung of its search."""
    is_paused = outcome is Outcome.paused
    state = RunState.PAUSED if is_paused else RunState.COMPLETED
    stop.tell_spent()
    journal.end(
        stop.attempt, state=state, cause=RUNG if is_paused else run.cause, step=run.step, saved_step=run.saved_step
    )
    end_well(stop.paths, stop.config.cluster.stop_after_alike)
    tell_end(stop.config, stop.paths, state, run.cause)


def _context(
    config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, attempt: int, group: RankGroup,
    journal: Journal, spans: Spans,
) -> RunContext:  # fmt: skip
    """Return the context that the loop gets in this attempt."""
    checkpoint = config.checkpoint
    return find_replacements(config).context(
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
        pause_step=group.broadcast(
            pause_step(config.search.rungs, names_in(paths.folder) or ()) if env.rank == 0 else None
        ),
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
def _watched(run: RunContext, stop: Stop, recorder: Recorders) -> Iterator[None]:
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

    canary = Canary(stop.paths, is_rank_zero=run.is_rank_zero)
    late = LateStop(
        stop,
        lambda: run.saver.standing_step,
        leave=lambda: recorder.write("it ended without a save, before Slurm would kill it"),
    )

    def look(silent_s: float) -> None:
        recorder.look(silent_s)
        late.look(silent_s)
        canary.look(run.step - run.first_step, lambda: run.saver.standing_step)

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
    kind = kind_of(hardware.device_type)
    try:
        device = kind.device(env.local_rank)
    except HpcTrainerError as error:
        raise type(error)(
            f"hardware={hardware.name} computes on {hardware.device_type}, which {env.node} lacks: {error} Use "
            "hardware=cpu_x1, or a node that has it."
        ) from error
    kind.take_share(device, env.per_gpu)
    return device


def _fail(error: BaseException, stop: Stop, recorder: Recorders) -> NoReturn:
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


# Process group of the ranks of one attempt: rank 0 listens on a port that the system chooses.
#
# Rank 0 writes its address into the run folder, so no port is ever guessed. Array elements on one node cannot collide,
# and a restart does not wait for the port of the previous attempt.

LOOPBACK = "127.0.0.1"
_POLL_S = 0.02
_SLOWEST_POLL_S = 0.5
_CONNECT_TIMEOUT = datetime.timedelta(seconds=3)

# Rank 0 may be slower to import torch than the others.
_RANK_ZERO_GRACE_S = 15.0


@contextlib.contextmanager
def process_group(
    env: RankEnv,
    device: torch.device,
    *,
    rendezvous: Path,
    address: str | None,
    timeout_s: int,
    should_stop: Callable[[], bool] = lambda: False,
    has_failed: Callable[[], bool] = lambda: False,
) -> Iterator[RankGroup]:
    """Yield the group of all ranks, and destroy the group at the end; collective.

    Args:
        rendezvous: file on the shared file system, replaced by rank 0 at each attempt.
        address: address at which rank 0 listens; None for loopback on one node, else rank 0's host name.
        timeout_s: seconds to wait for the other ranks, here and in every collective.
        should_stop: called while waiting for the others; True on one rank stops all ranks.
        has_failed: called by rank 0 while waiting; True once any rank has failed and will not come.

    Raises:
        StoppedWhileStarting: a stop was requested before all ranks were there; all ranks raise this.
        RankEnvError: the other ranks, or the address of rank 0, did not come in time.
    """
    if env.world_size == 1:
        yield RankGroup(rank=0, world_size=1, device=device)
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    address = address or (LOOPBACK if env.num_nodes == 1 else socket.gethostname())
    if env.rank == 0:
        store = _listen(env, rendezvous, address, timeout)
        _gather_all(env, store, timeout_s, should_stop, has_failed)
    else:
        store = _connect(env, rendezvous, timeout, should_stop)
        _report(env, store, timeout_s, should_stop)
    kind = kind_of(device)
    kind.select(device)
    dist.init_process_group(
        kind.backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    yield RankGroup(rank=env.rank, world_size=env.world_size, device=device)
    # DDP's reducer, if it is in a reference cycle, must be freed before the group. As the last holder of the group it
    # would wait for gloo's threads with Python's lock held, for which one of them may wait (torch 2.13, Reducer's
    # destructor: 1 of 60 ends).
    gc.collect()
    # Not in a finally: a failing rank must not wait here for the others, its exit is what ends them.
    dist.destroy_process_group()


class StoppedWhileStarting(Exception):  # noqa: N818  (no error: an answer)
    """Stop that was requested before all ranks were there."""


def _gather_all(
    env: RankEnv, store: TCPStore, timeout_s: int, should_stop: Callable[[], bool], has_failed: Callable[[], bool]
) -> None:
    """Wait as rank 0 until every rank has reported, then tell all of them to start, or to stop.

    init_process_group would wait too, but inside C++, where signals are not handled for up to `timeout_s` seconds.
    """
    ready = [f"ready/{rank}" for rank in range(1, env.world_size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(ready):
        if should_stop() or store.check(["wish"]):
            store.set("word", "stop")
            time.sleep(1.0)  # the store ends with this process: the others must read "stop" before
            raise StoppedWhileStarting
        if has_failed():
            raise RankEnvError("another rank failed before all had met; its error is in this attempt's failure.json.")
        if time.monotonic() > deadline:
            raise RankEnvError(f"rank 0 waited {timeout_s} s for the other ranks of {env.incarnation} in vain.")
        time.sleep(_POLL_S)
    store.set("word", "go")


def _report(env: RankEnv, store: TCPStore, timeout_s: int, should_stop: Callable[[], bool]) -> None:
    """Report another rank to rank 0, pass on a request to stop, and wait for rank 0's decision."""
    store.set(f"ready/{env.rank}", "1")
    deadline = time.monotonic() + timeout_s
    while not store.check(["word"]):
        if should_stop():
            store.set("wish", "1")
        if time.monotonic() > deadline:
            raise RankEnvError(f"rank {env.rank} waited {timeout_s} s for rank 0 of {env.incarnation} in vain.")
        time.sleep(_POLL_S)
    if store.get("word") == b"stop":
        raise StoppedWhileStarting


def _listen(env: RankEnv, rendezvous: Path, address: str, timeout: datetime.timedelta) -> TCPStore:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # The store has no password: on one node it is reachable from that node only.
    listener.bind((address if address == LOOPBACK else "", 0))
    listener.listen(env.world_size)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        env.world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    write_json(rendezvous, {"incarnation": env.incarnation, "address": address, "port": port})
    return store


def _connect(env: RankEnv, rendezvous: Path, timeout: datetime.timedelta, should_stop: Callable[[], bool]) -> TCPStore:
    begin = time.monotonic()
    deadline = begin + timeout.total_seconds()
    place: dict[str, object] | None = None
    pause_s = _POLL_S
    while place is None or place.get("incarnation") != env.incarnation:
        if should_stop() and time.monotonic() - begin > _RANK_ZERO_GRACE_S:
            # Rank 0 got the signal too, or is dead: it will not come any more, and decides, if at all, without us.
            raise StoppedWhileStarting
        if time.monotonic() > deadline:
            raise RankEnvError(
                f"rank {env.rank} waited {timeout.total_seconds():.0f} s for rank 0 to write {rendezvous} for "
                f"attempt {env.incarnation}; it holds {json.dumps(place)}. Is the run folder on a shared file system?"
            )
        time.sleep(pause_s)
        # 500 ranks that wait for rank 0 must not ask the file server 25,000 times a second.
        pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
        with contextlib.suppress(OSError):
            look_anew(rendezvous.parent, parents=0)
        place = read_json(rendezvous)
    host, port = str(place["address"]), int(str(place["port"]))
    while True:
        try:
            # Short waits: the store's constructor does not handle signals, and rank 0 may have left again.
            store = TCPStore(host, port, env.world_size, False, _CONNECT_TIMEOUT, wait_for_workers=False)
        except (RuntimeError, ValueError):  # noqa: PERF203  (each round waits for seconds)
            if should_stop():
                raise StoppedWhileStarting from None
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
        else:
            store.set_timeout(timeout)
            return store
