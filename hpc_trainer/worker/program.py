"""One rank of a run whose work is a user's program (`train.command`): its start, stop, end and metrics. No torch.

Rank 0 turns what the program logs into metrics.jsonl, heartbeat.json and, at the end, result.json.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.program import is_of_run
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ExitCode, NoProgressError, PeerLostError
from hpc_trainer.record.files import make_folder, write_json
from hpc_trainer.record.journal import Attempt, Journal, newest_chain, own_frame, successor_jobs, write_result
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import Kind
from hpc_trainer.record.metrics import MetricsLog, NewLines, Told, newest_metrics_in
from hpc_trainer.record.reading import Faults, Watch, names_in, read_json
from hpc_trainer.record.redaction import Redaction
from hpc_trainer.record.rungs import pause_step
from hpc_trainer.record.states import CANCEL, KILLED, POOL, RUNG, RunState
from hpc_trainer.record.tracebacks import last_error, last_traceback, with_causes
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.start import FROZEN_CODE
from hpc_trainer.runtime.stop import STOP_SIGNALS, StopFlag
from hpc_trainer.training.reporter import LifeSigns, SupersededError, cause_of_end
from hpc_trainer.worker.begin import begin_attempt, check_goodput, recording, sampled
from hpc_trainer.worker.conclude import (
    LateStop,
    Stop,
    conclude_error,
    conclude_start,
    exit_code_of,
    record_of,
    record_of_error,
)
from hpc_trainer.worker.line import end_well, tell_end
from hpc_trainer.worker.program_start import Program, environment_of, folder_of, meeting_place, one_line, words_of


class Story:
    """Progress of a user's program in one attempt; only rank 0 has one."""

    def __init__(
        self, config: TrainConfig, paths: RunPaths, env: RankEnv, attempt: int, stop: StopFlag,
        spent: Callable[[], dict[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self.step: int | None = None
        """Last step that the program logged; None if it has logged none yet."""
        self.steps_done = 0
        """Steps done since the first step that the program logged."""
        self._paths, self._attempt, self._world_size = paths, attempt, env.world_size
        self._lines = NewLines(paths.logged_metrics(attempt))
        self._metrics: dict[str, float] = {}
        self._metric, self._scored_step = config.search.metric, -1
        self._log = MetricsLog(paths.metrics)
        self._signs = LifeSigns(
            paths=paths, env=env, attempt=attempt, num_steps=config.train.num_steps,
            every_s=config.monitor.heartbeat_every_s, saves=SaveTimer(), stop=stop, spent=lambda step: spent(),
        )  # fmt: skip

    @property
    def is_at_end(self) -> bool:
        """True if the program has logged its last step."""
        return self.step is not None and 0 < self._signs.num_steps <= self.step

    def has_reached(self, rung: int, below: int) -> bool:
        """Return True if the program has a value of the search's metric at a rung, and need not be waited for.

        Args:
            rung: the rung.
            below: the rung below it; 0 for the first.
        """
        if self.step is None or self.step < rung:
            return False
        return self._scored_step >= rung or (self._scored_step > below and self.step > rung)

    def catch_up(self) -> None:
        """Take in the metrics that earlier attempts' programs logged and no worker has read, because it was killed.

        The program may have saved the step of these metrics. Then no later attempt logs that step again. An attempt
        that was killed before its program started has read nothing either, so all attempts count back to the newest
        one whose program logged something: that one began by catching up with those before it.
        """
        newest = max((record["step"] for record in newest_metrics_in(self._paths.metrics)), default=0)
        logged = (list(self._logged_in(number)) for number in range(self._attempt - 1, -1, -1))
        left: list[Told] = []
        for record in next((records for records in logged if records), []):
            while left and left[-1].step >= record.step:
                left.pop()
            left.append(record)
        for record in left:
            if record.step > newest and record.metrics:
                self._log.append(record.step, {**record.metrics, "time": time.time()}, sync=False)

    def _logged_in(self, attempt: int) -> Iterator[Told]:
        lines = NewLines(self._paths.logged_metrics(attempt))
        while batch := list(lines.read()):
            yield from batch

    def look(self, *, is_last: bool = False) -> None:
        """Take in the program's new metrics, and give a sign of life.

        Raises:
            SupersededError: a later attempt has begun.
        """
        for record in self._lines.read():
            self._take(record)
        if is_last:  # if the program failed, its lines since the last sign are nowhere else
            self._signs.every_s = 0.0
        self._signs.tell(self.step or 0)

    def _take(self, record: Told) -> None:
        if self.step is None:
            # The program goes on from its own checkpoint: later steps that were logged before are done again.
            self._log.rewind(max(0, record.step - 1))
            self._signs.start(record.step)
            Journal(self._paths).resume(self._attempt, record.step)
        elif record.step < self.step:
            self._log.rewind(max(0, record.step - 1))
        else:
            self.steps_done += record.step - self.step
        self.step = record.step
        if record.num_steps is not None:
            self._signs.num_steps = record.num_steps
        if record.metrics:
            if self._metric in record.metrics:
                self._scored_step = record.step
            self._metrics |= record.metrics
            self._signs.show(record.metrics)
            self._log.append(record.step, {**record.metrics, "time": time.time()}, sync=False)

    def conclude(self) -> str:
        """Write result.json and DONE once the program is done on all ranks, and return the cause for the journal."""
        step, metrics = self._all_logged()
        cause = cause_of_end(metrics, None)
        write_result(
            self._paths, step=step, num_steps=self._signs.num_steps, attempt=self._attempt,
            world_size=self._world_size, cause=cause, reason=None, metrics=metrics,
        )  # fmt: skip
        return cause

    def _all_logged(self) -> tuple[int, dict[str, float]]:
        """Return the last step and the newest value of each metric, also of those that only earlier attempts logged.

        A program that was stopped after its last step finds nothing to do in the next attempt, and logs nothing.
        """
        step, metrics = self.step, dict[str, float]()
        for record in newest_metrics_in(self._paths.metrics):
            step = record["step"] if self.step is None else step
            metrics |= {
                name: math.nan if value is None else value for name, value in record.items() if name not in _APART
            }
        return step or 0, {**metrics, **self._metrics}


_APART = ("step", "time")
"""Keys of a record of metrics.jsonl that are no metrics."""

ASKED = "exit 75"
"""Signal in the journal for a stop that the program itself asked for."""
_POLL_S = 0.1
# Seconds between looks at files that other ranks or commands write: with 512 ranks some 100 stats a second.
_LOOK_S, _LOOK_PER_RANK_S = 1.0, 0.03
# `cancel` signals programs at work too; the marker is for one that was just starting.
_CANCEL_LOOK_S = 5.0
# Processes that the program left behind when it ended get this many seconds, then SIGTERM, then SIGKILL.
_LEFT_BEHIND_S = 5.0
# Seconds for a program that ignores the signal, outside Slurm: Slurm has its KillWait for that, 30 s by default.
_DEAF_S = 30.0
_LAST_LINES, _LAST_BYTES = 25, 64_000
_OURS = str(Path(__file__).resolve().parents[1])
_COLOUR = re.compile(r"\x1b\[[0-9;:?]{0,60}[A-Za-z]")
# Seconds for a program to save at a rung. Nothing else ends it then, and a large checkpoint takes minutes.
_DEAF_AT_RUNG_S = 900.0
_STOPS = (*STOP_SIGNALS, signal.SIGINT)
_STARTS = "the program starts in "
"""Beginning of the log line before the program's output."""


class _PeerFailed(Exception):  # noqa: N818  (no error of this rank)
    """Failure of another rank of this attempt, which has recorded it."""


def run_program(config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, attempt: int, spans: Spans) -> int:
    """Run the program as one rank, and return the exit code of this rank."""
    journal = begin_attempt(paths, env, attempt)
    rank = _Rank(config, paths, env, stop, attempt, spans)
    try:
        if env.rank == 0:
            attempts = journal.read()
            _check_progress(attempts, successor_jobs(paths), config.cluster.max_no_progress)
            check_goodput(config, paths, attempts)
        with recording(config, paths, env, attempt, stop):
            return rank.run()
    except SupersededError as error:
        print(error)
        return ExitCode.REQUEUED
    except _PeerFailed:
        print("another rank has failed: this one ends.")
        lost = record_of(rank.as_stop, ExitCode.FAILED, type=PeerLostError.__name__, message="another rank has failed")
        conclude_error(rank.as_stop, lost)  # by the record of that rank
        return ExitCode.FAILED
    except Exception as error:
        traceback.print_exc()
        conclude_error(rank.as_stop, record_of_error(rank.as_stop, error))
        return exit_code_of(error)
    finally:
        rank.end_program()


def _check_progress(attempts: list[Attempt], successors: frozenset[str], most: int) -> None:
    """Raise NoProgressError if too many earlier starts ended at one step, or asked for a restart without any step."""
    ended = newest_chain(attempts, successors)[:-1]
    same = 0
    for attempt in reversed(ended):
        if attempt.step != ended[-1].step or (attempt.step is None and attempt.signal != ASKED):
            break
        same += 1
    if same > most:
        where = "without a reported step" if ended[-1].step is None else f"at step {ended[-1].step}"
        raise NoProgressError(
            f"the program ended {same} times in a row {where}, and cluster.max_no_progress={most}: it got no further, "
            "and is not started again. A program that reports its steps ($HPC_TRAINER_METRICS) is judged by them."
        )


class _Rank:
    """The program of one rank, from its start to its end."""

    def __init__(
        self, config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, attempt: int, spans: Spans
    ) -> None:
        self._config, self._paths, self._env, self._stop, self._attempt = config, paths, env, stop, attempt
        self._spans = spans
        self._story = Story(config, paths, env, attempt, stop, self._spent) if env.rank == 0 else None
        self._program: Program | None = None
        self._look_s = max(_LOOK_S, _LOOK_PER_RANK_S * env.world_size)
        self._looked, self._has_stopped = 0.0, False
        rungs = config.search.rungs
        self._rung = pause_step(rungs, names_in(paths.folder) or ()) if env.rank == 0 else None
        self._rung_below = max((rung for rung in rungs if self._rung is not None and rung < self._rung), default=0)
        self._is_cancelled = Watch(paths.marker(CANCEL), _CANCEL_LOOK_S)
        # Slurm ends the program of its own ranks, and of a slot, after KillWait.
        self._has_no_kill = env.launcher not in ("slurm", *([POOL] if env.job_id[:1].isdecimal() else []))
        self._late = LateStop(self.as_stop, lambda: self._step, leave=self._leave)

    @property
    def as_stop(self) -> Stop:
        """Facts about this attempt for its conclusion."""
        return Stop(
            config=self._config, paths=self._paths, env=self._env, flag=self._stop, attempt=self._attempt,
            saved_step=self._step, spent=lambda: (self._step or 0, self._spent()),
        )  # fmt: skip

    def _spent(self) -> dict[str, Any]:
        return self._spans.spent(0 if self._story is None else self._story.steps_done)

    @property
    def _step(self) -> int | None:
        return None if self._story is None else self._story.step

    def run(self) -> int:
        """Start the program, follow it to its end, and return the exit code of this rank."""
        with self._spans.within(Kind.rendezvous):
            place = meeting_place(self._config, self._paths, self._env, self._attempt, self._must_stop)
        if place is None or self._must_stop():
            return conclude_start(self.as_stop)
        for own in (self._paths.output, self._paths.own_checkpoints, self._paths.logged):
            make_folder(own)
        if self._story is not None:
            self._story.catch_up()
        folder = folder_of(self._config, self._paths)
        if is_of_run(self._config.train.command_dir):
            make_folder(Path(folder))
        command = words_of(self._config, self._paths, holding=place.holding)
        environ = environment_of(self._config, self._paths, self._env, self._attempt, place)
        print(f"{_STARTS}{folder}: {self._shown(command)}", flush=True)
        began = time.time()
        self._program = Program(command, environ, folder)
        with (
            self._spans.within(Kind.program),
            sampled(self._config, self._paths, self._env, self._attempt, self._stop, step=lambda: self._step),
        ):
            self._follow(self._program)
        self._spans.rest(Kind.shutdown)
        if self._env.local_rank == 0 and (written := written_beside_code(began)):
            more = f" and {len(written) - 1} more files" if len(written) > 1 else ""
            print(
                f"Note: the program wrote {written[0]}{more} beside its frozen code, on the disk of this node alone. "
                "They are not kept: let it write to {run.dir}."
            )
        code = self._program.code
        if self._story is not None:
            self._story.look(is_last=True)
        if code is not None and -code in _STOPS and not self._stop.is_set:
            time.sleep(1.0)  # some sites signal every process of a job: our signal comes in this moment
        if code == ExitCode.REQUEUED and not self._stop.is_set:
            self._stop.request(ASKED)
            self._tell_stop()
        if self._must_stop() and not self._has_ended_at_rung(code):
            print(f"the program ended with {_ending(code)} after {self._stop.signal_name}: it continues later.")
            return self._pause() if self._is_pausing else conclude_start(self.as_stop)
        if code != 0:
            self._fail(code)
            return ExitCode.FAILED
        return self._finish()

    @property
    def _is_pausing(self) -> bool:
        """True if the program is stopped because its trial pauses at a rung."""
        return self._stop.signal_name == RUNG

    def _is_at_rung(self) -> bool:
        """Return True if the program has a value at the rung at which its trial pauses."""
        if self._rung is None or self._story is None:
            return False
        return self._story.has_reached(self._rung, self._rung_below)

    def _has_ended_at_rung(self, code: int | None) -> bool:
        """Return True if the program did its last step before the stop signal of a rung reached it."""
        is_at_end = self._story is not None and self._story.is_at_end and self._env.world_size == 1
        return self._is_pausing and code == 0 and is_at_end

    def _pause(self) -> int:
        """Record that the run pauses at its rung, until the search promotes it."""
        if self._story is None:
            conclude_start(self.as_stop)  # it waits for the record of rank 0
            return ExitCode.OK
        if not names_in(self._paths.own_checkpoints):
            print("Note: nothing is in {run.checkpoints}: a promoted program begins at its first step.")
        self.as_stop.tell_spent()
        Journal(self._paths).end(
            self._attempt, state=RunState.PAUSED, cause=RUNG, step=self._step, saved_step=self._step
        )
        tell_end(self.as_stop.config, self._paths, RunState.PAUSED, RUNG)
        end_well(self._paths, self._config.cluster.stop_after_alike)
        return ExitCode.OK

    @staticmethod
    def _shown(arguments: Sequence[str]) -> str:
        """Return the command line without secrets, for the log, which others may read."""
        return one_line(Redaction.of_process().arguments(arguments))

    def _follow(self, program: Program) -> None:
        """Wait until the program and all its processes have ended; pass a stop on to it."""
        told_time: float | None = None
        left_time: float | None = None
        while program.is_alive():
            now = time.monotonic()
            if self._is_at_rung() and not self._stop.is_set:
                self._stop.request(RUNG)
            if self._must_stop():
                if told_time is None:
                    told_time = now
                    self._tell_stop()
                    print(f"{self._stop.signal_name}: the program gets SIG{self._config.train.command_signal.value}.")
                    program.send(getattr(signal, f"SIG{self._config.train.command_signal.value}"))
                if self._is_pausing:
                    most_s = _DEAF_AT_RUNG_S
                else:
                    self._late.look(float("inf"))
                    most_s = _DEAF_S if self._has_no_kill else float("inf")
                if now - told_time > most_s:
                    program.send(signal.SIGKILL)
            elif program.code is not None:
                left_time = left_time or now
                if now - left_time > _LEFT_BEHIND_S:
                    program.send(signal.SIGKILL if now - left_time > 2 * _LEFT_BEHIND_S else signal.SIGTERM)
            if self._story is not None:
                self._story.look()
            program.wait(_POLL_S)

    def _finish(self) -> int:
        """Conclude after the program is done. Rank 0 waits for the other ranks, then records that the run is done."""
        if self._story is None:
            write_json(self._paths.program_end(self._attempt, self._env.rank), {"time": time.time()})
            return ExitCode.OK
        missing = {self._paths.program_end(self._attempt, rank).name for rank in range(1, self._env.world_size)}
        while missing := missing.difference(names_in(self._paths.logs) or ()):
            if self._must_stop():
                return conclude_start(self.as_stop)
            self._story.look()
            time.sleep(self._look_s)
        cause = self._story.conclude()
        self.as_stop.tell_spent()
        Journal(self._paths).end(
            self._attempt, state=RunState.COMPLETED, cause=cause, step=self._step, saved_step=self._step
        )
        end_well(self._paths, self.as_stop.config.cluster.stop_after_alike)
        tell_end(self.as_stop.config, self._paths, RunState.COMPLETED, cause)
        return ExitCode.OK

    def _fail(self, code: int | None) -> None:
        is_killed = code == -signal.SIGKILL
        lines = _last_lines(self._paths.log(self._attempt, self._env.rank))
        output = "\n".join(with_causes(lines, _LAST_LINES))
        frame, said = own_frame("\n".join(last_traceback(lines))), last_error(lines)
        message = f"the program ended with {_ending(code)}"
        print(
            f"{message}: {self._shown(self._program.arguments if self._program else ())}", file=sys.stderr, flush=True
        )
        record = record_of(
            self.as_stop, ExitCode.FAILED, type="ProgramError", message=message,
            cause=KILLED if is_killed else "program", output=output, **({} if frame is None else {"frame": frame}),
            **({} if said is None else {"said": said}),
        )  # fmt: skip
        conclude_error(self.as_stop, record)

    def end_program(self) -> None:
        """End all processes of the program."""
        if self._program is None or not self._program.is_alive():
            return
        self._program.send(signal.SIGTERM)
        deadline = time.monotonic() + _LEFT_BEHIND_S
        while self._program.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._program.send(signal.SIGKILL)

    def _leave(self) -> None:
        """End a program that continues after the stop signal, and record the steps that it logged in the meantime."""
        self.end_program()
        if self._story is not None:
            self._story.look(is_last=True)

    def _must_stop(self) -> bool:
        """Return True once this rank was asked to stop by a signal, the cancel marker, or another rank.

        Raises:
            _PeerFailed: another rank has failed. It records this before srun ends us with the signal of a preemption.
        """
        now, is_one = time.monotonic(), self._env.world_size == 1
        if now - self._looked >= self._look_s or (self._stop.is_set and not self._has_stopped):
            self._looked, self._has_stopped = now, self._stop.is_set
            present = () if is_one else names_in(self._paths.logs) or ()
            if self._paths.failure(self._attempt).name in present:
                raise _PeerFailed
            if self._is_cancelled.has_come():
                self._stop.request("CANCEL marker")
            elif self._paths.program_stop(self._attempt).name in present:
                record = read_json(self._paths.program_stop(self._attempt), Faults()) or {}
                self._stop.request(RUNG if record.get("why") == RUNG else "another rank")
        return self._stop.is_set

    def _tell_stop(self) -> None:
        if self._env.world_size > 1:
            write_json(self._paths.program_stop(self._attempt), {"why": self._stop.signal_name}, sync=False)


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def written_beside_code(since: float, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the files that were written into this node's copy of the frozen code since a time, sorted.

    Args:
        since: seconds since the epoch by this node's clock.
        environ: the environment, which names the copies.
    """
    written = []
    for copy in json.loads(environ.get(FROZEN_CODE, "{}")).values():
        for parent, folders, names in os.walk(copy):
            # In a pool every run of a second looks: the files of hpc_trainer itself would take 5 ms.
            folders[:] = [name for name in folders if name != "__pycache__" and f"{parent}/{name}" != _OURS]
            written += [f"{parent}/{name}" for name in names if _is_written(f"{parent}/{name}", since)]
    return sorted(written)


def _is_written(path: str, since: float) -> bool:
    """Return True for a file that its owner may write, which frozen files are not, and that is newer than `since`."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and bool(info.st_mode & stat.S_IWUSR) and info.st_mtime >= since


def _last_lines(log: Path) -> list[str]:
    """Return the last lines that the program printed, without colours."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return _COLOUR.sub("", text).rpartition(_STARTS)[2].splitlines()[1:]
