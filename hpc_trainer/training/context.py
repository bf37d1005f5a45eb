"""RunContext: one rank's view of its run. The shared loop uses it, and so does a custom loop (docs/own_loop.md).

A RunContext has the rank's place, counts the optimizer steps and the time of its attempt, and records how the loop
ended, on which all ranks agree.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.errors import LoopError, NoProgressError
from hpc_trainer.record.journal import Journal, restarts_without_progress, successor_jobs, write_result
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import Kind
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.trust import check_trusted
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.rank_group import RankGroup, StopPoll
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.objects import load_objects
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore, find_start
from hpc_trainer.training.checkpoint.tensor_files import FOLDER_MODE
from hpc_trainer.training.contract import ResumeContract
from hpc_trainer.training.reporter import (
    RESERVED,
    LifeSigns,
    NoTracker,
    Reporter,
    SupersededError,
    Tracker,
    cause_of_end,
    read_numbers,
)
from hpc_trainer.training.rng import rng_for_world, set_rng_state
from hpc_trainer.training.saver import Saver


@dataclass(slots=True, kw_only=True)
class RankView:
    """Part of a RunContext that does not change during training."""

    paths: RunPaths
    env: RankEnv
    group: RankGroup

    @property
    def device(self) -> torch.device:
        """Device of this rank's tensors."""
        return self.group.device

    @property
    def rank(self) -> int:
        """Number of this rank, 0 to world_size - 1."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of this run, ≥ 1."""
        return self.group.world_size

    @property
    def is_rank_zero(self) -> bool:
        """True on the one rank that writes metrics and results."""
        return self.group.is_rank_zero

    @property
    def output_dir(self) -> Path:
        """Folder for files that a loop writes by itself, the same in each attempt; it is created at the first access.

        hpc_trainer keeps no file in this folder, and neither reads nor deletes files in it.

        Raises:
            UntrustedFileError: another user owns the folder or may write to it, or it is a symbolic link.
        """
        return _made(self.paths.output)

    @property
    def checkpoint_dir(self) -> Path:
        """Folder in `output_dir` for frameworks that write checkpoints themselves.

        hpc_trainer neither reads nor deletes files in this folder. `save` writes to another folder.

        Raises:
            UntrustedFileError: as for `output_dir`.
        """
        _made(self.paths.output)
        return _made(self.paths.own_checkpoints)


def _made(folder: Path) -> Path:
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    check_trusted(folder)
    return folder


_KEPT_STEPS = 256


@dataclass(slots=True, kw_only=True)
class RankProgress(RankView):
    """Part of a RunContext that counts steps and seconds. `step` is the last step that a method was given."""

    spans: Spans = field(default_factory=Spans)
    """Record of this rank's time by kind: `with run.spans.within(Kind.evaluation):`."""
    step_ends: deque[tuple[float, int]] = field(default_factory=partial(deque, maxlen=_KEPT_STEPS))
    """End of each of the newest steps on this rank (seconds since the epoch) and its number; first, the start."""
    step: int = 0
    first_step: int = 0
    """Step at which steps begin, after a start or a `rewind`."""
    _done_before: int = 0

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this attempt, including those that a `rewind` undid."""
        return self._done_before + self.step - self.first_step

    def spent(self, step: int) -> dict[str, Any]:
        """Return the time that this rank spent until `step`, in the form of `Spans.spent`."""
        return self.spans.spent(self._done_before + step - self.first_step)

    def _count_from(self, step: int) -> None:
        self._done_before = self.steps_done
        self.step = self.first_step = step
        self._see(step)

    def _count(self, step: int) -> int:
        """Record `step` and return it as an int.

        Raises:
            LoopError: it is less than an earlier step.
        """
        step = operator.index(step)
        if step < self.step:
            raise LoopError(f"step {step} comes after step {self.step}: steps never decrease. Count optimizer steps.")
        self.step = step
        self._see(step)
        return step

    def _see(self, step: int) -> None:
        if not self.step_ends or self.step_ends[-1][1] != step:
            self.step_ends.append((time.time(), step))


class Outcome(enum.Enum):
    """Ways in which a loop ends without an error."""

    done = "done"
    stopped = "stopped"
    paused = "paused"
    """The run has reached the step until which a search lets it train."""


def agree_on_end(
    name: str, group: RankGroup, *, has_finished: bool, has_stopped: bool, step: int, num_steps: int
) -> Outcome:
    """Return how `name`, a main that has returned at `step`, ended on all ranks. Collective.

    Raises:
        LoopError: it neither finished nor stopped as all ranks had agreed, or the ranks differ.
    """
    mine = "finished" if has_finished else "stopped" if has_stopped else "left early"
    ends = group.gather([mine, step])
    if len({how for how, _ in ends}) > 1:
        listed = ", ".join(f"rank {rank} {how} at step {at}" for rank, (how, at) in enumerate(ends))
        raise LoopError(f"{name}: all ranks must finish, or all must stop, but {listed}.")
    if mine == "left early":
        raise LoopError(
            f"{name} returned at step {step} of {num_steps}, neither finished nor stopped. Call "
            "run.finish(metrics) when all steps are done; before, return only after run.should_stop(step) is True."
        )
    return Outcome.done if has_finished else Outcome.stopped


# Seconds that the last evaluation may continue after a stop signal: well within Slurm's default KillWait of 30 s.
_LAST_EVALUATION_S = 15.0


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of `restore`: optimizer steps done (0: a fresh start), and each object or value by its name."""

    step: int
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def _no_watchdog() -> None: ...


