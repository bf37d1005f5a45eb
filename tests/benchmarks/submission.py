"""From the keypress to the last sbatch that was accepted, on a real Slurm, beside hydra-submitit-launcher.

The rival gets the same conf/ and the same grid; it takes the resources of its first point for all, so its hardware
axis changes nothing but the configuration. It is stopped when its jobs are accepted: left alone it would wait for the
last of them to end.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.slurm.testbed import bed
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import BedError, Spec

REPEATS = 5
AXES = [
    "hardware=testbed_x1,testbed_x4", "model=mlp,cnn", "optim=adamw,sgd", "schedule=cosine,constant",
    "optim.lr=1e-3,2e-3,3e-3,1e-2", "optim.weight_decay=0,0.1", "train.num_steps=100,200",
]  # fmt: skip
FIXED = ["experiment=digits", "cluster=testbed"]
# Points -> the eighth axis, and the budget in seconds (docs/benchmarks/submission.md).
SIZES = {1024: ("seed=range(4)", 1.5), 10_240: ("seed=range(40)", 6.0)}
COLUMNS = ("accepted s", "min", "max", "prompt s", "budget s", "peak MiB")
# Notes when each sbatch that submits (not --test-only) came back.
_SHIM = """#!/bin/sh
{sbatch} "$@"
code=$?
case "$1" in --test-only) ;; *) [ $code = 0 ] && date +%s.%N >> {log} ;; esac
exit $code
"""
_RIVAL = """
import hydra
from hpc_trainer.config.compose.own_files import conf_dir
from hpc_trainer.config.store import register_schemas
register_schemas()

@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
def main(config):
    print(config.seed)

main()
"""


class Bench:
    """A test Slurm whose jobs wait, and a note of each sbatch that it accepts."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.accepted = folder / "accepted"
        shim = folder / "bin" / "sbatch"
        shim.parent.mkdir()
        real = subprocess.run(
            ["sh", "-c", "command -v sbatch"], env=cluster.env, capture_output=True, text=True, check=True
        )
        shim.write_text(_SHIM.format(sbatch=real.stdout.strip(), log=self.accepted))
        shim.chmod(0o755)
        self.env = {**cluster.env, "PATH": f"{shim.parent}:{cluster.env['PATH']}"}
        cluster.run("scontrol", "update", "partitionname=main", "state=DOWN")  # jobs wait: only submitting is timed

    def ours(self, words: list[str], number: int) -> tuple[float, float, float]:
        """(seconds to the last accepted sbatch, seconds to the prompt, peak MiB)."""
        argv = [sys.executable, "-m", "hpc_trainer", "submit", *FIXED, *words, f"sweep_name=bench{number}"]
        env = {**self.env, "HPC_TRAINER_RUNS": str(self.folder / "runs")}
        self.accepted.unlink(missing_ok=True)
        begin = time.time()
        subprocess.run(argv, cwd=self.folder, env=env, check=True, capture_output=True)
        end = time.time()
        accepted = max(map(float, self.accepted.read_text().split())) - begin
        self.end_all()
        # ru_maxrss of all children: the largest so far; ours run before the rival does.
        return accepted, end - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024

    def rival(self, words: list[str], rival_path: Path) -> float:
        """Seconds until hydra-submitit-launcher's array is accepted."""
        script = self.folder / "rival.py"
        script.write_text(_RIVAL)
        argv = [sys.executable, str(script), "-m", *self.rival_words(), *FIXED, *words]
        return self.until_accepted(argv, self.folder, rival_path)[0]

    def rival_words(self) -> list[str]:
        """Return the overrides that have hydra-submitit-launcher submit to this Slurm."""
        return [
            "hydra/launcher=submitit_slurm", "hydra.launcher.partition=main", "hydra.launcher.array_parallelism=256",
            f"hydra.sweep.dir={self.folder}/multirun",
        ]  # fmt: skip

    def until_accepted(self, argv: list[str], folder: Path, rival_path: Path) -> tuple[float, float]:
        """Run a program in a folder until its array is accepted, and kill it: (seconds, seconds of a core)."""
        self.accepted.unlink(missing_ok=True)
        env: Mapping[str, str] = {**self.env, "PYTHONPATH": str(rival_path)}
        begin = time.time()
        with (self.folder / "rival.log").open("wb") as log:
            process = subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
        while not self.accepted.exists():
            if process.poll() is not None:
                raise RuntimeError((self.folder / "rival.log").read_text()[-3000:])
            time.sleep(0.02)
        taken = max(map(float, self.accepted.read_text().split())) - begin
        os.killpg(process.pid, signal.SIGKILL)
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = -signal.SIGKILL  # it was waited for here
        self.end_all()
        return taken, usage.ru_utime + usage.ru_stime

    def end_all(self) -> None:
        """Cancel all jobs, and wait until they are gone."""
        self.cluster.run("scancel", "-u", "root")
        self.cluster.wait_for(lambda: not self.cluster.run("squeue", "-h").stdout.strip(), 60, "an empty queue")


@contextlib.contextmanager
def slurm_bench(name: str) -> Iterator[Bench | None]:
    """Yield a bench on a test Slurm; None, and print why, if there is no Slurm to start."""
    spec = Spec(variant="large")
    try:
        started = bed.up(spec, lambda _: None)
    except BedError as error:
        print(f"\n{name}: not measured: {error}")
        yield None
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Bench(SlurmCluster.attach(spec), Path(folder))
    finally:
        if started:
            bed.down(spec)


def run(rival_path: Path | None = None) -> None:
    """Prints the table; without the rival's folder (`make bench` installs it), or without Slurm, it says so."""
    with slurm_bench("submission") as bench:
        if bench is None:
            return
        print(f"\n{'submission':<22}", *(f"{name:>10}" for name in COLUMNS))
        ours = {}
        for points, (axis, budget) in SIZES.items():
            results = [bench.ours([*AXES, axis], points * 10 + number) for number in range(REPEATS)]
            accepted = [each[0] for each in results]
            ours[points] = statistics.median(accepted)
            seconds = [ours[points], min(accepted), max(accepted), statistics.median(each[1] for each in results)]
            print(f"{points:>6} points         ", *(f"{each:>10.2f}" for each in (*seconds, budget, results[-1][2])))
        if rival_path is None:
            print("hydra-submitit-launcher: not measured (make bench installs it)")
            return
        smallest = min(SIZES)
        taken = bench.rival([*AXES, SIZES[smallest][0]], rival_path)
        ratio = taken / ours[smallest]
        print(f"{smallest:>6} points, rival   {taken:>10.1f} = {ratio:.0f} × ours (n=1; budget: ≥ 50 ×)")


if __name__ == "__main__":
    run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
