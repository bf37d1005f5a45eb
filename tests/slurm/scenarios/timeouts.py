"""The time limit: warned and requeued, with a limit of one minute and of ten, and without a step to show for it."""

from __future__ import annotations

import time
from typing import Any

from hpc_trainer.runtime.pace import DEADLINE
from tests.slurm.scenarios.checks import References, check_completed, check_stays
from tests.slurm.scenarios.scene import SAVED_EVERY, Scene
from tests.slurm.scenarios.table import ONE, scenario


def _play(scene: Scene, references: References, minutes: int) -> None:
    # So slow that the limit comes first.
    scene.submit(f"hardware.time_limit_min={minutes}", pace_s=minutes * 60 / 400)
    end = scene.wait_for_end(0, timeout_s=60 * minutes + 30)
    # Of one minute Slurm may warn as late as 15 s before the end. The run stops by itself 15 s, two steps and one and a
    # half saves before it, if Slurm has not warned by then: it looks at jobs twice a minute.
    assert end["signal"] in ("SIGUSR2", *([DEADLINE] if minutes == 1 else [])), scene.story()
    # The batch script does it if a busy machine keeps the controller from answering the rank in time.
    assert end["action"] in ("requeue", "requeue by the batch script"), scene.story()
    # Slurm may warn 30 s early, and four ranks start in 25 s on two busy cores: the next start gets more time.
    scene.wait_for_job("PENDING")
    scene.slurm.run("scontrol", "update", f"jobid={scene.run.job_id}", f"timelimit={10 * minutes}")
    scene.come_back()
    check_completed(scene, references, ["timeout", "done"])


@scenario()
def timed_out_after_a_minute(scene: Scene, references: References) -> None:
    """SIGUSR2, or the run's own clock, before the end of one minute: saved, requeued, back."""
    _play(scene, references, 1)


@scenario(ONE, timeout_s=1200)
def timed_out_after_ten_minutes(scene: Scene, references: References) -> None:
    """The same with a limit of ten minutes, and the full lead of 120 s."""
    _play(scene, references, 10)


@scenario(ONE)
def timed_out_again_and_again(scene: Scene, references: References) -> None:
    """A step or two an attempt, three times: the next start says how little that is, and stops for good.

    With these keys Slurm sends its warning after 60 s at the earliest, and one that comes after 30 s is taken for it.
    """
    scene.close("build-train")
    scene.submit("hardware.time_limit_min=2", "cluster.signal_lead_s=30", "cluster.min_goodput=0.5")
    for attempt in range(3):
        scene.wait_at("build-train")
        time.sleep(max(0.0, scene.run.records("start")[attempt]["time"] + 33 - time.time()))
        scene.close("train")
        scene.open("build-train")
        scene.wait_at("train")
        scene.signal("USR2")
        scene.wait_for_signal("train")
        scene.open("train")
        end = scene.wait_for_end(attempt)
        assert (end["cause"], end["action"]) == ("timeout", "requeue")
        assert end["saved_step"] > attempt, "each attempt does a step: max_no_progress sees nothing"
        scene.close("build-train")
        if attempt == 1:
            assert any("ended its last 2 attempts" in line for line in _why(scene)["evidence"])
        scene.start_now()
    scene.wait_for_end(3)
    check_stays(scene, "FAILED", "low_goodput")
    assert f"hpc-trainer retry {scene.run.folder.name} hardware.time_limit_min=" in _why(scene)["advice"][0]


def _why(scene: Scene) -> dict[str, Any]:
    found: dict[str, Any] = scene.driver.json("why", scene.run.folder.name)
    return found


@scenario()
def timed_out_without_a_step(scene: Scene, references: References) -> None:
    """One rank stuck in its data until the limit: all leave before Slurm kills them, with what is saved, and come back.

    The limit is two minutes: Slurm may warn a minute early, and the first steps are to be done by then.
    """
    scene.submit("hardware.time_limit_min=2")
    scene.wait_for_step(60)
    last = f"train-of-{scene.num_ranks - 1}"
    scene.close(last)
    scene.wait_at(last, ranks=1)
    scene.note()
    end = scene.wait_for_end(0, timeout_s=150)
    assert (end["cause"], end["action"]) == ("timeout", "requeue")
    assert end["saved_step"] % SAVED_EVERY == 0
    scene.wait_for_job("PENDING")
    scene.check_shown("REQUEUED")
    scene.open(last)
    scene.come_back()
    check_completed(scene, references, ["timeout", "done"])


@scenario(variant="cancel")
def preempted_while_one_rank_waits_for_data(scene: Scene, references: References) -> None:
    """The same in a grace of 20 s where Slurm cancels: nobody brings the run back but itself."""
    scene.submit(partition="preempt")
    scene.wait_for_step(60)
    last = f"train-of-{scene.num_ranks - 1}"
    scene.close(last)
    scene.wait_at(last, ranks=1)
    preemptor = scene.preempt()
    end = scene.wait_for_end(0)
    assert end["cause"] == "preempted"
    assert end["saved_step"] % SAVED_EVERY == 0
    scene.slurm.run("scancel", str(preemptor))
    scene.open(last)
    scene.wait_for_job("PENDING")
    scene.come_back()
    check_completed(scene, references, ["preempted", "done"])


@scenario(ONE)
def warned_while_it_waits_for_data(scene: Scene, references: References) -> None:
    """The warning comes in a long wait for data: acted on with the next step, nothing lost."""
    scene.submit()
    scene.wait_for_step(20)
    scene.close("train")
    scene.wait_at("train")
    scene.signal("USR2")
    scene.wait_for_signal("train")
    scene.open("train")
    end = scene.wait_for_end(0)
    assert end["cause"] == "signal"
    scene.come_back()
    check_completed(scene, references, ["signal", "done"])
