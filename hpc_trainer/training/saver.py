"""When and how a run saves: at once or while training goes on, one save at a time, and what a failed one means."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.errors import CheckpointError, LoopError, StorageError
from hpc_trainer.runs import checkpoint_folders as folders
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.objects import to_trees
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore
from hpc_trainer.training.checkpoint.writer import SaveResult
from hpc_trainer.training.rng import rng_state
from hpc_trainer.training.save_timer import SaveTimer

Objects = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Saver:
    """The saves of one attempt. What is not said to be otherwise is collective.

    `saved_step`, `running_step` (being written) and `is_wanted` are the same on all ranks: they change in collectives.
    """

    store: CheckpointStore
    timer: SaveTimer
    group: RankGroup
    beat: Callable[[], None]
    give_way: Callable[[], None]
    meta: Mapping[str, Any]
    names: frozenset[str] | None = None
    """Of the objects that were restored."""
    is_asynchronous: bool = True
    keep_best: str | None = None
    """The metric whose best value keeps a checkpoint."""
    on_save: Callable[[int, Objects], None] = lambda step, objects: None
    """Called with what is about to be saved."""
    saved_step: int | None = None
    running_step: int | None = None
    may_put_off: bool = True
    """A regular save waits for the one before it, rather than take a later step."""
    is_wanted: bool = False
    """A save was due while another was being written: it comes when that one is done."""
    stop_is_covered: bool = False
    """A stop needs no save of its own: what an earlier one left out is sooner done again, or nothing is ever saved."""
    _is_told: bool = False
    _stall_s: float = 0.0

    @property
    def standing_step(self) -> int | None:
        """The newest step that is saved, by what rank 0 knows alone; other ranks may hear of it later. Not collective.

        For those that cannot ask the others any more.
        """
        is_written = self.running_step is not None and self.store.writer.seconds is not None
        return self.running_step if is_written and self.group.is_rank_zero else self.saved_step

    def is_due(self, step: int) -> bool:
        """True if a checkpoint of this step is wanted; the same on all ranks. Collective only while `is_wanted`."""
        return self.timer.is_due(step) or (self.is_wanted and not self._is_running())

    def save(self, step: int, objects: Objects) -> None:
        """The checkpoint of this step stands when this returns. Raises CheckpointError, LoopError."""
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
        """A regular save: a file system that refuses is a warning, not the end; the next one tries again.

        While another save is being written nothing is saved: the next step after it is. With `may_wait` this step is,
        and where the step itself counts (`checkpoint.keep_every_steps`).

        Raises CheckpointError: what was given cannot be saved, or what stands there is not trusted.
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
                self.running_step, self._is_told = step, False
                self._stall_s = time.perf_counter() - begin
                self.timer.add_stall(self._stall_s, self.group)
            else:
                self.saved_step = step
        except StorageError as error:
            self._warn(step, error)

    def save_at_stop(self, step: int, objects: Objects) -> None:
        """Waits for the save that is being written, and saves this step unless it costs less to do it again.

        Raises CheckpointError, as `save`: a stop must not believe in a checkpoint that does not stand.
        """
        running = self.running_step
        if running is not None and (ended := self._wait()).error is None:
            # Rank 0's clock decides: another save takes about as long as the one that was waited for.
            again_s = (step - running) * (self.timer.pace.typical_step_s or float("inf"))
            if self.group.broadcast(again_s <= ended.seconds):
                if self.group.is_rank_zero:
                    print(f"step {running} is saved: the {step - running} steps after it are sooner done again.")
                self.stop_is_covered = True
                return
        self.save(step, objects)

    def save_best(self, step: int, objects: Objects) -> float | None:
        """After an evaluation was logged: if this step's is the best so far, it is saved, unless it is already.

        In the background, and never put off. Returns the best value so far, None without any.
        """
        scores = self.store.writer.scores
        mine = self.store.writer.retention.best(scores)
        best, value = self.group.broadcast([mine, None if mine is None else scores[mine]])
        if best == step:
            self.save_in_background(step, objects, may_wait=True)
        return None if value is None else float(value)

    def take_score(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Takes the score of a step, if it is among what was logged; True if it is. Rank 0; not collective."""
        if self.keep_best is None or self.keep_best not in metrics:
            return False
        self.store.writer.scores[step] = float(metrics[self.keep_best])
        return True

    def finish(self) -> None:
        """Waits for what is being written. Raises CheckpointError: it was not saved, and nothing later is."""
        if self.running_step is not None:
            error = self._wait().error
            if error is not None:
                raise error
        if self.keep_best is not None and self.group.is_rank_zero and not self.store.writer.scores:
            print(f"checkpoint.keep_best={self.keep_best}: no metric of that name was logged; none is kept for it.")

    def keep_regular(self, every_steps: int) -> None:
        """From now on the newest checkpoint of a step that `every_steps` divides is kept, and none is put off."""
        writer = self.store.writer
        writer.retention = dataclasses.replace(writer.retention, newest_of_every_steps=every_steps)
        self.may_put_off = False

    def find_before(self, before: int, every_steps: int) -> CheckpointInfo:
        """The newest valid checkpoint of a step less than `before` that `every_steps` divides; else the oldest.

        Raises CheckpointError: there is none.
        """
        found = [step for step, _ in folders.committed(self.store.folder)] if self.group.is_rank_zero else []
        found = [step for step in self.group.broadcast(found) if step < before]
        regular = [step for step in found if step % every_steps == 0]
        for step in [*regular, *found[-1:]]:  # the newest first
            info = self.store.newest_valid(step)
            if info is not None:
                return info
        raise CheckpointError(
            f"the run is to go back to before step {before}, and no checkpoint of a step before it can be read in "
            f"{self.store.folder}."
        )

    def forget_after(self, step: int) -> None:
        """Training goes on from this step, whose checkpoint stands; later ones are put away. Collective."""
        self.store.forget_after(step)
        self.saved_step, self.is_wanted = step, False

    def wait(self) -> None:
        """Until nothing is being written any more; a save that failed is a warning. Collective."""
        if self.running_step is not None:
            self._wait()

    def tell_when_done(self) -> None:
        """Rank 0 tells that a save is done, and takes its measure, before anybody asks. Not collective."""
        if self.running_step is not None and not self._is_told:
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
        if seconds is None or self._is_told:
            return
        self._is_told = True
        if self.group.is_rank_zero:
            self.timer.pace.add_save(self._stall_s + seconds)
            print(
                f"step {self.running_step}: checkpoint saved in {self._stall_s + seconds:.2f} s; training stood still "
                f"for {self._stall_s:.3f} s"
            )

    def _is_running(self) -> bool:
        """True while a save is being written, by rank 0's knowledge. Collective, unless all know that none is."""
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
            self.give_way()  # a later attempt may be why
            self._warn(ended.step, ended.error)
        self.running_step = None

    def _warn(self, step: int, error: Exception) -> None:
        self.timer.num_failed += 1
        if self.group.is_rank_zero:
            stands = "none is" if self.saved_step is None else f"that of step {self.saved_step} is"
            print(
                f"WARNING: step {step}: the checkpoint was NOT saved, {stands} the newest; training goes on and tries "
                f"again at the next one. {error}",
                file=sys.stderr,
                flush=True,
            )
