"""Preemption: with a grace period and without, with a signal of our choice, and where Slurm cancels instead."""

from __future__ import annotations

from tests.slurm.scenarios.checks import (
    References,
    check_completed,
    check_result,
    check_stays,
    check_story,
    let_echoes_end,
    wait_until_gone,
)
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import scenario


def _play(scene: Scene, references: References, partition: str) -> None:
    scene.submit(partition=partition)
    scene.wait_for_step(20)
    preemptor = scene.preempt()
    assert scene.wait_for_end(0)["saved_step"]
    scene.wait_for_job("PENDING")
    scene.check_shown("REQUEUED")
    scene.slurm.run("scancel", str(preemptor))
    scene.come_back()
    check_completed(scene, references, ["preempted", "done"])


@scenario()
def preempted_with_grace(scene: Scene, references: References) -> None:
    """SIGTERM and 20 s of grace: saved, requeued, back with the same bits."""
    _play(scene, references, "preempt")


@scenario()
def preempted_without_grace(scene: Scene, references: References) -> None:
    """GraceTime=0: only KillWait (6 s here) is left to save in."""
    _play(scene, references, "preempt0")


@scenario(variant="usersignal")
def preempted_with_the_warning_signal(scene: Scene, references: References) -> None:
    """send_user_signal: the grace begins with SIGUSR2, and the cause is a preemption all the same."""
    _play(scene, references, "preempt")


@scenario(variant="cancel")
def preempted_with_grace_where_slurm_cancels(scene: Scene, references: References) -> None:
    """PreemptMode=CANCEL with a grace: the run requeues itself in it, before Slurm cancels the job."""
    _play(scene, references, "preempt")


@scenario(variant="cancel")
def preempted_without_grace_where_slurm_cancels(scene: Scene, references: References) -> None:
    """PreemptMode=CANCEL without a grace: this job id never returns, so another job carries the run on."""
    scene.submit(partition="preempt0")
    scene.wait_for_step(20)
    first = scene.run.job_id
    preemptor = scene.preempt()
    assert scene.wait_for_end(0)["saved_step"]
    scene.wait_for_job("PREEMPTED", "FAILED", "COMPLETED", "CANCELLED")
    scene.slurm.run("scancel", str(preemptor))
    scene.wait_for(lambda: scene.driver.only_run("scene")["job_id"] != first, "a successor of the job", 20)
    scene.follow_job()
    check_completed(scene, references, ["preempted", "done"])


@scenario()
def finished_within_the_grace(scene: Scene, references: References) -> None:
    """Preempted in the last evaluation: it completes within the grace, and a restart by Slurm finds nothing to do."""
    scene.submit(partition="preempt")
    scene.wait_for_step(101)
    scene.close("eval")
    scene.full_speed()
    scene.wait_at("eval")
    preemptor = scene.preempt()
    scene.wait_for(lambda: "PreemptTime" in scene.slurm.job(scene.run.job_id), "the preemption to begin")
    scene.open("eval")
    scene.wait_until_done()
    scene.wait_for_job("COMPLETED", "PREEMPTED", "PENDING")
    scene.slurm.run("scancel", str(preemptor))
    if scene.slurm.job_state(scene.run.job_id) == "PENDING":
        scene.start_now()  # since 24.05: whoever exits in the grace is requeued
    wait_until_gone(scene)
    scene.check_shown("COMPLETED")
    check_story(scene, scene.run, ["done"])
    check_result(scene.run, references(scene.hardware, 0))


@scenario()
def raises_after_a_preemption(scene: Scene, references: References) -> None:
    """An exception in the start after a preemption: FAILED, and no start follows but an echo that leaves at once."""
    scene.submit(partition="preempt")
    scene.wait_for_step(20)
    preemptor = scene.preempt()
    scene.wait_for_end(0)
    scene.wait_for_job("PENDING")
    scene.slurm.run("scancel", str(preemptor))
    (scene.gates / "raise.rank-0").touch()
    scene.start_now()
    scene.wait_for_end(1)
    let_echoes_end(scene, scene.run)
    check_stays(scene, "FAILED", "exception")
