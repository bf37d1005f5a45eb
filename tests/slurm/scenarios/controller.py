"""slurmctld away: while a run starts, saves, and is about to ask for its requeue."""

from __future__ import annotations

import time

from tests.slurm.scenarios.checks import References, check_completed
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import scenario

# As long as a restart takes on a busy site: longer than one question's connect, shorter than the grace here (20 s).
AWAY_S = 6.0


@scenario()
def controller_restarted_while_starting(scene: Scene, references: References) -> None:
    """Away while the ranks find each other."""
    scene.close("build-train")
    scene.submit()
    scene.wait_at("build-train")
    scene.slurm.stop_daemon("slurmctld")
    scene.open("build-train")
    scene.full_speed()
    scene.wait_for_step(100)
    scene.slurm.start_missing()
    check_completed(scene, references, ["done"])


@scenario()
def controller_restarted_while_saving(scene: Scene, references: References) -> None:
    """Preempted; the controller restarts within the save, and is back before the ranks ask."""
    scene.submit(partition="preempt")
    scene.wait_for_step(20)
    scene.close("save")
    preemptor = scene.preempt()
    scene.wait_at("save")
    scene.slurm.stop_daemon("slurmctld")
    scene.slurm.start_missing()
    scene.open("save")
    scene.wait_for_end(0)
    scene.wait_for_job("PENDING")
    scene.slurm.run("scancel", str(preemptor))
    scene.come_back()
    check_completed(scene, references, ["preempted", "done"])


@scenario()
def controller_away_when_the_requeue_is_due(scene: Scene, references: References) -> None:
    """Preempted; the controller goes while the ranks save and comes back seconds after they ask."""
    scene.submit(partition="preempt")
    scene.wait_for_step(20)
    scene.close("save")
    preemptor = scene.preempt()
    scene.wait_at("save")
    scene.slurm.stop_daemon("slurmctld")
    scene.open("save")
    time.sleep(AWAY_S)
    scene.slurm.start_missing()
    scene.wait_for_end(0)
    scene.wait_for_job("PENDING")
    scene.slurm.run("scancel", str(preemptor))
    scene.come_back()
    check_completed(scene, references, [("preempted", "signal"), "done"])


@scenario()
def controller_restarted_in_the_requeue_delay(scene: Scene, references: References) -> None:
    """Requeued and held back; the controller restarts from its saved state."""
    scene.submit()
    scene.wait_for_step(20)
    scene.signal("USR2")
    scene.wait_for_end(0)
    scene.wait_for_job("PENDING")
    scene.slurm.stop_daemon("slurmctld")
    scene.slurm.start_missing()
    scene.come_back()
    check_completed(scene, references, ["signal", "done"])
