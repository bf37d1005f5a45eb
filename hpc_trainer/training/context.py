"""RunContext: one rank's view of its run. The shared loop uses it, and so does a person's own (docs/own_loop.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hpc_trainer.errors import LoopError, NoProgressError
from hpc_trainer.runs.beat import write_result
from hpc_trainer.runs.metrics_log import read_metrics
from hpc_trainer.runtime.spans import Kind
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.runtime.stop_poll import StopPoll
from hpc_trainer.state.journal import Journal, restarts_without_progress, successor_jobs
from hpc_trainer.training.checkpoint.objects import load_objects
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore, find_start
from hpc_trainer.training.contract import ResumeContract
from hpc_trainer.training.ending import Outcome, agree_on_end
from hpc_trainer.training.progress import RankProgress
from hpc_trainer.training.rng import rng_for_world, set_rng_state
from hpc_trainer.training.save_timer import SaveTimer
from hpc_trainer.training.saver import Saver
from hpc_trainer.training.telemetry.life_signs import LifeSigns
from hpc_trainer.training.telemetry.metrics import RESERVED, cause_of_end, read_numbers
from hpc_trainer.training.telemetry.reporter import NoTracker, Reporter, Tracker

# How long after a stop signal the last evaluation may go on: well inside the 30 s of Slurm's default KillWait.
_LAST_EVALUATION_S = 15.0


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` found: optimizer steps done (0: a fresh start), and each object or value by its name."""

    step: int
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def _no_watchdog() -> None: ...


