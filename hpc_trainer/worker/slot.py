"""Slot of a pool: one job that works through runs, one in each of its places. No torch unless a run needs it.

    python -m hpc_trainer.worker --sweep-dir DIR --pool UUID

The slot takes the next run that no slot has (record/turns.py), forks a process for each of its ranks, and waits until
they end. So Python starts and imports once a job, not once a run. The slot ends when no run is left to take. If it has
to stop, or the time left is too short for another run, its runs save and go back to the pool, and the slot requeues its
own job once (worker/conclude.py). A `RunSource` supplies the next run.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import ctypes
import dataclasses
import functools
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, ExitCode, RunStateError, SlurmError
from hpc_trainer.record.files import age_on_server_s, remove, set_umask
from hpc_trainer.record.journal import Attempt, Journal
from hpc_trainer.record.last_words import NOT_STARTED
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.processes import is_alive, open_pidfd, process_name
from hpc_trainer.record.reading import is_storage_error, is_there, names_in
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.spec import RunSpec, read_specs
from hpc_trainer.record.states import CANCEL, DONE, HOLD, KILLED, LEAVING, NO_SERVICE, POOL, RunState
from hpc_trainer.record.submissions import Submission, read_submissions
from hpc_trainer.record.turns import Holder, Turn, TurnEnd, Turns, pool_job, read_turn, slot_folder, slot_name
from hpc_trainer.runtime.cores import shares
from hpc_trainer.runtime.pace import DEADLINE, JOB_START, job_end_time
from hpc_trainer.runtime.rank_env import RankEnv, named_gpus, read_rank_env
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.stop import StopFlag, stop_signals_held_back
from hpc_trainer.slurm import terms
from hpc_trainer.slurm.queue import LATE_ROW_S, QueueEntry, is_of, read_queue
from hpc_trainer.worker.conclude import Stop, conclude_start
from hpc_trainer.worker.mps import Service, start_service

_PR_SET_PDEATHSIG = 1  # prctl(2)
# Seconds between looks for runs that other slots gave back, while a place of this slot is free and another works.
_AGAIN_S, _LONGEST_AGAIN_S = 30.0, 600.0
_IDLE_S = 5.0
# Seconds without a change of a run's heartbeat after which a slot that has other work asks Slurm for the run's slot.
_SILENT_S = 120.0
# A slot may begin so many seconds before the record of its pool is written for the last time.
_CONFIRMED_S = 120.0
# Seconds between looks for holds of the runs at work (`hold --save`).
_HOLD_LOOK_S = 5.0
# Longest wait for the end of a process before the stop flag is looked at again.
_WAIT_S = 1.0
# Seconds that a run must have besides the stop's lead, if no duration is known: a start of Python and torch.
_START_S, _START_PROGRAM_S = 30.0, 2.0


RunTurn = Callable[[SweepPaths, RunSpec, RankEnv, StopFlag, Spans, TrainConfig | None], int]
"""`worker.rank.run_turn`, which is passed on because that file imports this one."""


class RunSource(abc.ABC):
    """Source of a slot's runs. One slot has one; other slots of the pool have their own, in other processes.

    All shared state is in the sweep's folder: claims (`Turns.take`) decide which slot has which run.
    """

    def __init__(self, sweep: SweepPaths, pool: Submission) -> None:
        self._sweep, self._pool = sweep, pool
        self._order: dict[str, int] = {}
        self._missing: dict[str, float] = {}

    @property
    @abc.abstractmethod
    def template(self) -> RunSpec:
        """A run whose shape, environment, time limit and budgets are those of all runs."""

    @abc.abstractmethod
    def next_run(self, turns: Turns, place: int) -> tuple[RunSpec, Turn] | None:
        """Claim the next run for a place of this slot by `turns.take`, and return it; None if none can be had now."""

    @abc.abstractmethod
    def is_empty(self, turns: Turns) -> bool:
        """Return True if this slot can never take a run again: the slot then ends.

        Runs of other living slots do not count; runs that this slot has given back do.
        """

    def is_last_look(self, turns: Turns, paths: RunPaths) -> bool:
        """Return True if a slot whose source is empty may end; `paths` is the slot's folder."""
        return True

    def _may_take(self, run_id: str, turns: Turns, queue: Queue) -> bool:
        number = turns.newest.get(run_id)
        if number is None:
            return not is_held(self._sweep, run_id)
        end = turns.end_of(run_id)
        if end is not None:
            return self._is_given_back(end) and not is_held(self._sweep, run_id)
        turn = read_turn(self._sweep, run_id, number, turns.faults)
        if turn is None:
            return self._is_older(turns.path(run_id)) and not is_held(self._sweep, run_id)
        if turns.holder is None or self._is_later(turn.holder.uuid) or is_held(self._sweep, run_id):
            return False
        is_on_slurm = turn.holder.job_id[:1].isdecimal() and turn.holder.slot != turns.holder.slot
        if is_on_slurm and turns.has_own and turns.shows_life(run_id, self._silent_s):
            return False
        if not _is_left(self._sweep, turn, turns.holder, queue):
            return False
        return not _settle(self._sweep, turn, turns)

    @property
    def _silent_s(self) -> float:
        every_s: float = self.template.config["monitor"]["heartbeat_every_s"]
        return max(_SILENT_S, 10 * every_s)

    def _is_older(self, path: Path) -> bool:
        """Return True if a claim that cannot be read is older than this pool, by the clock of the file server.

        `submit` lists only runs that no slot has: a slot of an earlier pool, which is gone, made the claim.
        """
        own = self._sweep.intents / f"{self._pool.uuid}.json"
        try:
            return age_on_server_s(path) > age_on_server_s(own) + _CONFIRMED_S
        except OSError:
            return False

    def _is_given_back(self, end: TurnEnd) -> bool:
        """Return True if the run may continue in this pool after this end."""
        return not self._is_later(end.uuid) and not (end.is_final and end.uuid == self._pool.uuid)

    def _is_later(self, uuid: str) -> bool:
        """Return True if a submission is unknown or newer than this pool: its run then belongs to it."""
        own = self._order.get(self._pool.uuid, len(self._order))
        return uuid != self._pool.uuid and self._order.get(uuid, len(self._order)) >= own

    def _is_open(self, run_id: str, turns: Turns) -> bool:
        if run_id not in turns.newest:
            return not is_held(self._sweep, run_id)
        end = turns.end_of(run_id)
        if end is not None:
            return self._is_given_back(end) and not is_held(self._sweep, run_id)
        turn = read_turn(self._sweep, run_id, turns.newest[run_id], turns.faults)
        return turn is not None and turns.holder is not None and turn.holder.slot == turns.holder.slot


