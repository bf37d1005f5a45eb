"""``python -m tests.slurm.soak``: forty runs on the test Slurm while a seeded script does what clusters do to runs.

It preempts, sets nodes down, cuts their power, kills ranks, requeues by hand, restarts slurmctld, and cancels five
runs. Afterwards every other run must be complete, once, with the undisturbed results.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm.scenarios.checks import Reference, check_result
from tests.slurm.scenarios.scene import NUM_STEPS, Run, Scene
from tests.slurm.testbed import bed, daemons
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import NODES, Spec

# Two busy cores start a rank in some seconds: a blow every four leaves runs the time to get on.
PAUSE_S = 4.0
_SEEDS = (0, 1, 2, 3)
_DRAIN_S = 600.0


@dataclass
class Soak:
    """The runs, what was done to them so far, and the generator that decides what is next."""

    slurm: SlurmCluster
    folder: Path
    num_runs: int
    seconds: float
    seed: int
    num_cancelled: int = 5
    scenes: list[Scene] = field(default_factory=list)
    cancelled: set[Path] = field(default_factory=set)
    """Folders of the cancelled runs."""
    blows: Counter[str] = field(default_factory=Counter)
    brought_back: int = 0
    _preemptors: list[tuple[float, int]] = field(default_factory=list)
    _pulled: set[str] = field(default_factory=set)
    """Jobs whose start was pulled forward, until they run."""
    _down: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def say(self, text: str) -> None:
        """One line of the protocol."""
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    # Given

    def submit(self) -> None:
        """Four of five runs have one rank, in arrays of four; the others have two nodes with two ranks each."""
        # Sixteen pretend GPUs: so slow that the runs together last longer than the blows.
        pace_s = self.seconds / (2 * NUM_STEPS) * 16 / (self.num_runs * 1.6)
        plan = ["testbed_x1"] * (self.num_runs // 5) + ["testbed_x4"] * (self.num_runs // 5)
        self.random.shuffle(plan)
        for number, hardware in enumerate(plan):
            folder = self.folder / f"{number:02}-{hardware}"
            folder.mkdir()
            scene = Scene(self.slurm, folder, hardware)
            seeds = _SEEDS if hardware == "testbed_x1" else _SEEDS[:1]
            scene.submit(partition=self.random.choice(("preempt", "preempt0")), pace_s=pace_s, seeds=seeds)
            self.scenes.append(scene)
        self.say(f"{len(self.runs())} runs in {len(plan)} arrays, {pace_s:.3f} s a batch")

    def references(self) -> dict[tuple[str, int], Reference]:
        """The undisturbed runs."""
        kept = {}
        for hardware, seeds in (("testbed_x1", _SEEDS), ("testbed_x4", _SEEDS[:1])):
            folder = self.folder / f"undisturbed-{hardware}"
            folder.mkdir()
            scene = Scene(self.slurm, folder, hardware)
            scene.submit(pace_s=0, seeds=seeds)
            scene.wait_until_done()
            kept |= {(hardware, run.seed): Reference.of(run) for run in scene.runs}
        return kept

    def runs(self) -> list[tuple[Scene, Run]]:
        """Every run, with its scene."""
        return [(scene, run) for scene in self.scenes for run in scene.runs]

    def left(self) -> list[tuple[Scene, Run]]:
        """Neither complete nor cancelled."""
        return [(scene, run) for scene, run in self.runs() if not run.is_done and run.folder not in self.cancelled]

    def queue(self) -> dict[str, tuple[str, str]]:
        """job id -> (state, reason) of all jobs that wait or work; asks until the controller answers."""
        while True:
            done = self.slurm.run("squeue", "-h", "-r", "-o", "%i|%T|%r", check=False)
            if done.returncode == 0:
                rows = (line.split("|") for line in done.stdout.splitlines())
                return {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}
            time.sleep(0.5)

    # When

    def blow(self) -> None:
        """One random disturbance."""
        kinds: dict[str, tuple[int, Callable[[], str | None]]] = {
            "preempt": (5, self._preempt),
            "kill a rank": (3, self._kill_rank),
            "requeue by hand": (3, self._requeue),
            "warn": (3, self._warn),
            "node down": (2, self._node_down),
            "power cut": (2, self._cut_power),
            "restart slurmctld": (2, self._restart_controller),
        }
        names, weights = list(kinds), [weight for weight, _ in kinds.values()]
        name = self.random.choices(names, weights)[0]
        what = kinds[name][1]()
        if what is not None:
            self.blows[name] += 1
            self.say(f"{name}: {what}")

    def _working(self) -> list[tuple[Scene, Run]]:
        queue = self.queue()
        return [each for each in self.left() if queue.get(each[1].job_id, ("",))[0] == "RUNNING"]

    def _some_run(self) -> tuple[Scene, Run] | None:
        working = self._working()
        return self.random.choice(working) if working else None

    def _preempt(self) -> str:
        nodes = self.random.sample(NODES, self.random.choice((1, 1, 2)))
        job_id = self.slurm.preempt(nodes, seconds=60)
        self._preemptors.append((time.monotonic() + self.random.uniform(2, 12), job_id))
        return ",".join(nodes)

    def _kill_rank(self) -> str | None:
        locks = sorted(lock for scene in self.scenes for lock in scene.gates.glob("run-*.lock"))
        pids = {int(lock.read_text() or 0): lock for lock in locks}
        living = sorted(set(pids) & set(self.slurm.job_processes()))
        if not living:
            return None
        pid = self.random.choice(living)
        os.kill(pid, signal.SIGKILL)
        return f"{pids[pid].parent.parent.name} {pids[pid].stem}"

    def _requeue(self) -> str | None:
        chosen = self._some_run()
        if chosen is None:
            return None
        self.slurm.run("scontrol", "requeue", chosen[1].job_id, check=False)
        return chosen[1].job_id

    def _warn(self) -> str | None:
        chosen = self._some_run()
        if chosen is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):  # it asks again and again for a job that has just left
            self.slurm.run("scancel", "--signal=USR2", chosen[1].job_id, check=False, timeout=3)
        return chosen[1].job_id

    def _up_nodes(self) -> list[str]:
        return [node for node in NODES if node not in self._down]

    def _take_down(self, cut: bool) -> str | None:
        nodes = self._up_nodes()
        if len(nodes) < 3:
            return None
        node = self.random.choice(nodes)
        if cut:
            self.slurm.cut_power(node)
            self.slurm.give_up(node)
        else:
            self.slurm.set_node(node, "down")
        self._down[node] = time.monotonic() + self.random.uniform(5, 15)
        return node

    def _node_down(self) -> str | None:
        return self._take_down(cut=False)

    def _cut_power(self) -> str | None:
        return self._take_down(cut=True)

    def _restart_controller(self) -> str:
        away_s = self.random.choice((0.0, 0.0, 4.0))
        self.slurm.stop_daemon("slurmctld")
        time.sleep(away_s)
        self.slurm.start_missing()
        return f"away for {away_s:g} s"

    def cancel_one(self) -> None:
        """A run that waits or works, by scancel or by our own cancel."""
        # Not one that may complete while we ask.
        far = [each for each in self.left() if each[1].heartbeat.get("step", 0) < NUM_STEPS - 20]
        if not far:
            return
        scene, run = self.random.choice(far)
        how = self.random.choice(("scancel", "hpc-trainer cancel"))
        if how == "scancel":
            if run.job_id not in self.queue():
                return  # dead and not brought back yet: nothing to cancel
            self.slurm.run("scancel", run.job_id)
        else:
            answer = scene.driver.json("cancel", run.folder.name, "--sweep", "scene")
            if run.folder.name not in answer["cancelled"]:
                return
        self.cancelled.add(run.folder)
        self.say(f"{how}: {run.job_id}, {len(self.cancelled)} of {self.num_cancelled}")

    # What goes on all the while

    def tend(self) -> None:
        """Nodes come back, preemptors leave, delays are skipped, and a person brings back what failed."""
        now = time.monotonic()
        for node in [node for node, until in self._down.items() if until < now]:
            self.slurm.start_missing()
            self.slurm.set_node(node, "resume")
            del self._down[node]
        for node, state in daemons.nodes_by_state(self.slurm.spec).items():
            if node not in self._down and state.startswith(("down", "drain", "drng", "fail")):
                self.slurm.set_node(node, "resume")
        for until, job_id in list(self._preemptors):
            if until < now:
                self.slurm.run("scancel", str(job_id), check=False)
                self._preemptors.remove((until, job_id))
        queue = self.queue()
        for job_id, (state, reason) in queue.items():
            if (state, reason) == ("PENDING", "BeginTime") and job_id not in self._pulled:
                # Longer than KillWait (6 s): a start beside the last one's processes is refused, and held.
                self.slurm.run("scontrol", "update", f"jobid={job_id}", "starttime=now+8seconds", check=False)
                self._pulled.add(job_id)
            elif state == "RUNNING":
                self._pulled.discard(job_id)
            elif "held" in reason.lower():
                self.slurm.run("scontrol", "release", job_id, check=False)
                self.blows["released"] += 1
        for scene in self.scenes:
            mine = [run for owner, run in self.left() if owner is scene]
            if any(run.job_id not in queue for run in mine):
                self._bring_back(scene)

    def _bring_back(self, scene: Scene) -> None:
        rows = scene.driver.status("scene")
        dead = ("FAILED", "PREEMPTED", "NODE_FAIL", "TIMEOUT")
        wanted = [run for _, run in self.left() if run.folder.name in rows and run in scene.runs]
        if any(rows[run.folder.name]["state"] in dead for run in wanted):
            self.brought_back += scene.submit_again("--retry-failed")["submitted"]
            rows = scene.driver.status("scene")
        scene.runs = [Run(run.folder, rows[run.folder.name]["job_id"] or run.job_id, run.seed) for run in scene.runs]

    def play(self) -> None:
        """The whole of it."""
        self.say(f"seed {self.seed}")
        kept = self.references()
        self.submit()
        begin = time.monotonic()
        marks = sorted(self.random.uniform(0.1, 0.8) * self.seconds for _ in range(self.num_cancelled))
        while time.monotonic() < begin + self.seconds and self.left():
            if marks and time.monotonic() - begin > marks[0]:
                before = len(self.cancelled)
                self.cancel_one()
                del marks[: len(self.cancelled) - before]
            self.blow()
            for _ in range(2):
                time.sleep(PAUSE_S / 2)
                self.tend()
        self.say(f"no more blows: {dict(self.blows)}; {len(self.left())} runs left")
        self._drain()
        self.check(kept)
        self.say(
            f"{len(self.runs()) - len(self.cancelled)} complete, {len(self.cancelled)} cancelled, all as they must"
        )

    def _drain(self) -> None:
        for scene in self.scenes:
            scene.full_speed()
        deadline = time.monotonic() + _DRAIN_S
        while self.left():
            assert time.monotonic() < deadline, self._stuck()
            time.sleep(1)
            self.tend()
        for _, job_id in self._preemptors:
            self.slurm.run("scancel", str(job_id), check=False)
        self.slurm.wait_for(lambda: not self.queue() and not self.slurm.job_processes(), 60, "an empty queue")

    def _stuck(self) -> str:
        return "\n".join([f"{len(self.left())} runs do not end", *(scene.story() for scene, _ in self.left()[:3])])

    # Then

    def check(self, kept: dict[tuple[str, int], Reference]) -> None:
        """All complete once and with the undisturbed bits, the cancelled ones cancelled; again: nothing to submit."""
        for scene in self.scenes:
            assert not (scene.gates / "two_at_once").exists(), (scene.gates / "two_at_once").read_text()
            rows = scene.driver.status("scene")
            for run in scene.runs:
                wanted = "CANCELLED" if run.folder in self.cancelled else "COMPLETED"
                assert rows[run.folder.name]["state"] == wanted, f"{rows[run.folder.name]}\n{scene.story()}"
                if wanted == "COMPLETED":
                    check_result(run, kept[scene.hardware, run.seed])
                    done = [record for record in run.records("end") if record["cause"] == "done"]
                    assert len(done) <= 1, done
            assert scene.submit_again("--retry-failed")["submitted"] == 0
        assert len(self.cancelled) == self.num_cancelled
        causes = Counter(str(end["cause"]) for _, run in self.runs() for end in run.records("end"))
        starts = sum(len(run.records("start")) for _, run in self.runs())
        self.say(f"{starts} attempts, ends {dict(causes)}, {self.brought_back} brought back by `submit --retry-failed`")


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the blows last")
    parser.add_argument("--runs", type=int, default=40, help="a multiple of five")
    parser.add_argument("--cancelled", type=int, default=5, help="how many runs are cancelled")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    spec = Spec()
    fresh = bed.up(spec, lambda text: print(text, file=sys.stderr))
    cluster = SlurmCluster.attach(spec)
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            Soak(cluster, Path(folder), options.runs, options.seconds, options.seed, options.cancelled).play()
    finally:
        cluster.tidy()
        if fresh:
            bed.down(spec)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
