"""Drives the command line against a real Slurm, as a person would, and reads what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import warm
from tests.journals import JOURNALS, journal_records
from tests.slurm.testbed.cluster import SlurmCluster

# A look takes 0.2 s of a core, which the runs need: where nothing has changed, one in so many seconds.
_STATUS_S = 3.0
# Four ranks start in a minute where ten others want the two cores; the rest is margin, waited out on failure only.
_PATIENCE_S = 240.0
_KILLED_AFTER_SBATCH = """
import os, signal, sys
from hpc_trainer.launch import submitit_bridge
left, real = int(sys.argv.pop(1)), submitit_bridge.submit_script

def killed(*args, **kwargs):
    global left
    answer = real(*args, **kwargs)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer

submitit_bridge.submit_script = killed
from hpc_trainer.cli.main import main
main()
"""


@dataclass
class Driver:
    """`hpc-trainer` in a folder of its own, with the test Slurm on PATH."""

    slurm: SlurmCluster
    folder: Path
    seen: dict[str, set[str]] = field(default_factory=dict)
    """Sweep -> every state that `status` has shown of its runs while they were waited for."""
    folders: dict[str, Path] = field(default_factory=dict)
    """Sweep -> the folder of its only run, once it was asked for."""

    @property
    def runs(self) -> Path:
        """The runs' folder as it truly is; commands and jobs may see it through clients of a shared folder."""
        return self.slurm.true_folder(self.folder)

    @property
    def env(self) -> dict[str, str]:
        # A mount of NFS or Lustre tells its age by its type and options, one that plays them does not.
        age = {"HPC_TRAINER_CACHE_AGE_S": f"{self.slurm.cache_age_s:g}"} if self.slurm.spec.share else {}
        return {
            **self.slurm.env,
            **age,
            "HPC_TRAINER_RUNS": str(self.slurm.runs_folder(self.folder)),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "PYTHONPATH": str(self.folder),
        }

    def run_killed_after_sbatch(self, number: int, *words: str) -> None:
        """The command, killed with -9 when its `number`th sbatch has returned and before the answer is stored."""
        done = subprocess.run(
            [sys.executable, "-c", _KILLED_AFTER_SBATCH, str(number), *words],
            cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, (done.returncode, done.stdout, done.stderr)

    def run(self, *words: str, check: bool = True, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        # A start of Python with what a command imports takes a second of a core; jobs start as ever.
        done = warm.run(
            [sys.executable, "-m", "hpc_trainer", *words], cwd=self.folder, env=self.env, text=True, timeout=timeout_s
        )
        if check and done.returncode:
            raise AssertionError(f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json").stdout)

    def submit(self, *words: str) -> Any:
        return self.json("submit", "cluster=testbed", *words)

    def status(self, sweep: str) -> dict[str, dict[str, Any]]:
        """run id -> its row of `status --json`."""
        return {run["run_id"]: run for run in self.json("status", sweep)["runs"]}

    def only_run(self, sweep: str) -> dict[str, Any]:
        (run,) = self.status(sweep).values()
        return run

    def wait_for_states(self, sweep: str, *states: str, timeout_s: float = _PATIENCE_S) -> dict[str, dict[str, Any]]:
        """Waits until every run of the sweep is in one of `states`."""
        latest: dict[str, dict[str, Any]] = {}
        signs, looked = "", 0.0

        def reached() -> bool:
            nonlocal signs, looked
            before, signs = signs, self._signs(sweep)
            if signs == before and time.monotonic() - looked < _STATUS_S:
                return False
            looked = time.monotonic()
            latest.update(self.status(sweep))
            self.seen.setdefault(sweep, set()).update(run["state"] for run in latest.values())
            return all(run["state"] in states for run in latest.values())

        try:
            self.slurm.wait_for(reached, timeout_s, f"{sweep} in {states}")
        except Exception as error:
            raise AssertionError(f"{error}\n{json.dumps(latest, indent=1)}\n{self.all_logs()}") from error
        return latest

    def _signs(self, sweep: str) -> str:
        """What changes when a run of the sweep does, as text: the queue, journals and markers."""
        queue = self.slurm.run("squeue", "-h", "-t", "all", "-o", "%i %T", check=False).stdout
        files = [
            path for path in (self.runs / sweep).glob("*/*")
            if path.name in ("DONE", "CANCEL", "HOLD") or path.match(JOURNALS)
        ]  # fmt: skip
        return queue + " ".join(f"{path} {path.stat().st_size}" for path in sorted(files))

    def run_folder(self, sweep: str) -> Path:
        """Return the folder of the sweep's only run.

        It is asked for once: beside four ranks a `status` takes seconds, in which a short run has ended.
        """
        if sweep not in self.folders:
            self.folders[sweep] = self.runs / sweep / str(self.only_run(sweep)["run_id"])
        return self.folders[sweep]

    def wait_for_step(self, sweep: str, step: int, timeout_s: float = _PATIENCE_S) -> None:
        """Waits until the sweep's only run has come as far as `step`; reads its heartbeat, asks Slurm nothing."""
        beat = self.run_folder(sweep) / "heartbeat.json"
        self.slurm.wait_for(
            lambda: beat.exists() and json.loads(beat.read_text())["step"] >= step, timeout_s, f"step {step} of {sweep}"
        )

    def preempt_at(self, sweep: str, step: int, job_id: str) -> int:
        """Has the sweep's only run preempted once it has come as far as `step`; the id of the job that wants its nodes.

        Its first rank stands still until Slurm has begun: a short run would end before, where the machine is busy.
        """
        self.wait_for_step(sweep, step)
        starts = self.attempts(sweep, "start")
        pid = starts[-1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        ends = self.attempts(sweep, "end")
        assert len(ends) < len(starts), f"the run of {sweep} ended before it was seen at step {step}: {ends}"
        preemptor = self.slurm.preempt()
        self.slurm.wait_for(lambda: "PreemptTime" in self.slurm.job(job_id), 60, f"the preemption of {job_id} to begin")
        os.kill(pid, signal.SIGCONT)
        return preemptor

    def start_again(self, job_id: str) -> None:
        """A requeued job that is alone starts in two seconds instead of two minutes.

        But not beside what its last start left on the nodes: slurmd would refuse it and Slurm drain the node
        ("Duplicate jobid").
        """
        self.slurm.wait_for_state(job_id, "PENDING")
        self.slurm.wait_for(lambda: self.slurm.job_processes() == [], 60, "the end of the last start's processes")
        self.slurm.start_now(job_id)

    def attempts(self, sweep: str, event: str) -> list[dict[str, Any]]:
        return journal_records(self.run_folder(sweep), event)

    def final_state(self, sweep: str) -> bytes:
        """The bytes of weights, optimizer and scaler at the end."""
        newest = max((self.run_folder(sweep) / "checkpoints").glob("step-*"))
        return (newest / "state.safetensors").read_bytes()

    def losses(self, sweep: str) -> dict[int, float]:
        lines = (self.run_folder(sweep) / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}

    def all_logs(self) -> str:
        files = sorted(self.runs.glob("*/*/logs/*")) + sorted(self.runs.glob("*/slurm/*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files)
