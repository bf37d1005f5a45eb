"""Fixtures: the command line in a folder of its own, on the local executor, forked from a warm process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hpc_trainer.cli.main import app
from hpc_trainer.record.checkpoint_folders import committed
from tests import warm
from tests.journals import JOURNALS, journal_records

PACED_DIGITS = """
import time
from pathlib import Path
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.training.data.digits import build as digits

class Paced:
    def __init__(self, inner):
        self._inner = inner
        self.input_shape, self.num_classes = inner.input_shape, inner.num_classes
    def __len__(self):
        return len(self._inner)
    def __getitems__(self, indices):
        if Path("slow").exists():
            time.sleep(0.05)
        return self._inner.__getitems__(indices)

def build(split):
    return Paced(digits(DigitsConfig(), split)) if split == "train" else digits(DigitsConfig(), split)
"""
PACED = ("experiment=digits", "data=custom", "data._target_=paced_digits.build", "data.num_workers=0", "--trust",
         "paced_digits")  # fmt: skip
"""Words of a training on digits that takes 0.05 s a step while there is a file `slow` (LocalDriver.slow_digits)."""
_READING = frozenset({"status", "results", "best", "why", "sweeps"})


@dataclass
class LocalDriver:
    """`hpc-trainer` as a person types it, with sweeps under `folder`/runs, or `runs_dir`, and no Slurm."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    runs_dir: Path | None = None

    @property
    def runs(self) -> Path:
        """The folder of sweeps."""
        return self.runs_dir or self.folder / "runs"

    @property
    def env(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
        return {
            **kept,
            "SLURM_TMPDIR": os.environ["SLURM_TMPDIR"],  # that of the tests: tests/conftest.py
            "HPC_TRAINER_RUNS": str(self.runs),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "PYTHONPATH": str(self.folder),
            # Ranks are forked, and each test freezes the code anew: to compile all of it would be 0.5 s of CPU.
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = warm.Popen(
            [sys.executable, "-m", "hpc_trainer", *words],
            cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def end_what_is_left(self) -> None:
        """Ends commands that a failed test left, which would train on beside the tests after it."""
        for process in self.started:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()
            with process:  # closes its pipes
                pass

    def run(self, *words: str, check: bool = True, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        done = warm.run(
            [sys.executable, "-m", "hpc_trainer", *words], cwd=self.folder, env=self.env, text=True, timeout=timeout_s
        )
        if check and done.returncode:
            raise AssertionError(f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}\n{self.logs()}")
        return done

    def json(self, *words: str) -> Any:
        """Return what a command prints as JSON.

        A command that only reads is called in this process, because a process of its own takes 0.5 s of CPU more.
        `run` starts a process for each command.
        """
        if words[0] not in _READING:
            return json.loads(self.run(*words, "--json").stdout)
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            done = CliRunner().invoke(app, [*words, "--json"], env={**dict.fromkeys(os.environ), **self.env})
        finally:
            os.chdir(before)
        if done.exit_code:
            raise AssertionError(
                f"{words} ended with {done.exit_code}: {done.exception!r}\n{done.output}\n{self.logs()}"
            )
        return json.loads(done.stdout)

    def train(self, *words: str) -> Any:
        return self.json("train", *words)

    def slow_digits(self) -> Path:
        """Write the module for PACED, and the file that makes it slow: few steps are enough to be stopped in them."""
        (self.folder / "paced_digits.py").write_text(PACED_DIGITS)
        slow = self.folder / "slow"
        slow.touch()
        return slow

    def run_folder(self, sweep: str) -> Path:
        (folder,) = {path.parent for path in (self.runs / sweep).glob(f"*/{JOURNALS}")}
        return folder

    def events(self, sweep: str, event: str) -> list[dict[str, Any]]:
        return journal_records(self.run_folder(sweep), event)

    def final_state(self, sweep: str) -> bytes:
        newest = max((self.run_folder(sweep) / "checkpoints").glob("step-*"))
        return b"".join(path.read_bytes() for path in sorted(newest.glob("s*.safetensors")))  # state, and shards

    def metrics(self, sweep: str, key: str) -> dict[int, float]:
        lines = (self.run_folder(sweep) / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record[key] for record in map(json.loads, lines) if key in record}

    def wait_for_step(self, sweep: str, step: int, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for path in (self.runs / sweep).glob("*/heartbeat.json"):
                if json.loads(path.read_text())["step"] >= step:
                    return
            time.sleep(0.02)
        raise AssertionError(f"{sweep} did not reach step {step} in {timeout_s} s\n{self.logs()}")

    def wait_for_checkpoint(self, sweep: str, timeout_s: float = 60) -> int:
        """Wait until a checkpoint is committed, and return the newest one's step."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            steps = [step for folder in (self.runs / sweep).glob("*/checkpoints") for step, _ in committed(folder)]
            if steps:
                return max(steps)
            time.sleep(0.02)
        raise AssertionError(f"{sweep} committed no checkpoint in {timeout_s} s\n{self.logs()}")

    def signal_rank(self, sweep: str, number: signal.Signals) -> None:
        """Sends a signal to rank 0 of the newest attempt."""
        os.kill(self.events(sweep, "start")[-1]["pid"], number)

    def logs(self) -> str:
        files = sorted(self.folder.glob("runs/*/*/logs/*")) + sorted(self.folder.glob("runs/*/local/*"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalDriver]:
    driver = LocalDriver(tmp_path)
    yield driver
    driver.end_what_is_left()
