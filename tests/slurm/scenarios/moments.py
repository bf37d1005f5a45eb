"""The warning at awkward moments: before the first step, in an evaluation, in a save, after the last step."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from tests.slurm.scenarios.checks import References, check_completed
from tests.slurm.scenarios.scene import NUM_STEPS, Scene
from tests.slurm.scenarios.table import scenario


@scenario()
def warned_before_the_first_step(scene: Scene, references: References) -> None:
    """SIGUSR2 while the data sets are being built."""
    scene.close("build-train")
    scene.submit()
    scene.wait_at("build-train")
    scene.signal("USR2")
    scene.wait_for_signal("build-train")
    scene.open("build-train")
    assert scene.wait_for_end(0)["saved_step"] in (None, 1)
    scene.come_back()
    check_completed(scene, references, ["signal", "done"])


@scenario()
def warned_in_an_evaluation(scene: Scene, references: References) -> None:
    """SIGUSR2 in the evaluation of step 100: it ends there, and comes again once the run is back."""
    scene.submit()
    scene.close("eval")
    scene.full_speed()
    scene.wait_at("eval")
    scene.signal("USR2")
    scene.wait_for_signal("eval")
    scene.open("eval")
    assert scene.wait_for_end(0)["saved_step"] == 100
    scene.come_back()
    check_completed(scene, references, ["signal", "done"])


@scenario()
def warned_in_a_save(scene: Scene, references: References) -> None:
    """SIGUSR2 in a regular save, and SIGTERM on top of it: both are absorbed, the save is not entered twice."""
    scene.submit()
    scene.wait_for_step(10)
    scene.close("save")
    scene.full_speed()
    scene.wait_at("save")
    scene.signal("USR2")
    scene.signal("TERM")
    scene.wait_for_signal("save")
    scene.open("save")
    end = scene.wait_for_end(0)
    assert (end["signal"], end["cause"]) == ("SIGUSR2", "signal")
    assert end["saved_step"] > 10
    scene.come_back()
    check_completed(scene, references, ["signal", "done"])


@scenario()
def warned_after_the_last_step(scene: Scene, references: References) -> None:
    """SIGUSR2 in the last evaluation: the run completes, and nothing comes back."""
    scene.submit()
    scene.wait_for_step(101)
    scene.close("eval")
    scene.full_speed()
    scene.wait_at("eval")
    assert scene.run.heartbeat["step"] == NUM_STEPS
    scene.signal("USR2")
    scene.wait_for_signal("eval")
    scene.open("eval")
    check_completed(scene, references, ["done"])
    assert scene.slurm.job_state(scene.run.job_id) in ("COMPLETED", "")


@scenario()
def warned_again_and_again(scene: Scene, references: References) -> None:
    """Ten signals of both kinds to each rank within a tenth of a second: one stop, one save, one requeue."""
    scene.submit()
    scene.wait_for_step(20)
    scene.note()
    pids = [scene.pid_of(rank) for rank in range(scene.num_ranks)]
    for number in (signal.SIGUSR2, signal.SIGTERM) * 5:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # that quick
                os.kill(pid, number)
        time.sleep(0.01)
    scene.wait_for_end(0)
    scene.come_back()
    assert scene.slurm.job(scene.run.job_id)["Restarts"] == "1"
    check_completed(scene, references, ["signal", "done"])
