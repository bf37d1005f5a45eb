"""When and how a run saves: at once or while training continues, one save at a time.

The interval of saves, and the stop before the time limit, follow from measured steps and saves. A failed save is
reported and tried again.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.errors import CheckpointError, LoopError, StorageError
from hpc_trainer.record import checkpoint_folders as folders
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.objects import to_trees
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore
from hpc_trainer.training.checkpoint.writer import SaveResult
from hpc_trainer.training.rng import rng_state

Objects = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Saver:
    """Saves of one attempt. Methods are collective unless their docstring says otherwise.

    `saved_step`, `running_step` (being written) and `is_wanted` are the same on all ranks: they change in collectives.
    """

    store: CheckpointStore
    timer: SaveTimer
    group: RankGroup
    beat: Callable[[], None]
    give_way: Callable[[], None]
    meta: Mapping[str, Any]
    names: frozenset[str] | None = None
    """Names of the objects that were restored."""
    is_asynchronous: bool = True
    keep_best: str | None = None
    """Metric whose best value keeps a checkpoint."""
    on_save: Callable[[int, Objects], None] = lambda step, objects: None
    """Called with the step and the objects that are about to be saved."""
    saved_step: int | None = None
    running_step: int | None = None
    may_put_off: bool = True
    """If True, a regular save that is due while another is being written takes a later step; else it waits."""
    is_wanted: bool = False
    """True if a save was due while another one was being written: it follows when that one is done."""
    stop_is_covered: bool = False
    """True if a stop needs no save: repeating the steps since the last save is faster, or nothing is ever saved."""
    _is_reported: bool = False
    _stall_s: float = 0.0

    @property
    def standing_step(self) -> int | None:
        """Newest step that rank 0 alone knows to be saved; other ranks may learn of it later. Not collective.

        For callers that can no longer ask the other ranks.
        """
        is_written = self.running_step is not None and self.store.writer.seconds is not None
        return self.running_step if is_written and self.group.is_rank_zero else self.saved_step

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint of this step is due; the same on all ranks. Collective only while `is_wanted`."""
        return self.timer.is_due(step) or (self.is_wanted and not self._is_running())

    def save(self, step: int, objects: Objects) -> None:
        """Save this step, and return when its checkpoint is complete. Raises CheckpointError, LoopError."""
        self._check_names(objects)
        if self.running_step is not None:
            self._wait()
        if self.saved_step == step:
            return
        begin = time.perf_counter()
        self.give_way()
        self.store.save(step, **self._trees(step, objects), beat=self.beat)
        self.saved_step, self.is_wanted, seconds = step, False, time.perf_counter() - begin
        self.timer.add_save(step, seconds, self.group)
        if self.group.is_rank_zero:
            print(f"step {step}: checkpoint saved in {seconds:.2f} s")

    def save_in_background(self, step: int, objects: Objects, *, may_wait: bool = False) -> None:
        """Begin a regular save. If the file system refuses, print a warning; the next save tries again.

        If another save is still being written, this step is not saved, but the first step after that save. With
        `may_wait`, or if `checkpoint.keep_every_steps` keeps this step, the call waits and saves this step.

        Raises:
            CheckpointError: an object cannot be saved, or the existing checkpoint of this step is not trusted.
        """
        self._check_names(objects)
        if step in (self.saved_step, self.running_step):
            return
        if self._is_running():
            if self.may_put_off and not may_wait and not self.store.writer.retention.is_nth(step):
                self.is_wanted = True
                return
            self._wait()
        self.is_wanted = False
        self.timer.begin(step)
        try:
            if not self.is_asynchronous:
                self.save(step, objects)
                return
            begin = time.perf_counter()
            self.give_way()
            if self.store.writer.begin(step, **self._trees(step, objects)):
                self.running_step, self._is_reported = step, False
                self._stall_s = time.perf_counter() - begin
                self.timer.add_stall(self._stall_s, self.group)
            else:
                self.saved_step = step
        except StorageError as error:
            self._warn(step, error)

    def save_at_stop(self, step: int, objects: Objects) -> None:
        """Wait for the save that is being written; save this step too, unless repeating its steps is faster.

        Raises:
            CheckpointError: as in `save`; a stop must not count on a checkpoint that does not exist.
        """
        running = self.running_step
        if running is not None and (ended := self._wait()).error is None:
            # Rank 0's clock decides: another save takes about as long as the save that just ended.
            again_s = (step - running) * (self.timer.pace.typical_step_s or float("inf"))
            if self.group.broadcast(again_s <= ended.seconds):
                if self.group.is_rank_zero:
                    print(
                        f"step {running} is saved: repeating the {step - running} steps after it takes less time than "
                        "another save."
                    )
                self.stop_is_covered = True
                return
        self.save(step, objects)

    def save_best(self, step: int, objects: Objects) -> float | None:
        """Save this step in the background if its evaluation is the best so far; never put the save off.

        Call after the evaluation was logged. Return the best value so far; None if there is none.
        """
        scores = self.store.writer.scores
        mine = self.store.writer.retention.best(scores)
        best, value = self.group.broadcast([mine, None if mine is None else scores[mine]])
        if best == step:
            self.save_in_background(step, objects, may_wait=True)
        return None if value is None else float(value)

    def take_score(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Record a step's score and return True, if `metrics` has the metric `keep_best`. Rank 0; not collective."""
        if self.keep_best is None or self.keep_best not in metrics:
            return False
        self.store.writer.scores[step] = float(metrics[self.keep_best])
        return True

    def finish(self) -> None:
        """Wait for the save that is being written.

        Raises:
            CheckpointError: the save failed, and no later step is saved.
        """
        if self.running_step is not None:
            error = self._wait().error
            if error is not None:
                raise error
        if self.keep_best is not None and self.group.is_rank_zero and not self.store.writer.scores:
            print(
                f"checkpoint.keep_best={self.keep_best}: no metric of that name was logged; no checkpoint is kept for "
                "it."
            )

    def keep_regular(self, every_steps: int) -> None:
        """Keep the newest checkpoint of a step that `every_steps` divides at all times, and put no save off."""
        writer = self.store.writer
        writer.retention = dataclasses.replace(writer.retention, newest_of_every_steps=every_steps)
        self.may_put_off = False

    def find_before(self, before: int, every_steps: int) -> CheckpointInfo:
        """Return the newest valid checkpoint whose step is less than `before` and a multiple of `every_steps`.

        If there is none, return the oldest checkpoint before that step.

        Raises:
            CheckpointError: no checkpoint before that step can be read.
        """
        steps = [step for step, _ in folders.committed(self.store.folder)] if self.group.is_rank_zero else []
        steps = [step for step in self.group.broadcast(steps) if step < before]
        regular = [step for step in steps if step % every_steps == 0]
        for step in [*regular, *steps[-1:]]:  # the newest first
            info = self.store.newest_valid(step)
            if info is not None:
                return info
        raise CheckpointError(
            f"the run must go back to a step before {before}, but {self.store.folder} has no readable checkpoint of "
            "such a step."
        )

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints after this step, which has one itself; training continues from it. Collective."""
        self.store.forget_after(step)
        self.saved_step, self.is_wanted = step, False

    def wait(self) -> None:
        """Wait until no save is being written; a failed save prints a warning. Collective."""
        if self.running_step is not None:
            self._wait()

    def tell_when_done(self) -> None:
        """Print on rank 0 that a save is done, and record its time, as soon as it is complete. Not collective."""
        if self.running_step is not None and not self._is_reported:
            self._tell(self.store.writer.seconds)

    def _check_names(self, objects: Objects) -> None:
        if self.names is None or set(objects) != self.names:
            raise LoopError(
                f"run.save got {sorted(objects)} and run.restore {sorted(self.names or ())}: they must be the same "
                "names, or the run could not be resumed. Give both the same."
            )

    def _trees(self, step: int, objects: Objects) -> dict[str, Any]:
        self.on_save(step, objects)
        shared, own = to_trees(objects)
        return {
            "replicated": {"step": step, "objects": shared},
            "per_rank": {"rng": rng_state(), "objects": own},
            "meta": self.meta,
        }

    def _tell(self, seconds: float | None) -> None:
        if seconds is None or self._is_reported:
            return
        self._is_reported = True
        if self.group.is_rank_zero:
            self.timer.pace.add_save(self._stall_s + seconds)
            print(
                f"step {self.running_step}: checkpoint saved in {self._stall_s + seconds:.2f} s; training stopped "
                f"for {self._stall_s:.3f} s"
            )

    def _is_running(self) -> bool:
        """Return True while a save is being written, as rank 0 knows. Collective, unless all ranks know of none."""
        if self.running_step is None:
            return False
        ended = self.store.writer.result()
        if ended is not None:
            self._conclude(ended)
        return ended is None

    def _wait(self) -> SaveResult:
        ended = self.store.writer.wait(self.beat)
        self._conclude(ended)
        return ended

    def _conclude(self, ended: SaveResult) -> None:
        if ended.error is None:
            self._tell(ended.seconds)
            self.saved_step = ended.step
        else:
            self.give_way()  # the reason may be a later attempt
            self._warn(ended.step, ended.error)
        self.running_step = None

    def _warn(self, step: int, error: Exception) -> None:
        self.timer.num_failed += 1
        if self.group.is_rank_zero:
            stands = "none is" if self.saved_step is None else f"that of step {self.saved_step} is"
            print(
                f"WARNING: step {step}: the checkpoint was NOT saved, {stands} the newest; training continues and the "
                f"next save tries again. {error}",
                file=sys.stderr,
                flush=True,
            )
