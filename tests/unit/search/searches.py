"""Searches in a folder, and trials that end as a test says, without any training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.record.files import append_lines, make_folder
from hpc_trainer.record.journal import Journal, write_result
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.states import RunState
from hpc_trainer.search.define import define
from hpc_trainer.search.folder import Search, Trial, Trials, write_search
from hpc_trainer.search.next_run import Chosen, next_run

LR = "optim.lr=tag(log,interval(1e-4,1e-1))"
WORDS = ("experiment=digits", "cluster=local", "sweep_name=search", "train.num_steps=64", "train.eval_every_steps=1")


class SearchOnDisk:
    """A search in `folder`, from which a test draws and in which it plays what runs write."""

    def __init__(
        self, folder: Path, *words: str, axes: Sequence[str] = (LR,), trust: Sequence[str] = (),
        base: Sequence[str] = WORDS,
    ) -> None:  # fmt: skip
        defined = define([*base, f"paths.runs_dir={folder}", *words, *axes], trust=trust)
        self.paths: SweepPaths = defined.sweep
        self.search: Search = defined.search
        make_folder(self.paths.folder)
        write_search(self.paths, self.search)
        self.trials = Trials(self.paths, self.search)

    def next(self) -> Chosen | None:
        return next_run(self.paths, self.search, self.trials)

    def known(self) -> list[Trial]:
        return Trials(self.paths, self.search).read()

    def begins(self, run_id: str) -> int:
        journal = Journal(self.paths.run(run_id))
        number = len(journal.read())
        make_folder(self.paths.run(run_id).folder)
        journal.start(
            number, job_id=f"local-{number}", restart_count=0, node="here", pid=os.getpid(), executor="local",
            world_size=1,
        )  # fmt: skip
        return number

    def logs(self, run_id: str, step: int, value: float | None) -> None:
        append_lines(self.paths.run(run_id).metrics, [{"step": step, self.search.settings.metric: value}])

    def pauses(self, run_id: str, step: int, value: float | None) -> None:
        number = self.begins(run_id)
        self.logs(run_id, step, value)
        Journal(self.paths.run(run_id)).end(number, state=RunState.PAUSED, cause="rung", step=step, saved_step=step)

    def completes(self, run_id: str, value: float | None, **others: float) -> None:
        number = self.begins(run_id)
        self.logs(run_id, self.search.num_steps, value)
        metric = {} if value is None else {self.search.settings.metric: value}
        write_result(
            self.paths.run(run_id), step=64, num_steps=64, attempt=number, world_size=1, cause="done", reason=None,
            metrics={**metric, **others},
        )  # fmt: skip
        Journal(self.paths.run(run_id)).end(number, state=RunState.COMPLETED, cause="done", step=64)

    def fails(self, run_id: str) -> None:
        number = self.begins(run_id)
        Journal(self.paths.run(run_id)).end(number, state=RunState.FAILED, cause="error", step=1)
