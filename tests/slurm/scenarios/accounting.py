"""Sites without accounting, and with an accounting that is down: the run's own files tell its story."""

from __future__ import annotations

from tests.slurm.scenarios.checks import References, check_completed, check_stays
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import BOTH, ONE, scenario


@scenario(*BOTH, variant="noaccounting")
def preempted_without_accounting(scene: Scene, references: References) -> None:
    """No sacct at all: preempted and back."""
    scene.submit(partition="preempt")
    scene.wait_for_step(20)
    preemptor = scene.preempt()
    scene.wait_for_end(0)
    scene.wait_for_job("PENDING")
    scene.slurm.run("scancel", str(preemptor))
    scene.come_back()
    check_completed(scene, references, ["preempted", "done"])


@scenario(ONE, variant="noaccounting")
def cancelled_without_accounting(scene: Scene, references: References) -> None:
    """No sacct at all: a scancel in the middle is known from the journal."""
    scene.submit()
    scene.wait_for_step(20)
    scene.cancel()
    check_stays(scene, "CANCELLED", "cancelled")


@scenario(*BOTH)
def preempted_while_the_database_is_down(scene: Scene, references: References) -> None:
    """slurmdbd goes away in the middle and comes back after the end: no state is lost, none is made up."""
    scene.submit(partition="preempt")
    scene.wait_for_step(20)
    scene.slurm.stop_daemon("slurmdbd")
    preemptor = scene.preempt()
    scene.wait_for_end(0)
    scene.wait_for_job("PENDING")
    scene.check_shown("REQUEUED")
    scene.slurm.run("scancel", str(preemptor))
    scene.come_back()
    scene.wait_until_done()
    scene.check_shown("COMPLETED")
    scene.slurm.start_missing()
    check_completed(scene, references, ["preempted", "done"])


@scenario(ONE)
def cancelled_while_the_database_is_down(scene: Scene, references: References) -> None:
    """A job that never began is cancelled while sacct cannot answer: UNKNOWN until it can, then CANCELLED."""
    blocker = scene.block()
    scene.submit()
    scene.slurm.stop_daemon("slurmdbd")
    scene.cancel()
    scene.slurm.run("scancel", str(blocker))
    scene.wait_for(lambda: scene.queue() == [], "an empty queue")
    scene.check_shown("UNKNOWN", "CANCELLED")
    scene.slurm.start_missing()
    check_stays(scene, "CANCELLED")
