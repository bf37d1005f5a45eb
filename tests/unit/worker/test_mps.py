"""NVIDIA's Multi-Process Service of a slot: begun for its own job, ended with it, and no harm where it is missing.

No GPU is there: a stand-in for NVIDIA's program records its calls (tests/mps_stand_in.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.config.schema.cluster import Mps
from hpc_trainer.errors import ConfigError
from hpc_trainer.worker import mps
from hpc_trainer.worker.mps import LOGS, PIPES, start_service
from tests.mps_stand_in import write_stand_in


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Returns a function that puts the stand-in on PATH and returns its record."""
    monkeypatch.delenv(PIPES, raising=False)

    def put(fails: str = "nothing") -> Path:
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        return write_stand_in(tmp_path / "bin", fails)

    return put


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


def _wait_for(has_come: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not has_come():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_service_has_a_private_folder_and_ends_with_the_slot(stand_in: Callable[..., Path]) -> None:
    told = stand_in()
    service = start_service(Mps.on, ["0", "0", "1", "1"])
    assert service is not None
    assert service.names == {"0": "0", "1": "1"}
    pipes = Path(service.variables[PIPES])
    assert set(service.variables) == {PIPES, LOGS}, "no share of the multiprocessors"
    assert len(str(pipes)) < 60, "the path of a socket has at most 107 characters"
    assert oct(pipes.parent.stat().st_mode & 0o777) == "0o700"
    daemon = int((pipes / "pid").read_text())
    service.stop()
    assert told.read_text().splitlines() == [
        f"start 0,1 {pipes} 700", f"start_server -uid {os.getuid()}", "get_server_list", "quit",
    ]  # fmt: skip
    _wait_for(lambda: _is_gone(daemon))
    assert not pipes.parent.exists()


def test_a_stop_signal_for_all_processes_does_not_end_the_service(stand_in: Callable[..., Path]) -> None:
    """Slurm sends it to each process of the job, and the runs are still saving."""
    told = stand_in()
    service = start_service(Mps.auto, ["0"])
    assert service is not None
    daemon = int((Path(service.variables[PIPES]) / "pid").read_text())
    for number in (signal.SIGUSR2, signal.SIGTERM):
        os.kill(daemon, number)
        os.kill(service.keeper.pid, number)
    time.sleep(0.3)
    assert not _is_gone(daemon)
    assert service.keeper.poll() is None
    os.kill(daemon, signal.SIGKILL)
    service.stop()
    assert told.read_text().splitlines()[-1] == "quit"


def test_a_killed_slot_takes_the_service_along(stand_in: Callable[..., Path]) -> None:
    told = stand_in()
    code = (
        "import os, signal\nfrom hpc_trainer.config.schema.cluster import Mps\n"
        "from hpc_trainer.worker.mps import start_service\n"
        "start_service(Mps.on, ['0'])\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    pipes = Path(told.read_text().split()[2])
    _wait_for(lambda: not pipes.parent.exists())
    assert told.read_text().splitlines()[-1] == "quit"


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (None, "there is no nvidia-cuda-mps-control on PATH"),
        ("start", "nvidia-cuda-mps-control -d ended with exit code 1 (an instance is running)"),
        ("server", "its server did not start within 1 s"),
    ],
)
def test_without_it_runs_take_turns_or_the_slot_fails_if_it_was_asked_for(
    stand_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    fails: str | None, why: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(mps, "_SERVER_S", 1.0)
    told = None if fails is None else stand_in(fails)
    assert start_service(Mps.auto, ["0"]) is None
    assert f"runs take turns on their GPU, without NVIDIA's Multi-Process Service: {why}" in capfd.readouterr().out
    with pytest.raises(ConfigError, match=r"pool\.mps=on: .* Use pool\.mps=auto"):
        start_service(Mps.on, ["0"])
    folders = [line.split()[2] for line in (told.read_text().splitlines() if told else []) if line.startswith("start ")]
    assert not any(Path(folder).exists() for folder in folders), "nothing is left behind"


def test_off_and_a_daemon_of_the_site_start_none(
    stand_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = stand_in()
    assert start_service(Mps.off, ["0"]) is None
    monkeypatch.setenv(PIPES, "/run/nvidia-mps")
    assert start_service(Mps.on, ["0"]) is None
    assert not told.exists()


@pytest.mark.parametrize(
    ("gpus", "names"),
    [
        (["1", "1", "0"], {"1": "1", "0": "0"}),
        (["GPU-a", "GPU-a"], {"GPU-a": "GPU-a"}),
        (["2", "2", "3", "3"], {"2": "GPU-cc", "3": "GPU-dd"}),
    ],
)
def test_a_gpu_keeps_its_name_only_if_the_service_gives_it_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str], names: dict[str, str]
) -> None:
    """NVIDIA's documents: with CUDA_VISIBLE_DEVICES=2,3 for the daemon, its clients see devices 0 and 1."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '0, GPU-aa\\n1, GPU-bb\\n2, GPU-cc\\n3, GPU-dd\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert mps._names(gpus) == names
    with pytest.raises(mps.NoServiceError, match="nvidia-smi knows no UUID of GPU 7"):
        mps._names(["7"])
    smi.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(mps.NoServiceError, match="the UUIDs of GPUs 7 are not known"):
        mps._names(["7"])