class ListedRuns(RunSource):
    """Runs that the pool's submission lists, in its order; then those that were given back or that a dead slot left.

    Of N slots each begins with every N-th run, so that slots seldom reach for the same one: each time they do, a folder
    with a name for each run that was taken has to be listed.
    """

    def __init__(self, sweep: SweepPaths, pool: Submission, specs: dict[str, RunSpec], element: int = 0) -> None:
        super().__init__(sweep, pool)
        self._specs = {run_id: specs[run_id] for run_id in pool.run_ids if run_id in specs}
        if not self._specs:
            raise RunStateError(f"{sweep.specs} holds none of the {len(pool.run_ids)} runs of this pool.")
        run_ids, slots = list(self._specs), max(1, pool.slots)
        # Of another slot's share the last run first: the other slot gets there last.
        others = [run_id for step in range(1, slots) for run_id in reversed(run_ids[(element + step) % slots :: slots])]
        self._fresh = [*run_ids[element % slots :: slots], *others][::-1]
        self._num_others = len(others)

    @property
    def template(self) -> RunSpec:
        """The first run: all runs of a pool have one shape and one environment."""
        return next(iter(self._specs.values()))

    def next_run(self, turns: Turns, place: int) -> tuple[RunSpec, Turn] | None:
        """Claim the first run that no slot has taken yet, else a run that was given back or left."""
        while self._fresh:
            if len(self._fresh) == self._num_others:
                turns.look()
            run_id = self._fresh.pop()
            if run_id in turns.newest or is_held(self._sweep, run_id):
                continue
            turn = turns.take(run_id, place)
            if turn is not None:
                return self._specs[run_id], turn
            turns.look()  # another slot is ahead of this one
        turns.look()
        self._order = {submission.uuid: number for number, submission in enumerate(read_submissions(self._sweep))}
        queue = Queue(self._missing)
        for run_id in self._specs:
            if self._may_take(run_id, turns, queue):
                turn = turns.take(run_id, place)
                if turn is not None:
                    return self._specs[run_id], turn
        return None

    def is_empty(self, turns: Turns) -> bool:
        """Return True if each run has ended for good, or has a turn of another slot that may be alive."""
        return not is_unsure(self._missing) and not any(self._is_open(run_id, turns) for run_id in self._specs)


