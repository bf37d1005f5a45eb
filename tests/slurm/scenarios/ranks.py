"""Ranks that die: killed, raising, and out of memory."""

from __future__ import annotations

import os
import signal

from tests.slurm.scenarios.checks import References, check_completed, check_stays
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import ONE, TWO_NODES, scenario


def _kill(scene: Scene, ranks: list[int]) -> None:
    scene.submit()
    scene.wait_for_step(70)
    scene.note()
    for pid in [scene.pid_of(rank) for rank in ranks]:
        os.kill(pid, signal.SIGKILL)


def _kill_all(scene: Scene, references: References) -> None:
    _kill(scene, list(range(scene.num_ranks)))
    check_stays(scene, "FAILED")
    scene.full_speed()
    assert scene.submit_again("--retry-failed")["submitted"] == 1
    scene.follow_job()
    check_completed(scene, references, [None, "done"])


def _kill_one(scene: Scene, references: References, rank: int) -> None:
    _kill(scene, [rank])
    scene.wait_for_job("PENDING")
    scene.check_shown("REQUEUED")
    scene.come_back()
    check_completed(scene, references, [(None, "peer_lost"), "done"])


@scenario(TWO_NODES)
def another_rank_killed(scene: Scene, references: References) -> None:
    """kill -9 of rank 3: the others end within seconds and bring the run back, from the last checkpoint."""
    _kill_one(scene, references, 3)


@scenario(TWO_NODES)
def rank_zero_killed(scene: Scene, references: References) -> None:
    """kill -9 of rank 0, which writes the journal: another rank brings the run back."""
    _kill_one(scene, references, 0)


@scenario()
def all_ranks_killed(scene: Scene, references: References) -> None:
    """kill -9 of every rank at once: nobody is left to bring it back, FAILED, and a retry goes on."""
    _kill_all(scene, references)


def _raise(scene: Scene, references: References, rank: int) -> None:
    scene.submit()
    scene.wait_for_step(70)
    scene.note()
    (scene.gates / f"raise.rank-{rank}").touch()
    check_stays(scene, "FAILED")
    assert scene.slurm.job_state(scene.run.job_id) == "FAILED"
    shown = scene.driver.run("status", "scene").stdout
    assert f"RuntimeError: the disk of rank {rank} is gone" in shown, shown
    (scene.gates / f"raise.rank-{rank}").unlink()
    scene.full_speed()
    assert scene.submit_again("--retry-failed")["submitted"] == 1
    scene.follow_job()
    check_completed(scene, references, [(None, "exception"), "done"])


@scenario()
def rank_zero_raises(scene: Scene, references: References) -> None:
    """A person's exception on rank 0: FAILED everywhere, the error in `status`, a retry by hand."""
    _raise(scene, references, 0)


@scenario(TWO_NODES)
def another_rank_raises(scene: Scene, references: References) -> None:
    """The same on rank 2: its error is shown, not the echo of those that lost their peer."""
    _raise(scene, references, 2)


@scenario(ONE, variant="memorylimit")
def host_memory_exceeded(scene: Scene, references: References) -> None:
    """More memory than asked for: killed by Slurm, never taken for complete, and a retry goes on.

    Without cgroups, as here, Slurm calls such a job FAILED; with them, OUT_OF_MEMORY.
    """
    scene.submit("hardware.mem_gb_per_node=1")
    scene.wait_for_step(70)
    scene.note()
    (scene.gates / "eat_mb").write_text("400")
    check_stays(scene, "FAILED")
    (scene.gates / "eat_mb").unlink()
    scene.full_speed()
    assert scene.submit_again("--retry-failed")["submitted"] == 1
    scene.follow_job()
    check_completed(scene, references, [None, "done"])
