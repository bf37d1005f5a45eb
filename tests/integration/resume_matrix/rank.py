"""Program of test_resume_matrix.py: one rank that trains a cell undisturbed, then through interruptions.

Every attempt has a context, model, optimizer, loader and DDP of its own, in one process: what a new process adds is
shown by tests/integration/resume/test_resume.py. A stop is asked of one rank; a kill ends all ranks between two steps
without a save.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.local_sgd import Sync
from hpc_trainer.features.memory.search import Trials
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_env import RankEnv, read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import Outcome, Restored
from hpc_trainer.training.contract import ResumeContract
from hpc_trainer.verify.probe import Probe, ProbedRun
from hpc_trainer.verify.resume import read_trace
from hpc_trainer.worker.attempt import process_group, run_main
from tests.composed import composed
from tests.integration.resume_matrix.cells import CELLS, EVAL_EVERY_STEPS, NUM_STEPS, POINTS, overrides


class Killed(BaseException):
    """The rank is gone: nothing is saved."""


@dataclass(slots=True, kw_only=True)
class InterruptedRun(ProbedRun):
    """Stops at the step `end`, or is gone after it."""

    end: int | None
    is_kill: bool = False
    alone_from: int = NUM_STEPS
    """Steps after which ranks share no gradients (parallel.sync_warmup_steps)."""

    def restore(self, /, **objects: Any) -> Restored:
        restored = ProbedRun.restore(self, **objects)
        self.saw(restored.step)
        return restored

    def saw(self, step: int) -> None:
        ProbedRun.saw(self, step)
        if self.end is None:
            return
        if self.is_kill and step >= self.end:
            raise Killed
        # Asked one step before: the vote rides in the gradients of the step that is then the last. Or two steps before,
        # where ranks share none: all but the first such vote of an attempt are read a step later.
        ahead = 1 if self.end <= self.alone_from + 1 else 2
        if not self.is_kill and step >= self.end - ahead and self.rank == self.end % self.world_size:
            self.stop.request("SIGUSR2")


def play(
    config: TrainConfig, env: RankEnv, group: RankGroup, paths: RunPaths, ends: Sequence[int], *, kills: bool = False
) -> None:
    """Trains to the end; attempt number n ends at step ends[n], with `kills` every second one without a save."""
    if group.is_rank_zero:
        paths.checkpoints.mkdir(parents=True, exist_ok=True)  # a reply may be lost on the way
        paths.folder.chmod(0o700)
        paths.checkpoints.chmod(0o700)
    group.barrier()
    for attempt in range(len(ends) + 1):
        if group.is_rank_zero:
            Journal(paths).start(
                attempt, job_id=f"j{attempt}", restart_count=0, node="n", pid=os.getpid(), executor="local",
                world_size=group.world_size,
            )  # fmt: skip
        group.barrier()
        run = InterruptedRun(
            paths=paths, env=env, group=group, stop=StopFlag(), attempt=attempt, num_steps=NUM_STEPS,
            store=CheckpointStore(paths.checkpoints, group=group, keep_last=2, attempt=attempt),
            saves=SaveTimer(config.checkpoint.every_steps), contract=ResumeContract.of(config, group),
            heartbeat_every_s=60.0, seed=config.seed, end=ends[attempt] if attempt < len(ends) else None,
            is_kill=kills and attempt % 2 == 1,
            alone_from=NUM_STEPS if config.parallel.sync is Sync.every_step else config.parallel.sync_warmup_steps,
            # Else a slow disk may still write step 15 when 17 stops, and two steps are sooner done again than saved.
            is_asynchronous=kills,
        )  # fmt: skip
        run.probe = Probe(paths, group.rank, attempt, [], sees_inputs=not config.train.compile)
        try:
            if run_main(config, run) is Outcome.done:
                return
        except Killed:
            pass
        group.barrier()


def let_memory_grow() -> None:
    """Every search for a micro-batch would find a larger one than the search before: a run must search once."""
    searches, fits = itertools.count(2), Trials.fits
    room: dict[str, int] = {}

    def limited(trials: Trials, size: int, *, is_evaluation: bool = False) -> bool:
        place = f"{trials.run.paths.folder} {trials.run.attempt}"
        most = room.setdefault(place, 2 if place.endswith(" 0") else next(searches) * 2)
        return fits(trials, size, is_evaluation=is_evaluation) and (is_evaluation or size <= most)

    Trials.fits = limited  # type: ignore[method-assign]


def _overflow(paths: RunPaths, world_size: int) -> int | None:
    """A step past the second in which the loss scale fell, with a step left after it."""
    scales = {step: float(leaves["scaler.scale"]) for step, leaves in read_trace(paths, world_size).steps(0).items()}
    after = {step for step in scales if (step - 1) % EVAL_EVERY_STEPS}  # a stop is asked for one step before
    fell = [step for step in sorted(after) if 3 <= step < NUM_STEPS and scales[step] < scales[step - 1]]
    return fell[0] if fell else None


def main(name: str, rank: int, folder: Path, seed: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cell = CELLS[name]
    world_size = int(cell["ranks"])
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    env = read_rank_env({"TORCHELASTIC_RUN_ID": "t", **{key: str(value) for key, value in words.items()}})
    config = composed(list(overrides(cell)))
    validate(config)
    if config.train.is_batch_auto:
        let_memory_grow()
    point = POINTS[cell["point"]]
    others = random.Random(seed).sample([step for step in range(1, NUM_STEPS) if step != point], 4)
    runs = {"once": [point], "five": sorted([point, *others])}
    rendezvous = folder / "rendezvous.json"
    with process_group(env, torch.device("cpu"), rendezvous=rendezvous, address=None, timeout_s=100) as group:
        undisturbed = RunPaths(folder / "undisturbed")
        play(config, env, group, undisturbed, [])
        group.barrier()
        if cell["precision"] == "fp16":
            step = group.broadcast(_overflow(undisturbed, world_size) if group.is_rank_zero else None)
            assert step is not None, "no overflow: nothing is shown about one right before a save"
            runs["overflow"] = [step]
        for label, ends in runs.items():
            play(config, env, group, RunPaths(folder / label), ends, kills=label == "five")
            group.barrier()
    if rank == 0:
        (folder / "runs.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