def is_held(sweep: SweepPaths, run_id: str) -> bool:
    """Return True if a hold keeps this run from starting; `Slot` checks the hold of the whole sweep."""
    return is_there(sweep.run(run_id).marker(HOLD))


class Queue:
    """Slurm's queue, asked at most once for all runs of one look.

    Args:
        missing: job id -> monotonic time of the slot's first look whose answer had no such job; looks share it.
    """

    def __init__(self, missing: dict[str, float]) -> None:
        self._missing = missing
        self._entries: dict[str, QueueEntry] | None = None
        self._is_asked = False

    def has_ended(self, holder: Holder) -> bool:
        """Return True if Slurm says that the job of a slot does not work; False if it does, or if that is unknown.

        A job that is missing counts only if it was missing in a look `LATE_ROW_S` before.
        """
        if not self._is_asked:
            self._is_asked = True
            try:
                self._entries = read_queue()
            except SlurmError as error:
                print(f"whether job {holder.job_id} works is not known: {error}", flush=True)
        if self._entries is None:
            return False
        entry, now = self._entries.get(holder.job_id), time.monotonic()
        if entry is not None and is_of(entry, holder.uuid):
            self._missing.pop(holder.job_id, None)
            return entry.state in terms.NOT_BEGUN
        return now - self._missing.setdefault(holder.job_id, now) >= LATE_ROW_S


def is_unsure(missing: Mapping[str, float]) -> bool:
    """Return True if a job was missing for the first time a moment ago, so that a slot must look again."""
    return any(time.monotonic() - since < 2 * LATE_ROW_S for since in missing.values())


def _is_left(sweep: SweepPaths, turn: Turn, own: Holder, queue: Queue) -> bool:
    """Return True if the slot that has the turn is surely dead, and the run's process too."""
    holder = turn.holder
    if holder.slot == own.slot and holder.job_id == own.job_id:
        # Slurm starts one incarnation of a job at a time, and this is the newest one.
        return holder.restart_count < own.restart_count
    if holder.job_id[:1].isdecimal():
        return holder.cluster == own.cluster and queue.has_ended(holder)
    if is_alive(holder.process) is not False:
        return False
    attempt = _attempt_of(sweep.run(turn.run_id), turn)
    return attempt is None or attempt.has_ended or is_alive(attempt.process) is False


def _settle(sweep: SweepPaths, turn: Turn, turns: Turns) -> bool:
    """Record the end of a turn whose slot died before it could; return True if the run has ended for good."""
    paths = sweep.run(turn.run_id)
    look_anew(paths.folder)
    names = names_in(paths.folder) or ()
    if DONE in names:
        state = RunState.COMPLETED
    elif CANCEL in names:
        state = RunState.CANCELLED
    else:
        attempt = _attempt_of(paths, turn)
        if attempt is None or attempt.state is None or attempt.state.needs_submit or attempt.state.is_active:
            return False
        state = attempt.state
    turns.end(turn, state)
    return True


def _attempt_of(paths: RunPaths, turn: Turn) -> Attempt | None:
    """Return the attempt of a turn, by its journal; None if it has not begun."""
    key = turn.holder.job_id, turn.number
    return next((attempt for attempt in Journal(paths).read() if (attempt.job_id, attempt.restart_count) == key), None)


