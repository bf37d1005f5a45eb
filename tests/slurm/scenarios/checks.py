"""The one check of all scenarios: how a run that came back, and one that must not, looks afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.slurm.scenarios.scene import NUM_STEPS, Run, Scene

# What the journal has of each attempt, in order: a cause, one of several, or None for a kill without a word.
Causes = Sequence[str | tuple[str | None, ...] | None]


@dataclass(frozen=True)
class Reference:
    """What the undisturbed run left."""

    final_state: bytes
    metrics: list[dict[str, Any]]

    @classmethod
    def of(cls, run: Run) -> Reference:
        return cls(run.final_state, run.metrics)


References = Callable[[str, int], Reference]
"""(hardware, seed) -> its undisturbed run."""


def check_completed(scene: Scene, references: References, causes: Causes, run: Run | None = None) -> None:
    """Waits until the run is complete; then: once, with nothing lost, doubled or different."""
    which = run or scene.run
    scene.full_speed()
    scene.wait_until_done()
    let_echoes_end(scene, which)
    wait_until_gone(scene)
    row = scene.row_when(lambda row: row["state"] == "COMPLETED", which)
    assert (row["state"], row["cause"], row["step"]) == ("COMPLETED", "done", NUM_STEPS), row
    assert scene.slurm.job_state(which.job_id) in ("COMPLETED", "PREEMPTED") or not scene.slurm.spec.accounting
    check_story(scene, which, causes)
    check_result(which, references(scene.hardware, which.seed))


def check_story(scene: Scene, run: Run, causes: Causes) -> None:
    """One incarnation at a time, ends with the right causes, and nothing lost beyond the last checkpoint."""
    story = scene.story()
    assert not (scene.gates / "two_at_once").exists(), (scene.gates / "two_at_once").read_text()
    starts, ends = run.records("start"), {record["attempt"]: record for record in run.records("end")}
    assert [record["attempt"] for record in starts] == list(range(len(causes))), story
    incarnations = [(record["job_id"], record["restart_count"]) for record in starts]
    assert len(set(incarnations)) == len(incarnations), story
    found = [ends[number]["cause"] if number in ends else None for number in range(len(causes))]
    wanted = [cause if isinstance(cause, tuple) else (cause,) for cause in causes]
    assert all(cause in allowed for cause, allowed in zip(found, wanted, strict=True)), f"{found}\n{story}"
    for number, following in enumerate(starts[1:]):
        assert number not in ends or ends[number]["time"] <= following["time"], story

    resumed = {record["attempt"]: record["step"] for record in run.records("resume")}
    for earlier, later in itertools.pairwise(sorted(resumed)):
        assert resumed[earlier] <= resumed[later], story
    for number, end in ends.items():
        later = [step for attempt, step in resumed.items() if attempt > number]
        if end["saved_step"] is not None and later:
            assert later[0] == end["saved_step"], story
    for number, step in scene.seen.items() if run == scene.run else ():
        later = [resumed[attempt] for attempt in sorted(resumed) if attempt > number]
        assert not later or later[0] >= step, f"it had step {step} to go on from\n{story}"


def check_result(run: Run, reference: Reference) -> None:
    """Every step once in the metrics, each value and the final weights as in the undisturbed run."""
    assert run.metrics == reference.metrics
    assert run.final_state == reference.final_state


def check_stays(scene: Scene, state: str, cause: str | tuple[str, ...] = "", run: Run | None = None) -> None:
    """The run is over and stays so: nothing of it is left that could bring it back."""
    which = run or scene.run
    wait_until_gone(scene)
    causes = (cause,) if isinstance(cause, str) else cause

    def shown() -> bool:
        row = scene.driver.status("scene")[which.folder.name]
        return row["state"] == state and (not cause or row["cause"] in causes)

    scene.wait_for(shown, f"{state} {cause} of {which.folder.name}", 60)
    attempts = which.records("start")
    assert not (scene.gates / "two_at_once").exists()
    assert scene.submit_again()["submitted"] == 0
    assert scene.queue() == []
    assert which.records("start") == attempts
    assert not which.is_done


# PREEMPTED: what 24.11 may call a job that was preempted once, came back, and ended well (PreemptMode=CANCEL).
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED", "")


def let_echoes_end(scene: Scene, run: Run) -> None:
    """Since 24.05 Slurm requeues a job whose preemption it has noted once more when it exits, complete or not.

    Such a start finds DONE and leaves. Here it is let through at once instead of after two minutes; twice is once too
    often.
    """

    def settled() -> bool:
        return scene.slurm.job_state(run.job_id) in (*_ENDED, "PENDING")

    scene.wait_for(settled, f"the end of job {run.job_id}")
    if scene.slurm.version >= (24, 5) and scene.slurm.job_state(run.job_id) == "PENDING":
        print(f"echo: {scene.slurm.job(run.job_id)}")
        scene.echoes += 1
        scene.start_now(run)
        scene.wait_for(lambda: scene.slurm.job_state(run.job_id) in _ENDED, "the end of the echo")


def wait_until_gone(scene: Scene) -> None:
    """No job of the scene in the queue, and no process of it anywhere: what could bring a run back has ended."""
    scene.wait_for(
        lambda: scene.queue() == [] and scene.slurm.job_processes() == [], "an empty queue and no process left", 60
    )
