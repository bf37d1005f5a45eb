"""What a command's runs leave is ended with it: asked first, then killed, and nobody else's processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_trainer.record.processes import process_name
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.verify.own_runs import end_local, processes_of
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

# Says that it is ready, and sleeps; with "deaf" through SIGTERM too.
SLEEPER = """
import signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(300)
"""


class Processes:
    """Processes that look as if they were a sweep's."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", SLEEPER, *words], stdout=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    for process in made.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def sweep(tmp_path: Path) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=local"))


def test_a_run_is_cancelled_asked_and_then_killed(sweep: SweepOnDisk, processes: Processes) -> None:
    queue = processes.start("hpc_trainer.launch.local_queue", "--sweep-dir", str(sweep.paths.folder))
    rank = processes.start("deaf", "--sweep-dir", str(sweep.paths.folder), "--run", "x")
    another = processes.start("--sweep-dir", str(sweep.paths.folder) + "-2")
    reader = processes.start(str(sweep.paths.folder / "logs"), str(sweep.paths.folder))
    sweep.submit(process_name(queue.pid), "local", age_s=1.0)
    sweep.start(pid=rank.pid, executor="local")
    assert {process.pid for process in processes_of([sweep.paths])} == {queue.pid, rank.pid}
    said: list[str] = []
    begin = time.monotonic()
    end_local([sweep.paths], grace_s=0.5, say=said.append)
    assert time.monotonic() - begin >= 0.5
    assert processes_of([sweep.paths]) == []
    assert (another.poll(), reader.poll()) == (None, None)
    assert sweep.run().marker("CANCEL").exists()
    assert said == ["ending the sweep run .."]
    assert read_status(sweep.paths).runs[0].state is RunState.CANCELLED


def test_what_has_ended_by_itself_is_left_as_it_is(sweep: SweepOnDisk) -> None:
    sweep.submit("host:1:1.0", "local")
    sweep.done()
    said: list[str] = []
    end_local([sweep.paths], say=said.append)
    assert not sweep.run().marker("CANCEL").exists()
    assert said == []


def test_a_second_interrupt_kills_at_once(
    sweep: SweepOnDisk, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = processes.start("deaf", "--sweep-dir", str(sweep.paths.folder))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_trainer.verify.own_runs._ask", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        end_local([sweep.paths], grace_s=60.0)
    assert time.monotonic() - begin < 30.0
    assert processes_of([sweep.paths]) == []
    rank.wait(5.0)