def source_of(sweep: SweepPaths, pool: Submission, element: int) -> RunSource:
    """Return the source of a slot's runs: that of a domain (hook `run_sources`), else the pool's listed runs."""
    specs = read_specs(sweep)
    if pool.source is not None:
        for make in contributions("run_sources"):
            source: RunSource | None = make(sweep, pool, specs)
            if source is not None:
                return source
        raise RunStateError(f"{sweep.folder}: the pool's runs come from {pool.source!r}, which is not installed here.")
    return ListedRuns(sweep, pool, specs, element)


@dataclass(slots=True, kw_only=True)
class _Place:
    """Place for one run in a slot, with the cores that no other place has; `ranks` are process ids.

    It has GPUs of its own, or with `pool.per_gpu` one GPU that it shares with the next places.
    """

    number: int
    gpus: tuple[str, ...] = ()
    cores: frozenset[int] = frozenset()
    spec: RunSpec | None = None
    turn: Turn | None = None
    ranks: dict[int, int] = field(default_factory=dict)
    """Process id -> pidfd of each rank that works; -1 if the kernel has none."""
    codes: list[int] = field(default_factory=list)
    is_told_to_stop: bool = False

    def stop(self) -> None:
        """Ask the run to save and exit, once."""
        if not self.is_told_to_stop:
            self.is_told_to_stop = True
            for pid in self.ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


