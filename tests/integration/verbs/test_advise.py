"""Runs that are made slow, or ask for too much, on purpose: each fault is named. Healthy runs are told nothing.

The real worker plays each run on this machine. Where Slurm has a part in the fault, its variables are there as srun
sets them. What a rank waits for sleeps, so the load of the machine changes no verdict.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpc_trainer.observe.advice import Advice, advise_runs
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import RunSpec, append_specs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests import warm
from tests.unit.record.builders import make_spec

ROOT = Path(__file__).parents[3]
_DATA = ("data=custom", "data._target_=tests.integration.verbs.paced.build")
_NET = ("model=custom", "model._target_=tests.integration.verbs.paced.Net")
_BASE = (
    "experiment=digits", "cluster=local", "trust=[tests]", "train.global_batch_size=16", "train.eval_every_steps=0",
    "monitor.telemetry_every_s=0.1", "monitor.heartbeat_every_s=0.1", "hardware.time_limit_min=60",
)  # fmt: skip
_SLURM = ("cluster=slurm", "cluster.executor=slurm")
PACED = (*_BASE, *_DATA, *_NET)
STEADY = (*PACED, "+model.kwargs.sleep_s=0.03", "train.num_steps=80")
"""80 steps of 30 ms, as a device would take them."""


class Case(NamedTuple):
    """A run, and the rules that name what is wrong with it, each with a word that is proposed."""

    words: tuple[str, ...]
    rules: dict[str, str] = {}  # noqa: RUF012
    ranks: int = 1
    count: int = 1
    """Runs alike, but for their seed."""
    kill: tuple[signal.Signals, int] | None = None
    """Signal to rank 0 once it has done so many steps; then the run is started again."""


FAULTS = {
    "slow data": Case(
        (*PACED, "+data.kwargs.sleep_s=0.005", "train.num_steps=40", "monitor.log_every_steps=5"),
        {"data-workers": "data.num_workers="},
    ),
    "a save each step, in the way": Case(
        (*PACED, "+model.kwargs.sleep_s=0.01", "+model.kwargs.width=700", "checkpoint.every_steps=1",
         "checkpoint.asynchronous=false", "train.num_steps=80"),
        {"saves-wait": "checkpoint.asynchronous=true", "saves-often": "checkpoint.every=auto"},
    ),
    "an evaluation each five steps": Case(
        (*STEADY, "+data.kwargs.eval_sleep_s=0.005", "train.eval_every_steps=5", "train.num_steps=40"),
        {"evaluations": "train.eval_every_steps="},
    ),
    "a line each step": Case(
        (*PACED, "+model.kwargs.sleep_s=0.001", "monitor.log_every_steps=1", "train.num_steps=700"),
        {"log-lines": "monitor.log_every_steps="},
    ),
    "killed long after its last save": Case(
        (*STEADY, "checkpoint.every_steps=1000", "train.num_steps=120"),
        {"saves-seldom": "checkpoint.every_steps="},
        kill=(signal.SIGKILL, 80),
    ),
    "asks for much": Case(
        (*STEADY, *_SLURM, "hardware.cpus_per_task=16", "hardware.mem_gb_per_node=64", "hardware.time_limit_min=1440"),
        {"idle-cpus": "hardware.cpus_per_task=", "host-memory": "hardware.mem_gb_per_node=",
         "time-limit-long": "hardware.time_limit_min=5"},
    ),
    "a slow rank": Case(
        (*STEADY, *_SLURM, "+model.kwargs.slow_rank=1", "hardware.tasks_per_node=2",
         "monitor.log_every_steps=2", "train.num_steps=54"),
        {"straggler": "hardware.exclude="},
        ranks=2,
    ),
    "a rank that does nothing": Case(
        ("train.command='python {ROOT}/tests/integration/verbs/half_idle.py {run.dir}'", "cluster=local",
         "hardware.tasks_per_node=2", "monitor.telemetry_every_s=0.1"),
        {"idle-ranks": "hardware.tasks_per_node=1"},
        ranks=2,
    ),
    "many runs of a moment": Case(
        ("train.command='sleep 0.1'", *_SLURM, "monitor.telemetry_every_s=0"),
        {"short-runs": "local.max_parallel=N"},
        count=10,
    ),
}  # fmt: skip
HEALTHY = {
    "steady": Case((*STEADY, "train.eval_every_steps=40")),
    "mlp": Case((*_BASE, "model=mlp", "train.num_steps=150", "train.eval_every_steps=50")),
    "cnn": Case((*_BASE, "model=cnn", "train.num_steps=60", "train.eval_every_steps=30")),
    "gpt": Case((*_BASE, "experiment=gpt_bytes", "model.num_layers=1", "model.embed_dim=32", "model.num_heads=2",
                 "data.seq_len=32", "train.num_steps=40", "train.eval_every_steps=0", "data.eval_fraction=0.002")),
    "two ranks": Case((*STEADY, *_SLURM, "hardware.tasks_per_node=2"), ranks=2),
    "fsdp": Case((*STEADY, *_SLURM, "hardware.tasks_per_node=2", "parallel=fsdp"), ranks=2),
    "bf16": Case((*STEADY, "precision=bf16")),
    "accumulated, with loaders": Case((*STEADY, "train.grad_accum_steps=4", "train.num_steps=30", "data.num_workers=1",
                                       "hardware.cpus_per_task=2")),
    "preempted": Case((*STEADY, "checkpoint.every_steps=20"), kill=(signal.SIGTERM, 30)),
    "killed": Case((*STEADY, "checkpoint.every_steps=20"), kill=(signal.SIGKILL, 45)),
    "a program": Case(("train.command='sleep 1'", "cluster=local", "monitor.telemetry_every_s=0.1")),
    "on Slurm": Case((*STEADY, *_SLURM, "hardware.mem_gb_per_node=2")),
}  # fmt: skip

LONG = (
    "cnn", "gpt", "two ranks", "fsdp", "bf16", "accumulated, with loaders", "killed", "many runs of a moment",
    "mlp", "preempted", "on Slurm", "a line each step", "asks for much", "a slow rank", "a save each step, in the way",
)  # fmt: skip


def _chosen(cases: Mapping[str, Case]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LONG), id=name.replace(" ", "-")) for name in cases]


class Player:
    """Plays the runs of the tests that were chosen, three at a time, each in a sweep of its own."""

    def __init__(self, runs_dir: Path, names: Iterable[str]) -> None:
        self._pool = ThreadPoolExecutor(max_workers=3)
        self._played = {}
        for name in names:
            sweep, case = SweepPaths(runs_dir / name.replace(" ", "-").replace(",", "")), {**FAULTS, **HEALTHY}[name]
            sweep.folder.mkdir(parents=True)
            words = [word.replace("{ROOT}", str(ROOT)) for word in case.words]
            specs = [make_spec(*words, seed=seed) for seed in range(case.count)]
            append_specs(sweep, specs)
            self._played[name] = sweep, self._pool.submit(_play, sweep, specs, case)

    def advice(self, name: str) -> list[Advice]:
        """What the first run of a case is told, once it is complete."""
        sweep, played = self._played[name]
        played.result(timeout=500)
        status = read_status(sweep, is_look=True)
        found, notes = advise_runs(status, [*status.specs])
        assert notes == []
        assert {each.state for each in found} == {RunState.COMPLETED}
        return list(found[0].advice)

    def end(self) -> None:
        """Waits for what is at work."""
        self._pool.shutdown(cancel_futures=True)


def _play(sweep: SweepPaths, specs: Sequence[RunSpec], case: Case) -> None:
    for spec in specs:
        if case.kill is not None:
            ranks = _start(sweep, spec, case, restart=0)
            number, step = case.kill
            _await_step(sweep, spec, step, ranks)
            os.kill(ranks[0].pid, number)
            _end(ranks)
        codes = _end(_start(sweep, spec, case, restart=1 if case.kill else 0))
        assert codes == [0] * case.ranks, _logs(sweep, spec)


def _start(sweep: SweepPaths, spec: RunSpec, case: Case, *, restart: int) -> list[subprocess.Popen[str]]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    argv = [sys.executable, "-m", "hpc_trainer.worker", "--sweep-dir", str(sweep.folder), "--run", spec.run_id]
    started = []
    for rank in range(case.ranks):
        env = {**kept, "PYTHONPATH": str(ROOT)}
        if case.ranks > 1 or "cluster=slurm" in case.words:
            env |= {
                "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}", "SLURM_NTASKS": f"{case.ranks}",
                "SLURM_NTASKS_PER_NODE": f"{case.ranks}", "SLURM_NODEID": "0", "SLURM_NNODES": "1",
                "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": f"{restart}", "SLURMD_NODENAME": "n7",
            }  # fmt: skip
        pipe = subprocess.PIPE
        started.append(warm.Popen(argv, cwd=sweep.folder, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    return started


def _end(ranks: Sequence[subprocess.Popen[str]]) -> list[int]:
    for each in ranks:
        each.communicate(timeout=300)
    return [each.returncode for each in ranks]


def _await_step(sweep: SweepPaths, spec: RunSpec, step: int, ranks: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 200
    beat = sweep.run(spec.run_id).heartbeat
    while time.monotonic() < deadline and ranks[0].poll() is None:
        if beat.exists() and json.loads(beat.read_text())["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"it never did {step} steps\n{_logs(sweep, spec)}")


def _logs(sweep: SweepPaths, spec: RunSpec) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted(sweep.run(spec.run_id).logs.glob("*.log")))


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Player]:
    chosen = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    found = Player(tmp_path_factory.mktemp("runs"), [item.callspec.params["name"] for item in chosen])
    yield found
    found.end()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", _chosen(FAULTS))
def test_a_planted_fault_is_named(player: Player, name: str) -> None:
    case = FAULTS[name]
    found = {each.rule: each for each in player.advice(name)}
    for rule, word in case.rules.items():
        assert rule in found, f"{name}: only {[each.line for each in found.values()]}"
        assert word in (" ".join(found[rule].set) or found[rule].do), found[rule].line
        assert found[rule].gain.share >= 0.05
    assert set(found) == set(case.rules), [each.line for each in found.values()]


@pytest.mark.parametrize("name", _chosen(HEALTHY))
def test_a_healthy_run_is_told_nothing(player: Player, name: str) -> None:
    assert [each.line for each in player.advice(name)] == []
