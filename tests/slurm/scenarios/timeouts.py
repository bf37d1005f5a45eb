"""The time limit: warned and requeued, with a limit of one minute and of ten, and without a step to show for it."""

from __future__ import annotations

from tests.slurm.scenarios.checks import References, check_completed, wait_until_gone
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import ONE, scenario


def _play(scene: Scene, references: References, minutes: int) -> None:
    # So slow that the limit comes first.
    scene.submit(f"hardware.time_limit_min={minutes}", pace_s=minutes * 60 / 400)
    end = scene.wait_for_end(0, timeout_s=60 * minutes + 30)
    assert (end["signal"], end["action"]) == ("SIGUSR2", "requeue")
    # Slurm may warn 30 s early, and four ranks start in 25 s on two busy cores: the next start gets more time.
    scene.wait_for_job("PENDING")
    scene.slurm.run("scontrol", "update", f"jobid={scene.run.job_id}", f"timelimit={10 * minutes}")
    scene.come_back()
    check_completed(scene, references, ["timeout", "done"])


@scenario()
def timed_out_after_a_minute(scene: Scene, references: References) -> None:
    """SIGUSR2 before the end of one minute: saved, requeued, back."""
    _play(scene, references, 1)


@scenario(ONE, is_long=True, timeout_s=1200)
def timed_out_after_ten_minutes(scene: Scene, references: References) -> None:
    """The same with a limit of ten minutes, and the full lead of 120 s."""
    _play(scene, references, 10)


@scenario(ONE)
def timed_out_without_a_step(scene: Scene, references: References) -> None:
    """Stuck in its data until the limit: TIMEOUT, killed, not requeued; `submit` brings it back from where it was."""
    scene.submit("hardware.time_limit_min=1")
    scene.wait_for_step(60)
    scene.note()
    scene.close("train")
    scene.wait_at("train")
    scene.wait_for_job("TIMEOUT", timeout_s=150)
    wait_until_gone(scene)
    row = scene.driver.only_run("scene")
    assert row["state"] == "TIMEOUT", row
    scene.open("train")
    scene.full_speed()
    answer = scene.submit_again()
    assert answer["submitted"] == 1
    scene.follow_job()
    check_completed(scene, references, [None, "done"])


@scenario(ONE)
def warned_while_it_waits_for_data(scene: Scene, references: References) -> None:
    """The warning comes in a long wait for data: acted on with the next step, nothing lost."""
    scene.submit()
    scene.wait_for_step(20)
    scene.close("train")
    scene.wait_at("train")
    scene.signal("USR2")
    scene.open("train")
    end = scene.wait_for_end(0)
    assert end["cause"] == "signal"
    scene.come_back()
    check_completed(scene, references, ["signal", "done"])
