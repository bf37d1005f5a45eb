"""A plain scancel, at every moment: the run never comes back."""

from __future__ import annotations

from tests.slurm.scenarios.checks import References, check_completed, check_stays
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import ONE, scenario


@scenario()
def cancelled_while_running(scene: Scene, references: References) -> None:
    """scancel in the middle."""
    scene.submit()
    scene.wait_for_step(20)
    scene.cancel()
    check_stays(scene, "CANCELLED", "cancelled")


@scenario()
def cancelled_while_saving(scene: Scene, references: References) -> None:
    """scancel while every rank is in a regular save: the save ends, the run does too."""
    scene.submit()
    scene.wait_for_step(20)
    scene.close("save")
    scene.full_speed()
    scene.wait_at("save")
    scene.cancel()
    scene.open("save")
    check_stays(scene, "CANCELLED", "cancelled")


@scenario()
def cancelled_while_a_stop_is_saved(scene: Scene, references: References) -> None:
    """scancel in the save of a preemption: the requeue that was to follow does not."""
    scene.submit(partition="preempt")
    scene.wait_for_step(20)
    scene.close("save")
    preemptor = scene.preempt()
    scene.wait_at("save")
    scene.cancel()
    scene.open("save")
    scene.wait_for_job("CANCELLED")
    scene.slurm.run("scancel", str(preemptor))
    check_stays(scene, "CANCELLED", "cancelled")


@scenario(ONE)
def cancelled_while_waiting(scene: Scene, references: References) -> None:
    """scancel of a job that never began."""
    blocker = scene.block()
    scene.submit()
    scene.check_shown("PENDING")
    scene.cancel()
    scene.slurm.run("scancel", str(blocker))
    check_stays(scene, "CANCELLED")


@scenario(ONE)
def cancelled_in_the_requeue_delay(scene: Scene, references: References) -> None:
    """scancel of a requeued job that Slurm still holds back."""
    scene.submit()
    scene.wait_for_step(20)
    scene.signal("USR2")
    scene.wait_for_end(0)
    scene.wait_for_job("PENDING")
    scene.cancel()
    check_stays(scene, "CANCELLED")


@scenario(ONE)
def cancelled_while_its_successor_is_on_the_way(scene: Scene, references: References) -> None:
    """hpc-trainer cancel between the journal's end and the successor's sbatch: the marker keeps it from training."""
    scene.submit()
    scene.slurm.run("scontrol", "update", f"jobid={scene.run.job_id}", "requeue=0")
    scene.wait_for_step(20)
    scene.signal("USR2")
    scene.wait_for_end(0)
    scene.driver.run("cancel", "scene")
    check_stays(scene, "CANCELLED", "cancelled")


@scenario(ONE)
def cancelled_while_nobody_has_it(scene: Scene, references: References) -> None:
    """hpc-trainer cancel of an interrupted run: the next submit of the grid leaves it alone."""
    scene.submit()
    scene.wait_for_step(20)
    scene.slurm.run("scancel", "--batch", "--signal=USR2", scene.run.job_id)
    scene.wait_for(lambda: scene.driver.only_run("scene")["state"] == "PREEMPTED", "the interruption", 60)
    assert scene.driver.json("cancel", "scene")["cancelled"] == [scene.run.folder.name]
    check_stays(scene, "CANCELLED", "cancelled")


@scenario(ONE)
def one_array_element_cancelled(scene: Scene, references: References) -> None:
    """scancel of one element of three: it stays, the others complete undisturbed."""
    scene.submit(seeds=(0, 1, 2))
    middle = scene.runs[1]
    for run in scene.runs:
        scene.wait_for_step(10, run=run)
    scene.cancel(middle)
    scene.full_speed()
    siblings = [run for run in scene.runs if run != middle]
    scene.wait_for(lambda: all(run.is_done for run in siblings), "the siblings' end")
    check_stays(scene, "CANCELLED", "cancelled", middle)
    scene.runs = siblings
    for run in siblings:
        check_completed(scene, references, ["done"], run)