@dataclass(slots=True, kw_only=True)
class RunContext(RankProgress):
    """One rank of one attempt. Methods marked collective must be called by all ranks, at the same step.

    `attempt` counts the starts of this run from 0; `num_steps` is where it ends. Steps that methods are given never go
    down.
    """

    stop: StopFlag
    store: CheckpointStore
    attempt: int
    num_steps: int
    seed: int = 0
    saves: SaveTimer = field(default_factory=SaveTimer)
    is_asynchronous: bool = True
    """`save_in_background` writes while training goes on; else it waits, as `save` does."""
    keep_best: str | None = None
    """The metric by which a checkpoint is the best, and is kept."""
    contract: ResumeContract = field(default_factory=ResumeContract)
    make_tracker: Callable[[int], Tracker] = field(default=lambda step: NoTracker())
    heartbeat_every_s: float = 2.0
    max_no_progress: int = 3
    beat: Callable[[], None] = _no_watchdog
    """Says that this rank lives. Every method that is given a step does; a loop may call it in a long evaluation."""
    stop_step: int | None = None
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
        """The newest step that all ranks know to be saved; None: none is."""
        return self.saver.saved_step

    def describe(self, **facts: Any) -> None:
        """What this run is made with besides its configuration and code, as `vocabulary="9f2c.."`; before `restore`.

        JSON, or an object with a `fingerprint()`. A resume from a checkpoint that was made with others is refused.
        """
        if self.is_rank_zero:
            self.contract.describe(facts)

    def restore(self, /, **objects: Any) -> Restored:
        """Fills the objects from the newest valid checkpoint, if there is one; once, before the first step. Collective.

        Objects are told apart in `training/checkpoint/objects.py`: what has a state_dict, generators, tensors and
        arrays are filled in place; other values come back in the answer. The random state of Python, numpy and torch
        is that of the save.

        Raises:
            CheckpointError: the checkpoint and the objects do not fit each other; the first difference, by name.
            IncompatibleResumeError: the checkpoint is of another training; what differs (config/resume_contract.py).
            LoopError: it was called before.
            NoProgressError: the run comes back again and again at this step.
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
        """From now on a checkpoint of a step that `every_steps` divides always stands, once there was one."""
        self.saver.keep_regular(every_steps)

    def rewind(self, before: int, every_steps: int, /, **objects: Any) -> Restored:
        """Goes back: fills the objects from the newest checkpoint of a step less than `before`. Collective.

        Of those whose step `every_steps` divides, if one is left (`keep_regular`). Training goes on from there:
        later checkpoints are put away, and so are later metrics. `restore_rng` sets the random state.

        Raises CheckpointError: there is none that can be read.
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

    def _load(self, store: CheckpointStore, found: CheckpointInfo, objects: Mapping[str, Any]) -> Restored:
        is_same_world = self.contract.is_same_world(found, self.group)
        step, values, rng = store.load(found, partial(load_objects, objects, is_same_world=is_same_world))
        self._rng = rng_for_world(rng, seed=self.seed, rank=self.contract.stream(self.rank), step=step)
        return Restored(step, values)

    def _begin_at(self, step: int) -> None:
        self._count_from(step)
        self._signs.start(step)
        self.saves.start(step)

    def restore_rng(self) -> None:
        """Sets this rank's random state to that of the checkpoint again; nothing on a fresh start.

        For loops that, after `restore`, build what draws random numbers, as iterators of torch's DataLoader do.
        """
        if self._rng is not None:
            set_rng_state(self._rng)

    def _tell_start(self, is_resumed: bool) -> None:
        restarts = 0
        if self.is_rank_zero:
            self._reporter.start(self.step)
            for record in read_metrics(self.paths.metrics):
                self.saver.take_score(record["step"], {key: each for key, each in record.items() if each is not None})
            Journal(self.paths).resume(self.attempt, self.step, self.contract.changes)
            restarts = restarts_without_progress(Journal(self.paths).read(), successor_jobs(self.paths))
            print(f"attempt {self.attempt}: {f'resumed at step {self.step}' if is_resumed else 'starts at step 0'}")
        restarts = self.group.broadcast(restarts)
        if restarts >= self.max_no_progress:
            raise NoProgressError(
                f"started {restarts + 1} times at step {self.step} without a new step: stopped for good. Read the "
                f"logs of the attempts before, in {self.paths.logs}."
            )

    def last_evaluation(self) -> dict[str, float] | None:
        """The newest evaluation in metrics.jsonl, if it is of the step resumed at; else None. Collective."""
        newest = [each for each in read_metrics(self.paths.metrics) if "eval_loss" in each][-1:]
        here = dict(newest[0]) if newest and newest[0]["step"] == self.first_step else {}
        return self.group.broadcast({key: here[key] for key in here if key not in RESERVED} or None)  # type: ignore[no-any-return]

    def should_stop(self, step: int) -> bool:
        """True on all ranks if any rank got a stop signal: save, then return. Collective.

        Ask after every step: on one rank that costs a microsecond, on several an all-reduce of one number, for which
        a GPU has to finish the step. Never True at `num_steps`: nothing is left to stop. A sign of life for `status`.
        """
        step = self._reach(step)
        if step == self.num_steps:
            self.heartbeat(step)
            return False
        self.heartbeat(step)
        wish = self._poll.ask()
        if wish:
            self.agree_to_stop(step)
        return wish

    def evaluation_vote(self, step: int) -> Callable[[], bool]:
        """For the inside of one evaluation: a collective call, True on all ranks if any rank got a stop signal.

        On several GPUs a signal is heard one call later: to read this call's vote would wait for the batch. After the
        last step the signal has to be some seconds old: the run is all but done, and may just make it.
        """
        after_s = _LAST_EVALUATION_S if step == self.num_steps else 0.0
        ask = self._poll.series(after_s)

        def vote() -> bool:
            self.heartbeat(step)
            return ask()

        return vote

    def agree_to_stop(self, step: int) -> None:
        """All ranks know that they stop at this step. For loops that vote in a reduction of their own."""
        self.stop_step = self._reach(step)

    def stop_here(self, step: int, /, **objects: Any) -> None:
        """The same, and the step is saved, unless it is sooner done again than saved. Collective. Raises as `save`."""
        self.agree_to_stop(step)
        with self.spans.within(Kind.save_stall):
            self.saver.save_at_stop(step, objects)

    def should_save(self, step: int) -> bool:
        """True when a checkpoint is due (`checkpoint.every`); the same on all ranks.

        Collective while a `save_in_background` was put off: True then as soon as the one before it is written.
        """
        return self.saver.is_due(step)

    def save(self, step: int, /, **objects: Any) -> None:
        """Writes a checkpoint of this step, unless it stands already: the objects that `restore` got. Collective.

        Objects as in `restore`; values (numbers, texts, lists, dicts) as they are now. What is not each rank's own is
        rank 0's. Each rank's random state goes with it. When it returns, the checkpoint is on the disk.

        Raises:
            CheckpointError: on all ranks, if any rank could not write; older checkpoints are as they were.
            LoopError: other names than `restore` got, or `restore` was not called.
        """
        with self.spans.within(Kind.save_stall):
            self._reporter.flush()
            self.saver.save(self._reach(step), objects)

    def save_in_background(self, step: int, /, **objects: Any) -> None:
        """The same, and returns when the state is copied: it is written while training goes on. Collective.

        If the file system refuses, that is a warning, and the run goes on. If the one before is still being written,
        this one is put off, until `should_save` says so. The run ends when all is written. Raises as `save`, else.
        """
        with self.spans.within(Kind.save_stall):
            self._reporter.flush()
            self.saver.save_in_background(self._reach(step), objects)

    def save_best(self, step: int, /, **objects: Any) -> float | None:
        """After an evaluation was logged: the checkpoint of the best step (`checkpoint.keep_best`) stands. Collective.

        Returns the best value so far; None: none was logged. Raises as `save_in_background`.
        """
        with self.spans.within(Kind.save_stall):
            self._reporter.flush()
            return self.saver.save_best(self._reach(step), objects)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds a line to metrics.jsonl, and to the tracker; rank 0 only, others return at once.

        Values are numbers, also tensors and arrays that hold one. Raises LoopError for anything else.
        """
        step = self._reach(step)
        if not self.is_rank_zero:
            return
        numbers = read_numbers(values)
        # What decides what is deleted must be on the disk before.
        self._reporter.log(step, numbers, sync=self.saver.take_score(step, numbers))
        self.heartbeat(step, force=True)

    def heartbeat(self, step: int, *, force: bool = False) -> None:
        """Replaces heartbeat.json, at most every `heartbeat_every_s` seconds (`force`: every one); rank 0 only."""
        self.beat()
        self._see(step)
        self.saves.add_step(step)
        self.saver.tell_when_done()
        if self.is_rank_zero:
            self._signs.tell(step, force=force)

    def remark(self, name: str, text: str | None) -> None:
        """What `status` shows of this attempt besides its metrics, from the next heartbeat on; rank 0's counts.

        Args:
            name: who says it; another text of the same name replaces this one.
            text: a clause that names what is wrong; None: nothing is any more.
        """
        if text is None:
            self._signs.remarks.pop(name, None)
        else:
            self._signs.remarks[name] = text

    def finish(self, metrics: Mapping[str, Any], reason: str | None = None) -> None:
        """All steps are done: these are the final metrics (rank 0's count). The run is COMPLETED once main returns.

        `reason`: why it ends before `num_steps`; `status` then has the cause early_stop.
        """
        self._reach(self.step)
        self.early_reason = reason
        self._result = read_numbers(metrics)

    @property
    def cause(self) -> str:
        """Of a run that has finished, as the journal has it (`cause_of_end`)."""
        return cause_of_end(self._result or {}, self.early_reason)

    def conclude(self, name: str) -> Outcome:
        """How the loop ended, agreed among the ranks; if it is done, result.json and DONE are written. Collective.

        For the worker, when `name` (its main) has returned.

        Raises:
            CheckpointError: what was being written could not be saved.
            LoopError: main neither finished nor stopped where all had agreed, or the ranks differ.
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
            return outcome
        if self.is_rank_zero:
            write_result(
                self.paths, step=self.step, num_steps=self.num_steps, attempt=self.attempt, world_size=self.world_size,
                cause=self.cause, reason=self.early_reason, metrics=self._result,
            )  # fmt: skip
        self.group.barrier()
        return outcome

    def flush_metrics(self) -> None:
        """Write the lines of metrics.jsonl that wait for others. Does nothing on ranks other than 0."""
        self._reporter.flush()

    def close(self) -> None:
        """Write what metrics.jsonl and the tracker hold back: the worker leaves without Python's clean-up."""
        self._reporter.close()

    def _reach(self, step: int) -> int:
        self.beat()
        if self._names is None:
            raise LoopError(
                "run.restore(...) must be called before the first step: a run that comes back would start anew. "
                "Without anything to restore: run.restore()."
            )
        return self._count(step)
