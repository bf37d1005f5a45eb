"""Source of the runs of a pool (`worker/slot.py`): each slot draws its next trial itself, or takes a promoted one.

A slot claims a trial, or its promotion, in the search (search/next_run.py), and then the run's turn in the pool. If it
dies between the two claims, another slot finds a trial that may train and that no slot has, and takes its turn.
"""

from __future__ import annotations

import time

from hpc_trainer.errors import HpcTrainerError, RunStateError
from hpc_trainer.record.files import claim, remove, to_json, write_marker
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import seal
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import LEAVING, RunState
from hpc_trainer.record.submissions import Submission, read_submissions
from hpc_trainer.record.turns import Turn, Turns, read_turn
from hpc_trainer.search.commands import SOURCE
from hpc_trainer.search.folder import Search, Trials, read_search
from hpc_trainer.search.next_run import SearchStoppedError, has_next, next_run, stop_reason
from hpc_trainer.worker.slot import Queue, RunSource, is_unsure


def make(sweep: SweepPaths, pool: Submission, specs: dict[str, RunSpec]) -> SearchRuns | None:
    """Return the source of a search's pool; None for another pool (hook `run_sources`)."""
    return SearchRuns(sweep, pool) if pool.source == SOURCE else None


class SearchRuns(RunSource):
    """Trials of a search, as a slot takes them."""

    def __init__(self, sweep: SweepPaths, pool: Submission) -> None:
        super().__init__(sweep, pool)
        self._has_failed = False
        self._trials = Trials(sweep, self._search())

    def _search(self) -> Search:
        """Read the search again: `submit` may have raised the number of trials."""
        search = read_search(self._sweep)
        if search is None:
            raise RunStateError(f"{self._sweep.folder} holds no search.")
        return search

    @property
    def template(self) -> RunSpec:
        """A run from which trials are made; all trials have its shape and environment."""
        return self._trials.search.bases[0].spec

    def next_run(self, turns: Turns, place: int) -> tuple[RunSpec, Turn] | None:
        """Claim a trial that a slot gave back or left, else a promoted or a new one; None if there is none now."""
        turns.look()
        self._order = {submission.uuid: number for number, submission in enumerate(read_submissions(self._sweep))}
        try:
            self._trials.search = self._search()
            queue = Queue(self._missing)
            for trial in self._trials.read():
                is_open = trial.state is RunState.RUNNING and self._may_take(trial.run_id, turns, queue)
                if is_open and (turn := turns.take(trial.run_id, place)) is not None:
                    return self._trials.spec(trial.number), turn
            while (chosen := next_run(self._sweep, self._trials.search, self._trials)) is not None:
                if (turn := turns.take(chosen.spec.run_id, place)) is not None:
                    return chosen.spec, turn
                turns.look()  # another slot has found the trial that was claimed a moment ago
        except SearchStoppedError as error:
            print(f"no further trial: {error}", flush=True)
        except HpcTrainerError as error:
            print(f"no further trial: {error}", flush=True)
            self._has_failed = True
            claim(
                self._sweep.search_problem, f"{seal(to_json({'problem': str(error), 'time': time.time()}))}\n".encode()
            )
        return None

    def _may_take(self, run_id: str, turns: Turns, queue: Queue) -> bool:
        return self._is_promoted(run_id, turns) or super()._may_take(run_id, turns, queue)

    @staticmethod
    def _is_promoted(run_id: str, turns: Turns) -> bool:
        """Return True if a trial that may train has ended its newest turn by a pause."""
        end = turns.end_of(run_id)
        return end is not None and end.state is RunState.PAUSED

    def is_empty(self, turns: Turns) -> bool:
        """Return True if no trial is left that this slot could draw, take or wait for."""
        if is_unsure(self._missing):
            return False
        known = self._trials.read()
        at_work = [trial.run_id for trial in known if trial.state is RunState.RUNNING]
        if any(self._is_promoted(run_id, turns) or self._is_open(run_id, turns) for run_id in at_work):
            return False
        search = self._trials.search
        if self._has_failed or stop_reason(search, known, self._sweep.name) is not None:
            return True
        # With rungs the end of another slot's trial may promote one; without rungs it leads to nothing.
        is_awaited = bool(search.settings.rungs) and any(self._has_slot(run_id, turns) for run_id in at_work)
        return not is_awaited and not has_next(search, known)

    def _has_slot(self, run_id: str, turns: Turns) -> bool:
        """Return True if a slot of this sweep and cluster has the run now, as far as its claim tells."""
        if run_id not in turns.newest or turns.end_of(run_id) is not None or turns.holder is None:
            return False
        turn = read_turn(self._sweep, run_id, turns.newest[run_id], turns.faults)
        if turn is None:
            return False
        return turn.holder.uuid in self._order and turn.holder.cluster == turns.holder.cluster

    def is_last_look(self, turns: Turns, paths: RunPaths) -> bool:
        """Announce that the slot ends, and return True unless `submit` raised the number of trials before that.

        Either `submit` finds the announcement and starts new slots, or this slot finds the new number.
        """
        write_marker(paths.marker(LEAVING))
        self._trials.search = self._search()
        if self.is_empty(turns):
            return True
        remove(paths.marker(LEAVING))
        return False