class Slot:
    """Slot of a pool at work, in one incarnation of its job.

    Args:
        sweep: the sweep.
        pool: the pool's submission.
        element: number of the slot in the pool.
        env: place of this process.
        stop: flag that stop signals set.
        run_turn: function that runs one rank of a run in a new process, and returns its exit code.
    """

    def __init__(
        self, sweep: SweepPaths, pool: Submission, element: int, env: RankEnv, stop: StopFlag, run_turn: RunTurn
    ) -> None:
        self._sweep, self._stop, self._run_turn = sweep, stop, run_turn
        self._source = source_of(sweep, pool, element)
        self._config: TrainConfig = self._source.template.typed()
        set_umask(self._config.paths.group_readable)
        holder = Holder(
            uuid=pool.uuid, slot=slot_name(pool.uuid, element), job_id=env.job_id, restart_count=env.restart_count,
            node=env.node, process=process_name(), cluster=os.environ.get("SLURM_CLUSTER_NAME") or None,
        )  # fmt: skip
        self._paths = slot_folder(sweep, pool.uuid, element)
        self._turns = Turns(sweep, holder)
        self._env = env = dataclasses.replace(env, per_gpu=max(1, pool.per_gpu))
        self._places = _places(max(1, pool.per_node), self._source.template, element, env)
        self._is_closing = False
        self._looked_for_holds = time.monotonic()
        self._looked, self._again_s = -_LONGEST_AGAIN_S, _AGAIN_S / 2
        self._attempt = 0
        self._service: Service | None = None

    def run(self) -> int:
        """Work until nothing is left or the slot must stop; return the exit code of the job."""
        self._begin()
        try:
            if self._env.per_gpu > 1:
                gpus = [gpu for place in self._places for gpu in place.gpus]
                self._service = start_service(self._config.pool.mps, gpus)
        except ConfigError as error:
            print(error, file=sys.stderr, flush=True)
            record = {"type": type(error).__name__, "message": str(error)}
            Journal(self._paths).end(self._attempt, state=RunState.FAILED, cause=NO_SERVICE, error=record)
            return ExitCode.CONFIG
        try:
            return self._work()
        finally:
            if self._service is not None:
                self._service.stop()

    def _begin(self) -> None:
        """Record that the slot is at work."""
        self._turns.begin()
        remove(self._paths.marker(LEAVING))  # of an incarnation that was killed as it ended
        journal = Journal(self._paths)
        self._attempt = journal.attempt_number(self._env.job_id, self._env.restart_count)
        journal.start(
            self._attempt, job_id=self._env.job_id, restart_count=self._env.restart_count, node=self._env.node,
            pid=os.getpid(), executor=self._env.launcher, world_size=1,
        )  # fmt: skip

    def _work(self) -> int:
        self._preload()
        is_empty = False
        while True:
            self._fill()
            busy = [place for place in self._places if place.turn is not None]
            if busy:
                self._wait(busy)
            elif self._must_leave() or self._is_held():
                break
            elif not self._source.is_empty(self._turns):
                time.sleep(_IDLE_S)  # the source waits for what other slots find out
            else:
                self._turns.look()  # other slots may have ended or given back runs since the last look
                if self._source.is_empty(self._turns) and self._source.is_last_look(self._turns, self._paths):
                    is_empty = True
                    break
        return self._leave(is_empty=is_empty)

    def _preload(self) -> None:
        """Import modules and gather facts that every run needs, before the first fork, so that no run pays for them."""
        import psutil  # noqa: F401

        import hpc_trainer.worker.program
        from hpc_trainer.worker.begin import share_records

        codecs.lookup("idna")  # for the first socket
        for hook in ("samplers", "ends"):
            contributions(hook)
        share_records(self._config)
        if self._config.train.command is None:
            import hpc_trainer.worker.attempt  # noqa: F401  (with torch, which no process here has used yet)
        gc.collect()
        gc.freeze()  # a later collection would write into each page that the ranks share

    def _fill(self) -> None:
        """Give each free place a run, as long as there are runs and time for them."""
        free = [place for place in self._places if place.turn is None]
        is_busy = len(free) < len(self._places)
        if not free or (is_busy and time.monotonic() - self._looked < self._again_s):
            return
        if self._is_held():
            return
        for place in free:
            if self._must_leave():
                return
            claimed = self._source.next_run(self._turns, place.number)
            if claimed is None:
                # Each look may ask Slurm: a place that stays free asks ever less.
                self._looked, self._again_s = time.monotonic(), min(2 * self._again_s, _LONGEST_AGAIN_S)
                return
            place.spec, place.turn = claimed
            self._start(place)

    def _is_held(self) -> bool:
        """Return True if the sweep is held: the slot takes no run, and ends once those that it has are done."""
        return is_there(self._sweep.hold, parents=0)

    def _must_leave(self) -> bool:
        if not self._stop.is_set and is_there(self._paths.marker(CANCEL)):
            self._stop.request("CANCEL marker")
        if not self._stop.is_set and not self._is_closing and not self._has_time():
            print("the time left is too short for another run.", flush=True)
            self._is_closing = True
        return self._stop.is_set or self._is_closing

    def _has_time(self) -> bool:
        """Return True if the job has time for another run: a whole one if its duration is known and fits into a job."""
        shape = self._source.template.shape
        end_time = job_end_time(shape.time_limit_min)
        if end_time is None:
            return True
        least_s = _START_PROGRAM_S if self._config.train.command is not None else _START_S
        whole_s = self._turns.median_s or 0.0
        if whole_s < 60 * shape.time_limit_min - shape.signal_lead_s - least_s:
            least_s = max(least_s, whole_s)
        return end_time - time.time() - shape.signal_lead_s >= least_s

    def _start(self, place: _Place) -> None:
        """Fork one process for each rank of the place's run."""
        assert place.spec is not None
        place.codes, place.is_told_to_stop = [], False
        config: TrainConfig | None = None
        # A new process first copies each page in which it counts references: here it costs less.
        with contextlib.suppress(ConfigError):  # the rank meets the error too, and records it
            config = place.spec.typed()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(place.spec.shape.world_size):
            pid = _fork(functools.partial(self._run_rank, place, rank, config))
            place.ranks[pid] = open_pidfd(pid)

    def _run_rank(self, place: _Place, rank: int, config: TrainConfig | None) -> int:
        """Run one rank in its new process, and return its exit code."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        assert place.spec is not None
        assert place.turn is not None
        env = RankEnv(
            rank=rank, local_rank=rank, world_size=place.spec.shape.world_size,
            local_world_size=place.spec.shape.world_size, launcher=POOL, job_id=self._env.job_id,
            restart_count=place.turn.number, node=self._env.node, per_gpu=self._env.per_gpu,
        )  # fmt: skip
        if place.cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, place.cores)
        if place.gpus or place.spec.shape.gpus_per_node:
            names = {} if self._service is None else self._service.names
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names.get(gpu, gpu) for gpu in place.gpus)
            os.environ.update({} if self._service is None else self._service.variables)
        self._set_times()
        stop = StopFlag()
        stop.install()
        return self._run_turn(self._sweep, place.spec, env, stop, Spans(), config)

    def _set_times(self) -> None:
        """Tell a run when its job ends, and that its own time begins now: the time before is the slot's."""
        end_time = job_end_time(self._source.template.shape.time_limit_min)
        if end_time is not None:
            os.environ["SLURM_JOB_END_TIME"] = f"{end_time:.0f}"
            os.environ["SLURM_JOB_START_TIME"] = os.environ[JOB_START] = f"{time.time():.0f}"

    def _wait(self, busy: Sequence[_Place]) -> None:
        """Wait until a rank ends or a run has to stop, and conclude the turns whose ranks have all ended."""
        for place in busy if self._stop.is_set else self._held(busy):
            place.stop()
        descriptors = [fd for place in busy for fd in place.ranks.values() if fd >= 0]
        if len(descriptors) == sum(len(place.ranks) for place in busy):
            select.select(descriptors, [], [], _WAIT_S)
        else:
            time.sleep(0.05)
        for place in busy:
            for pid in list(place.ranks):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    descriptor = place.ranks.pop(pid)
                    if descriptor >= 0:
                        os.close(descriptor)
                    place.codes.append(os.waitstatus_to_exitcode(status))
            if not place.ranks:
                self._conclude(place)

    def _held(self, busy: Sequence[_Place]) -> list[_Place]:
        """Return the places whose runs were held while they work; [] if the last look was a moment ago."""
        now = time.monotonic()
        if now - self._looked_for_holds < _HOLD_LOOK_S:
            return []
        self._looked_for_holds = now
        return [place for place in busy if place.turn is not None and is_held(self._sweep, place.turn.run_id)]

    def _conclude(self, place: _Place) -> None:
        assert place.spec is not None
        assert place.turn is not None
        turn, place.turn = place.turn, None
        paths = self._sweep.run(turn.run_id)
        try:
            state = _state_after(paths, turn, place, self._env)
        except OSError as error:
            if not is_storage_error(error):
                raise
            print(f"how {turn.run_id} ended is not known: {error}", file=sys.stderr, flush=True)
            state = RunState.FAILED
        self._turns.end(turn, state)
        self._looked, self._again_s = -_LONGEST_AGAIN_S, _AGAIN_S / 2  # its place is free

    def _leave(self, *, is_empty: bool) -> int:
        """Record the slot's end, and requeue its job if the pool has runs for it; `is_empty` if it surely has none."""
        if not is_empty:
            self._turns.look()
        is_held = self._is_held()
        if is_held or is_empty or self._source.is_empty(self._turns):
            if is_held:
                print(f"{self._sweep.name} is held: this slot ends.", flush=True)
            Journal(self._paths).end(self._attempt, state=RunState.COMPLETED, cause="held" if is_held else "done")
            return ExitCode.OK
        self._stop.request(DEADLINE)  # unless a signal came: the time left is too short
        ended = Stop(
            config=self._config, paths=self._paths, env=self._env, flag=self._stop, attempt=self._attempt,
            saved_step=None,
        )  # fmt: skip
        return conclude_start(ended)


