"""How many requests a command and a run make of the file server: counted where a server would count them.

docs/shared_folder.md gives the figures of longer plays.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.observe import sampler
from hpc_trainer.observe.sampler import Sampler
from hpc_trainer.observe.telemetry import Host
from hpc_trainer.record import metrics as metrics_log
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.metrics import MetricsLog, read_metrics
from hpc_trainer.record.shared_folder import cache_age_s
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training import reporter as life_signs
from hpc_trainer.training.reporter import LifeSigns
from tests.shared_folder.clients import CALM, ROOT, Share
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

Start = Callable[..., tuple[Path, Path]]
_LOOK = """\
import sys
from pathlib import Path
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.status import read_status

status = read_status(SweepPaths(Path(sys.argv[1])), is_look=True)
assert status.counts == {"COMPLETED": int(sys.argv[2])}, status.counts
"""


def metadata(requests: dict[str, int]) -> int:
    """Return the requests but those that carry the content of files."""
    return sum(count for name, count in requests.items() if name not in ("READ", "WRITE", "COMMIT"))


@pytest.mark.parametrize("num_runs", [400, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_a_status_asks_for_each_run_once_and_then_for_almost_none(tmp_path: Path, num_runs: int) -> None:
    """At most 3 requests a run at first sight, and 0.1 later, from a client that remembers nothing."""
    with Share(tmp_path / "share", "nfs4", settings=CALM) as share:
        sweep = SweepOnDisk(share.backing / "runs" / "sweep", make_specs(num_runs, "cluster=slurm"))
        slurm = FakeSlurm(tmp_path / "slurm")
        slurm.answer("squeue", "")
        slurm.answer("sacct", "")
        sweep.submit()
        for index in range(num_runs):
            sweep.done(index)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{slurm.bin}:{os.environ['PATH']}"}
        counted = []
        for name in ("first", "second"):
            client = share.client(name)
            assert cache_age_s(client.mountpoint) == 60.0
            folder = client.mountpoint / "runs" / "sweep"
            subprocess.run([sys.executable, "-c", _LOOK, str(folder), str(num_runs)], env=environment, check=True)
            counted.append(metadata(client.counts()["requests"]) / num_runs)
        print(num_runs, counted)
        # Its own files, whatever the number of its runs: 18 to 20, and 21 where a cache's age passed meanwhile.
        of_the_sweep = 30 / num_runs
        assert counted[0] <= 3.0 + of_the_sweep, counted
        assert counted[1] <= 0.1 + of_the_sweep, counted


class Clock:
    """A clock of this machine that goes faster, from `begin` seconds after it was made."""

    def __init__(self, speed: float, begin_s: float) -> None:
        self._speed, self._begin_s = speed, begin_s
        self._real = time.monotonic()
        self._age = 0.0

    def start(self) -> None:
        """From now on it goes; before, its hands stand at 0."""
        self._real, self._age = time.monotonic(), self._begin_s

    def monotonic(self) -> float:
        """Return the seconds since it was made."""
        return self._age + (self._speed * (time.monotonic() - self._real) if self._age else 0.0)

    def time(self) -> float:
        """Return the same since the epoch."""
        return 1e9 + self.monotonic()


class _Counters:
    def read(self, now: float) -> Host:
        return Host(cpus=1.0, rss_bytes=1_000_000_000)


_SPEED = 60.0
_BEAT_S = 10.0  # between two heartbeats, from the fifth minute on
_STEP_S, _LOG_EVERY = 1.0, 2  # a line of metrics every two seconds, as in a run with steps of 0.2 s


@pytest.mark.parametrize(
    ("kind", "num_ranks", "minutes"),
    [
        ("nfs4", 8, 5),
        *(
            pytest.param(kind, num_ranks, 60, marks=[pytest.mark.long, pytest.mark.timeout(600)])
            for kind in ("nfs3", "nfs4")
            for num_ranks in (1, 8)
        ),
    ],
)
def test_a_run_asks_at_most_once_a_second(
    kind: str, num_ranks: int, minutes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Play what rank 0 and the samplers of all ranks write, by a clock and cache ages that go 60 times as fast.

    From the fifth minute on. Saves are not in it: each is some 70 requests.
    """
    clock = Clock(_SPEED, 300.0)
    for module in (life_signs, metrics_log, sampler):
        monkeypatch.setattr(module, "time", clock)
    with Share(tmp_path / "share", kind, scale=1 / _SPEED, settings=CALM) as share:
        client = share.client("node")
        paths = RunPaths(client.mountpoint / "runs" / "sweep" / "run")
        for folder in (paths.logs, paths.checkpoints, paths.telemetry):
            folder.mkdir(parents=True)
        Journal(paths).start(
            0, job_id="7", restart_count=0, node="n1", pid=1, executor="slurm", world_size=num_ranks
        )  # fmt: skip
        signs = LifeSigns(
            paths=paths, env=read_rank_env({}), attempt=0, num_steps=10**6, every_s=2.0, saves=SaveTimer(10**6),
            stop=StopFlag(),
        )  # fmt: skip
        log = MetricsLog(paths.metrics)
        samplers = [
            Sampler(
                paths=paths, env=dataclasses.replace(read_rank_env({}), rank=rank), attempt=0, every_s=5.0,
                step=lambda: 1, devices=lambda notes: None, host=lambda notes: _Counters(), clock=clock.time,
                _first=0.0,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        signs.start(0)
        clock.start()
        begin = clock.monotonic()
        due = [begin + 5.0 * rank / num_ranks for rank in range(num_ranks)]
        before, step = client.counts()["requests"], 0
        while clock.monotonic() < begin + 60 * minutes:
            step += 1
            signs.tell(step)
            if step % _LOG_EVERY == 0:
                log.append(step, {"loss": 1.0, "time": clock.time()}, may_wait=True)
            for rank, each in enumerate(samplers):
                if clock.monotonic() >= due[rank]:
                    due[rank] += 5.0
                    each.sample(_Counters(), None)
            time.sleep(max(0.0, (begin + step * _STEP_S - clock.monotonic()) / _SPEED))
        after = client.counts()["requests"]
        # Of a machine that is busy, the seconds pass without the work that belongs to them: its heartbeats count them.
        num_beats = after["RENAME"] - before.get("RENAME", 0)
        rate = (metadata(after) - metadata(before)) / (num_beats * _BEAT_S)
        print(kind, num_ranks, f"{rate:.2f} a second, {num_beats} heartbeats", after)
        log.flush()
        assert len(read_metrics(paths.metrics)) == step // _LOG_EVERY
        assert rate <= 1.0, (rate, after)
