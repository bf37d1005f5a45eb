"""A run whose time limit ends attempt after attempt: a real worker does not begin another one that hardly trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.record.journal import Journal, read_failure
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import append_spent, spent_so_far
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import DONE, RunState
from tests import warm
from tests.unit.record.builders import make_spec
from tests.unit.record.sweeps import SweepOnDisk

ROOT = Path(__file__).parents[3]
WORDS = (
    "experiment=digits", "cluster=slurm", "train.num_steps=20", "train.eval_every_steps=0", "schedule.warmup_steps=0",
    "hardware.time_limit_min=1",
)  # fmt: skip
PROGRAM = ("cluster=slurm", "hardware.time_limit_min=1", "train.command='true'")


def _timed_out(folder: Path, spec: RunSpec, *, training_s: float = 0.3, attempts: int = 3) -> SweepOnDisk:
    """Return a sweep whose run had attempts of 20 s each, ended by the time limit."""
    sweep = SweepOnDisk(folder / "runs" / "short", [spec])
    sweep.submit()
    for attempt in range(attempts):
        sweep.start(attempt=attempt, resumed=attempt)
        seconds = {"start_up": 20.0 - training_s, "step": training_s}
        append_spent(sweep.run(), attempt, attempt + 1, spent_so_far(seconds.items(), steps_done=1))
        sweep.end(attempt=attempt, state=RunState.REQUEUED, cause="timeout", saved_step=attempt + 1)
    return sweep


def _work(sweep: SweepOnDisk, ranks: int = 1) -> list[int]:
    """Start the next attempt's ranks as Slurm would, and return their exit codes."""
    argv = [
        sys.executable, "-m", "hpc_trainer.worker", "--sweep-dir", str(sweep.paths.folder),
        "--run", sweep.specs[0].run_id,
    ]  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    env = {
        **kept, "PYTHONPATH": str(ROOT), "SLURM_NTASKS": f"{ranks}", "SLURM_NTASKS_PER_NODE": f"{ranks}",
        "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_ID": "500", "SLURM_ARRAY_JOB_ID": "500",
        "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "3", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    started = [
        warm.Popen(
            argv, cwd=sweep.paths.folder, env={**env, "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for each in started:
        each.communicate(timeout=250)  # below parallel.timeout_s: no rank waits for one that has left
    return [each.returncode for each in started]


def _end(paths: RunPaths) -> tuple[int, str | None, str]:
    newest = Journal(paths).read()[-1]
    return newest.attempt, newest.cause, str(read_failure(paths.failure(newest.attempt)).get("message"))


@pytest.mark.few(1)
@pytest.mark.parametrize(("words", "ranks"), [(WORDS, 1), ((*WORDS, "hardware=cpu_x2"), 2), (PROGRAM, 1)])
def test_a_run_that_hardly_trains_is_stopped_for_good(tmp_path: Path, words: tuple[str, ...], ranks: int) -> None:
    sweep = _timed_out(tmp_path, make_spec(*words))
    assert 76 in _work(sweep, ranks)
    attempt, cause, message = _end(sweep.run())
    assert (attempt, cause) == (3, "low_goodput")
    assert message == (
        "the time limit of 1 min ended its last 3 attempts, and 1.5 % of their 1 min 0 s was training: less than "
        "cluster.min_goodput=0.05, so it is stopped for good. An attempt spends 20 s on other things than training. To "
        f"continue: hpc-trainer retry {sweep.specs[0].run_id} hardware.time_limit_min=6"
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "training_s", "attempts"),
    [((*WORDS, "cluster.min_goodput=0"), 0.3, 3), (WORDS, 2.0, 3), (WORDS, 0.3, 2)],
)
def test_a_run_without_the_bound_above_it_or_of_few_attempts_goes_on(
    tmp_path: Path, words: tuple[str, ...], training_s: float, attempts: int
) -> None:
    sweep = _timed_out(tmp_path, make_spec(*words), training_s=training_s, attempts=attempts)
    assert _work(sweep) == [0]
    assert sweep.run().marker(DONE).exists()