def _fork(work: Callable[[], int]) -> int:
    """Return the id of a new process that does the work and exits with the code that it returns."""
    with stop_signals_held_back():
        pid = os.fork()
        if pid:
            return pid
        code: int = ExitCode.FAILED
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(int(code))


def _places(count: int, spec: RunSpec, element: int, env: RankEnv) -> list[_Place]:
    """Return the places of a slot, each with its share of the GPUs and cores that the slot sees."""
    num_gpus, per_gpu = spec.shape.gpus_per_node, env.per_gpu
    of_slot = count * num_gpus // per_gpu
    named = named_gpus()
    is_local = not env.job_id[:1].isdecimal()
    first = element * of_slot if is_local else 0  # local slots share one machine
    gpus = (named or [str(index) for index in range(first + of_slot)])[first:]
    cores: list[list[int]] = [[] for _ in range(count)]
    if count > 1 and not is_local:
        own = sorted(os.sched_getaffinity(0))
        if len(own) >= count:
            cores = shares(own, count, 1)
    return [
        _Place(
            number=number, gpus=tuple(gpus[number // per_gpu * num_gpus :][:num_gpus]), cores=frozenset(cores[number])
        )
        for number in range(count)
    ]


def _state_after(paths: RunPaths, turn: Turn, place: _Place, env: RankEnv) -> RunState:
    """Return the state of a run whose ranks have all ended; record an end that they could not record themselves."""
    names = names_in(paths.folder) or ()
    if DONE in names:
        return RunState.COMPLETED
    if CANCEL in names:
        return RunState.CANCELLED
    attempt = _attempt_of(paths, turn)
    if attempt is not None and attempt.state is not None:
        return attempt.state
    if ExitCode.REQUEUED in place.codes:
        return RunState.PREEMPTED  # it saved, and had no room to record its end
    journal = Journal(paths)
    code = min(place.codes, default=0)
    if attempt is None and code == ExitCode.OK and HOLD in names:
        return RunState.HELD  # the hold came after the claim
    if attempt is not None:
        message = "the ranks ended without an error message: killed, or out of memory?"
        journal.end(attempt.attempt, state=RunState.FAILED, cause=KILLED, error={"message": message})
    elif code != ExitCode.OK:
        number = journal.attempt_number(env.job_id, turn.number)
        journal.start(
            number, job_id=env.job_id, restart_count=turn.number, node=env.node, pid=os.getpid(), executor=POOL,
            world_size=len(place.codes), per_gpu=env.per_gpu,
        )  # fmt: skip
        message = f"the worker ended with code {code} before the attempt began; its messages are in the slot's output"
        journal.end(number, state=RunState.FAILED, cause=NOT_STARTED, error={"message": message})
    return RunState.FAILED


def run_slot(sweep: SweepPaths, uuid: str, stop: StopFlag, run_turn: RunTurn, slots: int = 0) -> int:
    """Run one slot of a pool, or all `slots` of a local pool, and return the exit code."""
    pool = next((submission for submission in read_submissions(sweep) if submission.uuid == uuid), None)
    if pool is None:
        raise RunStateError(f"{sweep.folder} holds no pool {uuid}.")
    if slots:
        return _run_local(sweep, pool, stop, run_turn, slots)
    element = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
    return Slot(sweep, pool, int(element), read_rank_env(), stop, run_turn).run()


def _run_local(sweep: SweepPaths, pool: Submission, stop: StopFlag, run_turn: RunTurn, slots: int) -> int:
    """Fork the slots of a local pool, and wait for them; pass a stop signal on to each."""
    children = [_fork(functools.partial(_run_local_slot, sweep, pool, element, run_turn)) for element in range(slots)]
    is_passed_on, codes = False, []
    while children:
        if stop.is_set and not is_passed_on:
            is_passed_on = True
            for pid in children:
                os.kill(pid, signal.SIGTERM)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                codes.append(os.waitstatus_to_exitcode(status))
        time.sleep(0.1)
    return max(codes, default=0)


def _run_local_slot(sweep: SweepPaths, pool: Submission, element: int, run_turn: RunTurn) -> int:
    """Run one slot of a local pool in its new process, and return its exit code."""
    stop = StopFlag()
    stop.install()
    job_id = f"{pool_job(pool)}_{element}"
    env = RankEnv(launcher=POOL, job_id=job_id, restart_count=0, node=socket.gethostname())
    return Slot(sweep, pool, element, env, stop, run_turn).run()