@dataclass(slots=True, kw_only=True)
class RunContext(RankProgress):
    """One rank of one attempt. Methods marked collective must be called by all ranks, at the same step.

    `attempt` counts the starts of this run from 0; `num_steps` is the step at which the run ends. The steps that
    methods are given never decrease.
    """

    stop: StopFlag
    store: CheckpointStore
    attempt: int
    num_steps: int
    seed: int = 0
    saves: SaveTimer = field(default_factory=SaveTimer)
    is_asynchronous: bool = True
    """If True, `save_in_background` writes while training continues; else it waits, as `save` does."""
    keep_best: str | None = None
    """Metric whose best value keeps a checkpoint."""
    contract: ResumeContract = field(default_factory=ResumeContract)
    make_tracker: Callable[[int], Tracker] = field(default=lambda step: NoTracker())
    heartbeat_every_s: float = 2.0
    max_no_progress: int = 3
    beat: Callable[[], None] = _no_watchdog
    """Sign of life of this rank. Every method with a step gives one; a loop may give one in a long evaluation."""
    stop_step: int | None = None
    pause_step: int | None = None
    """Step at which a run of a search must pause (`record/rungs.py`); None if it trains to its end."""
    is_paused: bool = False
    """True if the loop ends at `pause_step`, and not by a stop signal."""
    early_reason: str | None = None
    saver: Saver = field(init=False)
    _names: frozenset[str] | None = None
    _rng: dict[str, Any] | None = None
    _result: dict[str, float] | None = None
    _poll: StopPoll = field(init=False)
    _signs: LifeSigns = field(init=False)
    _reporter: Reporter = field(init=False)

    def __post_init__(self) -> None:
        self._poll = StopPoll(self.group, self.stop)
        self._signs = LifeSigns(
            paths=self.paths, env=self.env, attempt=self.attempt, num_steps=self.num_steps,
            every_s=self.heartbeat_every_s, saves=self.saves, stop=self.stop, spent=self.spent,
        )  # fmt: skip
        self._reporter = Reporter(paths=self.paths, signs=self._signs, make_tracker=self.make_tracker)
        give_way = self._signs.give_way if self.is_rank_zero else _no_watchdog
        self.store.writer.before_commit = give_way
        self.saver = Saver(
            store=self.store, timer=self.saves, group=self.group, give_way=give_way,
            is_asynchronous=self.is_asynchronous, keep_best=self.keep_best,
            beat=lambda: self.beat(),  # noqa: PLW0108  (the watchdog comes later)
            meta={"run_id": self.paths.run_id, "attempt": self.attempt},
        )  # fmt: skip

    @property
    def saved_step(self) -> int | None:
        """Newest step that all ranks know to be saved; None if there is none."""
        return self.saver.saved_step

    def describe(self, **facts: Any) -> None:
        """Add facts that this run depends on besides its configuration and code, such as `vocabulary="9f2c.."`.

        Call before `restore`. A resume from a checkpoint that was made with other facts is refused.

        Args:
            facts: JSON, or objects with a method `fingerprint()`.
        """
        if self.is_rank_zero:
            self.contract.describe(facts)

    def restore(self, /, **objects: Any) -> Restored:
        """Fill the objects from the newest valid checkpoint, if there is one; once, before the first step. Collective.

        Objects with a state_dict, generators, tensors and arrays are filled in place; other values are in the result
        (`training/checkpoint/objects.py`). The random state of Python, numpy and torch is set to that of the save.

        Raises:
            CheckpointError: checkpoint and objects do not match; the message names the first difference.
            IncompatibleResumeError: the checkpoint is of another training; the message lists the differences
                (config/resume_contract.py).
            LoopError: `restore` was called before.
            NoProgressError: the run was started again and again at this step.
        """
        if self._names is not None:
            raise LoopError("run.restore was called before; one call takes all objects: run.restore(model=model, ...).")
        self.beat()
        with self.spans.within(Kind.restore):
            restored = self._restore(objects)
        self.spans.rest(Kind.step)
        return restored

    def _restore(self, objects: Mapping[str, Any]) -> Restored:
        self._names = self.saver.names = frozenset(objects)
        restored = Restored(0, objects)
        store, newest = find_start(self.store, self.contract.resume_from, self.paths.run_id, self.num_steps, self.group)
        if newest is not None:
            self.contract.check(newest, self.group)
            restored = self._load(store, newest, objects)
            self.saver.saved_step = newest.step if store is self.store else None
        self.saver.meta = {**self.saver.meta, **self.contract.meta()}
        self._begin_at(restored.step)
        self._tell_start(newest is not None)
        self.restore_rng()
        return restored

    def keep_regular(self, every_steps: int) -> None:
        """Keep one checkpoint of a step that `every_steps` divides at all times from now on, once there is one."""
        self.saver.keep_regular(every_steps)

    def rewind(self, before: int, every_steps: int, /, **objects: Any) -> Restored:
        """Go back: fill the objects from the newest checkpoint of a step less than `before`. Collective.

        Checkpoints of steps that `every_steps` divides come first, if there is one (`keep_regular`). Training continues
        from there: later checkpoints and metrics are removed. `restore_rng` sets the random state.

        Raises:
            CheckpointError: no such checkpoint can be read.
        """
        with self.spans.within(Kind.save_stall):
            self.saver.wait()
        with self.spans.within(Kind.restore):
            restored = self._load(self.store, self.saver.find_before(before, every_steps), objects)
            self.saver.forget_after(restored.step)
        self._begin_at(restored.step)
        if self.is_rank_zero:
            self._reporter.start(restored.step)
        self.heartbeat(restored.step, force=True)
        return restored

    def _load(self, store: CheckpointStore, checkpoint: CheckpointInfo, objects: Mapping[str, Any]) -> Restored:
        is_same_world = self.contract.is_same_world(checkpoint, self.group)
        step, values, rng = store.load(checkpoint, partial(load_objects, objects, is_same_world=is_same_world))
        self._rng = rng_for_world(rng, seed=self.seed, rank=self.contract.stream(self.rank), step=step)
        return Restored(step, values)

    def _begin_at(self, step: int) -> None:
        self._count_from(step)
        self._signs.start(step)
        self.saves.start(step)

    def restore_rng(self) -> None:
        """Set this rank's random state to that of the checkpoint again; do nothing on a fresh start.

        For loops that build something that draws random numbers after `restore`, such as an iterator of torch's
        DataLoader.
        """
        if self._rng is not None:
            set_rng_state(self._rng)

    def _tell_start(self, is_resumed: bool) -> None:
        restarts = 0
        if self.is_rank_zero:
            self._reporter.start(self.step)
            for record in read_metrics(self.paths.metrics):
                self.saver.take_score(
                    record["step"], {key: value for key, value in record.items() if value is not None}
                )
            Journal(self.paths).resume(self.attempt, self.step, self.contract.changes)
            restarts = restarts_without_progress(Journal(self.paths).read(), successor_jobs(self.paths))
            print(f"attempt {self.attempt}: {f'resumed at step {self.step}' if is_resumed else 'starts at step 0'}")
        restarts = self.group.broadcast(restarts)
        if restarts >= self.max_no_progress:
            raise NoProgressError(
                f"started {restarts + 1} times at step {self.step} without a new step: stopped for good. Read the logs "
                f"of the earlier attempts, in {self.paths.logs}."
            )

    def last_evaluation(self) -> dict[str, float] | None:
        """Return the newest evaluation in metrics.jsonl if training resumed at its step; else None. Collective."""
        newest = [record for record in read_metrics(self.paths.metrics) if "eval_loss" in record][-1:]
        here = dict(newest[0]) if newest and newest[0]["step"] == self.first_step else {}
        return self.group.broadcast({key: here[key] for key in here if key not in RESERVED} or None)  # type: ignore[no-any-return]

    def should_stop(self, step: int) -> bool:
        """Return True on all ranks if any rank got a stop signal: then save, and return from main. Collective.

        Call after every step: on one rank that costs a microsecond; on several an all-reduce of one number, for which
        a GPU has to finish the step. Never True at `num_steps`, where nothing is left to stop. The call is also a sign
        of life for `status`.
        """
        step = self._reach(step)
        if step == self.num_steps:
            self.heartbeat(step)
            return False
        self.heartbeat(step)
        wish = self._poll.ask()
        if not wish and self.pauses_at(step):
            self.is_paused = wish = True
        if wish:
            self.agree_to_stop(step)
        return wish

    def evaluation_vote(self, step: int) -> Callable[[], bool]:
        """Return a collective function for one evaluation: True on all ranks if any rank got a stop signal.

        On several GPUs a signal counts one call later, because reading the vote of this call would wait for the batch.
        After the last step only a signal that is some seconds old counts: the run is almost done, and may still finish.
        """
        after_s = _LAST_EVALUATION_S if step == self.num_steps else 0.0
        ask = self._poll.series(after_s)

        def vote() -> bool:
            self.heartbeat(step)
            return ask()

        return vote

    def agree_to_stop(self, step: int) -> None:
        """Record that all ranks stop at this step. For loops that vote in a reduction of their own."""
        self.stop_step = self._reach(step)

    def stop_here(self, step: int, /, **objects: Any) -> None:
        """Stop all ranks at this step; save it, unless repeating its steps is faster. Collective. Raises as `save`."""
        self.agree_to_stop(step)
        with self.spans.within(Kind.save_stall):
            self.saver.save_at_stop(step, objects)

    def pauses_at(self, step: int) -> bool:
        """Return True if a run of a search must pause at this step; the same on all ranks."""
        return self.pause_step is not None and step >= self.pause_step

    def pause_here(self, step: int, /, **objects: Any) -> None:
        """Save this step, and stop all ranks until the run is promoted. Collective. Raises as `save`."""
        self.save(step, **objects)
        self.agree_to_stop(step)
        self.is_paused = True

    def should_save(self, step: int) -> bool:
        """Return True if a checkpoint is due (`checkpoint.every`); the same on all ranks.

        While a `save_in_background` is put off the call is collective, and True as soon as the save before it is done.
        """
        return self.saver.is_due(step)

    def save(self, step: int, /, **objects: Any) -> None:
        """Write a checkpoint of this step, unless there is one already. Collective.

        When the call returns, the checkpoint is on the disk. State that all ranks share is rank 0's; each rank's own
        state and random state are saved too.

        Args:
            step: optimizer steps done.
            objects: the objects of `restore`, by the same names; values (numbers, texts, lists, dicts) as they are now.

        Raises:
            CheckpointError: on all ranks, if any rank could not write; older checkpoints are unchanged.
            LoopError: the names are not those of `restore`, or `restore` was not called.
        """
        with self.spans.within(Kind.save_stall):
            self._reporter.flush()
            self.saver.save(self._reach(step), objects)

    def save_in_background(self, step: int, /, **objects: Any) -> None:
        """Save as `save` does, but return when the state is copied: it is written while training continues. Collective.

        If the file system refuses, a warning is printed and the run continues. If the save before is still being
        written, this one is put off until `should_save` returns True. The run ends only when everything is written.
        Other errors as in `save`.
        """
        with self.spans.within(Kind.save_stall):
            self._reporter.flush()
            self.saver.save_in_background(self._reach(step), objects)

    def save_best(self, step: int, /, **objects: Any) -> float | None:
        """Save this step if its evaluation is the best so far (`checkpoint.keep_best`). Collective.

        Call after the evaluation was logged. Return the best value so far; None if none was logged. Raises as
        `save_in_background`.
        """
        with self.spans.within(Kind.save_stall):
            self._reporter.flush()
            return self.saver.save_best(self._reach(step), objects)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl and to the tracker; on rank 0 only, other ranks return at once.

        Args:
            step: optimizer steps done.
            values: numbers, or tensors and arrays that hold one number.

        Raises:
            LoopError: a value is anything else.
        """
        step = self._reach(step)
        if not self.is_rank_zero:
            return
        numbers = read_numbers(values)
        # Scores decide which checkpoints are deleted, so they must be on the disk before.
        self._reporter.log(step, numbers, sync=self.saver.take_score(step, numbers))
        self.heartbeat(step, force=True)

    def heartbeat(self, step: int, *, force: bool = False) -> None:
        """Replace heartbeat.json, at most every `heartbeat_every_s` seconds unless `force`; rank 0 only."""
        self.beat()
        self._see(step)
        self.saves.add_step(step)
        self.saver.tell_when_done()
        if self.is_rank_zero:
            self._signs.tell(step, force=force)

    def remark(self, name: str, text: str | None) -> None:
        """Set a remark that `status` shows of this attempt from the next heartbeat on; rank 0's remarks count.

        Args:
            name: the author of the remark; another text with the same name replaces this one.
            text: a clause that names the problem; None removes the remark.
        """
        if text is None:
            self._signs.remarks.pop(name, None)
        else:
            self._signs.remarks[name] = text

    def finish(self, metrics: Mapping[str, Any], reason: str | None = None) -> None:
        """Record that all steps are done. The run is COMPLETED once main returns.

        Args:
            metrics: the final metrics; rank 0's count.
            reason: why the run ends before `num_steps`; `status` then has the cause early_stop.
        """
        self._reach(self.step)
        self.early_reason = reason
        self._result = read_numbers(metrics)

    @property
    def cause(self) -> str:
        """Cause of the end of a finished run, as in the journal (`cause_of_end`)."""
        return cause_of_end(self._result or {}, self.early_reason)

    def conclude(self, name: str) -> Outcome:
        """Return how the loop ended, as all ranks agree; if it is done, write result.json and DONE. Collective.

        The worker calls it after the user's or the shared main has returned. `name` names that main in messages.

        Raises:
            CheckpointError: the save that was being written failed.
            LoopError: main neither finished nor stopped as all ranks had agreed, or the ranks differ.
        """
        with self.spans.within(Kind.save_stall):
            self.saver.finish()
        outcome = agree_on_end(
            name, self.group, has_finished=self._result is not None, has_stopped=self.stop_step is not None,
            step=self.step, num_steps=self.num_steps,
        )  # fmt: skip
        if outcome is Outcome.stopped:
            assert self.stop_step is not None
            is_saved = self.saver.stop_is_covered or (self.saved_step is not None and self.saved_step >= self.stop_step)
            if self.is_rank_zero and not is_saved:
                print(f"{name} stopped at step {self.step} and did not save it: run.save(step, ...) before you return.")
            return Outcome.paused if self.is_paused else outcome
        if self.is_rank_zero:
            write_result(
                self.paths, step=self.step, num_steps=self.num_steps, attempt=self.attempt, world_size=self.world_size,
                cause=self.cause, reason=self.early_reason, metrics=self._result,
            )  # fmt: skip
        self.group.barrier()
        return outcome

    def flush_metrics(self) -> None:
        """Write the buffered lines of metrics.jsonl. Does nothing on ranks other than 0."""
        self._reporter.flush()

    def tell_last(self) -> None:
        """Write a heartbeat of the newest step, for a run that fails; rank 0 only, unless a later attempt began."""
        if self.is_rank_zero and self._names is not None:
            with contextlib.suppress(SupersededError):
                self._signs.tell_last()

    def close(self) -> None:
        """Write everything that metrics.jsonl and the tracker buffer: the worker exits without Python's clean-up."""
        self._reporter.close()

    def _reach(self, step: int) -> int:
        self.beat()
        if self._names is None:
            raise LoopError(
                "run.restore(...) must be called before the first step: a restarted run would start anew. If "
                "there is nothing to restore, call run.restore()."
            )
        return self._count(step)
