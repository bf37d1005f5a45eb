"""The batch shell is killed, or told to stop, beside its ranks: an interruption, and never a cancel."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.slurm.scenarios.checks import References, check_completed, wait_until_gone
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import ONE, scenario

# What happens to the ranks then: srun hands SIGTERM on to them as SIGKILL, and they leave no word.
_WORDS = (None, "batch_shell", "signal")


@scenario()
def batch_shell_killed(scene: Scene, references: References) -> None:
    """kill -9, TERM and USR2 to the batch shell by hand: interrupted each time, and the same submit goes on."""
    blows = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2) if scene.num_ranks == 1 else (signal.SIGKILL,)
    scene.submit()
    for attempt, number in enumerate(blows):
        scene.wait_for_step(10 + 20 * attempt, attempt)
        scene.note()
        os.kill(_batch_shell(scene), number)
        _is_interrupted(scene, f"{number.name} to the batch shell")
    check_completed(scene, references, [*[_WORDS] * len(blows), "done"])


@scenario(ONE)
def batch_shell_signalled_by_scancel(scene: Scene, references: References) -> None:
    """scancel --batch and --full with a signal: the job ends as FAILED, and nobody has cancelled the run."""
    blows = (("--batch", "TERM"), ("--batch", "USR2"), ("--full", "USR2"), ("--full", "TERM"))
    scene.submit()
    for attempt, (which, name) in enumerate(blows):
        scene.wait_for_step(10 + 20 * attempt, attempt)
        scene.note()
        scene.slurm.run("scancel", which, f"--signal={name}", scene.run.job_id)
        _is_interrupted(scene, f"scancel {which} --signal={name}")
    check_completed(scene, references, [*[_WORDS] * len(blows), "done"])


@scenario(ONE, variant="noaccounting")
def batch_shell_killed_without_accounting(scene: Scene, references: References) -> None:
    """No sacct at all: what scontrol gives as the reason tells a killed batch shell from a scancel."""
    scene.submit()
    scene.wait_for_step(20)
    scene.note()
    os.kill(_batch_shell(scene), signal.SIGUSR2)
    _is_interrupted(scene, "SIGUSR2 to the batch shell")
    check_completed(scene, references, [_WORDS, "done"])


def _batch_shell(scene: Scene) -> int:
    """The process of the job's batch script."""
    pids = scene.slurm.job_processes()
    (shell,) = [pid for pid in pids if b"slurm_script" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return shell


def _is_interrupted(scene: Scene, blow: str) -> None:
    """The run is over for now, not by a cancel, and the same command brings it back at once."""
    wait_until_gone(scene)
    row = scene.driver.only_run("scene")
    assert row["state"] == "PREEMPTED", f"{blow}: {row}\n{scene.story()}"
    assert scene.submit_again()["submitted"] == 1, f"{blow}\n{scene.story()}"
    scene.follow_job()
