"""Where the time of a run goes, by the shared loop and by a loop of one's own: classes, sums, steps, heartbeats."""

from __future__ import annotations

import json
import time
from pathlib import Path

from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import Kind, read_spent
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from tests.unit.training.train_here import config_of, train_here

WORDS = ("model=mlp", "train.num_steps=20", "train.eval_every_steps=10", "checkpoint.every_steps=5")


def test_the_shared_loop(tmp_path: Path) -> None:
    begin = time.monotonic()
    stopped = train_here(config_of(*WORDS), tmp_path / "run", stop_at=12)
    run = train_here(config_of(*WORDS), tmp_path / "run", attempt=1)
    whole_s = time.monotonic() - begin
    for each in (stopped, run):
        seconds = each.spans.seconds()
        had = {kind for kind, spent in seconds.items() if spent > 0}
        assert had >= {Kind.start_up, Kind.restore, Kind.data_wait, Kind.step, Kind.save_stall, Kind.evaluation}
        assert not had & {Kind.hang, Kind.redone, Kind.program, Kind.compile}
    assert sum(run.spans.seconds().values()) <= whole_s
    first = stopped.step  # some steps later than it was asked to
    assert (stopped.steps_done, run.steps_done, run.step) == (first, 20 - first, 20)
    steps = [step for kind, _, _, step in run.spans.recent() if kind is Kind.step and step is not None]
    assert steps == list(range(first, 20))
    evaluations = [step for kind, _, _, step in run.spans.recent() if kind is Kind.evaluation]
    assert evaluations == [20]
    waits = [kind for kind, *_ in run.spans.recent() if kind is Kind.data_wait]
    assert len(waits) == 20 - first
    (spent,) = read_spent(run.paths).values()  # no worker: the heartbeat alone
    assert (spent.attempt, spent.steps_done) == (1, 20 - first)
    assert 0 < spent.seconds["step"] <= run.spans.seconds()[Kind.step] + 0.001  # rounded; what follows counts too
    assert "spent" in json.loads(run.paths.heartbeat.read_text())


def test_a_loop_of_one_s_own(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    for folder in (paths.folder, paths.checkpoints):
        folder.mkdir(mode=0o700)
    group = RankGroup()
    run = RunContext(
        paths=paths, env=read_rank_env({}), group=group, stop=StopFlag(), attempt=0, num_steps=3,
        store=CheckpointStore(paths.checkpoints, group=group, keep_last=1, attempt=0),
    )  # fmt: skip
    time.sleep(0.02)
    run.restore(value=1)
    for step in range(1, 4):
        time.sleep(0.02)
        assert not run.should_stop(step)
        with run.spans.within(Kind.evaluation):
            time.sleep(0.01)
    run.save(3, value=1)
    seconds = run.spans.seconds()
    assert seconds[Kind.start_up] >= 0.02
    assert seconds[Kind.step] >= 0.06
    assert seconds[Kind.evaluation] >= 0.03
    assert seconds[Kind.restore] > 0
    assert seconds[Kind.save_stall] > 0
    assert seconds[Kind.data_wait] == 0
