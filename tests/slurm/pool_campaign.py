"""``python -m tests.slurm.pool_campaign``: pools on the test Slurm, disturbed all the while.

As tests/slurm/shared_folder/campaign.py, on this machine's own disk: the runs are in pools, whose slots die too. At
the end each run must have been done once, with the bits of a run that had a job of its own and was left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.scenarios.scene import NUM_STEPS, Scene
from tests.slurm.shared_folder.campaign import Campaign
from tests.slurm.testbed import bed
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import Spec

_KILL_SLOT = "kill a slot"


@dataclass
class PoolCampaign(Campaign):
    """The campaign, with three slots for the programs, two places each, and two slots for the trainings."""

    def _scenes(self, slurm: SlurmCluster, prefix: str = "") -> Iterator[tuple[Scene, tuple[int, ...]]]:
        for name, num_runs in (("program", self.num_runs - self.num_trained), ("x1", self.num_trained)):
            if num_runs > 0:
                scene = Scene(slurm, self._folder(f"{prefix}{name}"), "testbed_x1", is_program=name == "program")
                yield scene, tuple(range(num_runs))

    def submit(self) -> None:
        """So slow that each pool lasts for as long as the blows do."""
        for scene, seeds in self._scenes(self.slurm):
            slots, places = (3, 2) if scene.is_program else (2, 1)
            pace_s = self.seconds / NUM_STEPS * slots * places / len(seeds) / (1 if scene.is_program else 2) / 2
            words = (f"pool.jobs={slots}", f"pool.per_node={places}")
            scene.submit(*words, partition="preempt", pace_s=pace_s, seeds=seeds)
            self.scenes.append(scene)
            self.say(f"{len(seeds)} run(s) of {scene.folder.name}, {pace_s:.3f} s a batch")

    @property
    def kills(self) -> int:
        return super().kills + self.blows[_KILL_SLOT]

    def blow(self) -> None:
        """Now and then kill the process of a slot, and then as ever."""
        living = set(self.slurm.job_processes())
        pids = [pid for scene in self.scenes for pid in _slot_pids(scene) if pid in living]
        if pids and self.random.random() < 0.5:
            pid = self.random.choice(pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.blows[_KILL_SLOT] += 1
                self.say(f"{_KILL_SLOT}: {pid}")
        super().blow()

    def cancel_one(self) -> None:
        """Cancel a run by our own command: scancel ends a slot, and no run."""
        far = [each for each in self.left() if each[1].heartbeat.get("step", 0) < NUM_STEPS - 20]
        if not far:
            return
        scene, run = self.random.choice(far)
        try:
            cancelled = scene.driver.json("cancel", run.folder.name, "--sweep", "scene")["cancelled"]
        except AssertionError as error:
            self.say(f"cancel: {str(error)[-300:]}")
            return
        if run.folder.name in cancelled:
            self.cancelled.add(run.folder)
            self.say(f"cancelled {run.folder.name}")

    def tend(self) -> None:
        self.cancel_times.clear()  # the slot of a cancelled run goes on; `_settled` sees that the run does not
        super().tend()


def _slot_pids(scene: Scene) -> Sequence[int]:
    found = []
    for path in (scene.driver.runs / "scene").glob("slot-*/attempt-*.jsonl"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            first, *others = map(json.loads, path.read_text().splitlines())
            found += [] if others else [int(first["pid"])]
    return found


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.pool_campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long the blows last at most")
    parser.add_argument("--kills", type=int, default=1_000_000, help="after so many the blows end")
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--trained", type=int, default=3, help="how many train with the shared loop")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between two blows")
    parser.add_argument("--cancelled", type=int, default=3, help="how many runs are cancelled")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is taken down
    spec = Spec()
    is_started = bed.up(spec, lambda text: print(text, file=sys.stderr))
    cluster = SlurmCluster.attach(spec)
    try:
        with tempfile.TemporaryDirectory(prefix="pools-") as folder:
            campaign = PoolCampaign(
                cluster, Path(folder), options.runs, options.minutes * 60, options.seed, options.cancelled,
                max_kills=options.kills, num_trained=options.trained, pause_s=options.pause,
            )  # fmt: skip
            begin = time.monotonic()
            campaign.play()
            campaign.say(f"{time.monotonic() - begin:.0f} s in all")
    finally:
        cluster.tidy()
        if is_started:
            bed.down(spec)
    return int(campaign.has_failed)


if __name__ == "__main__":
    sys.exit(_main())
