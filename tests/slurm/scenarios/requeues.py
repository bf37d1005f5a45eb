"""Requeues that people and sites do: by hand, of one array element, forbidden, and by exit code."""

from __future__ import annotations

from tests.slurm.scenarios.checks import References, check_completed, check_stays
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import ONE, TWO_NODES, scenario


@scenario(timeout_s=700)
def requeued_by_hand_five_times(scene: Scene, references: References) -> None:
    """Five `scontrol requeue` in a row, each in the middle: six attempts, one result."""
    scene.submit()
    for attempt in range(5):
        scene.wait_for_step(10 + 20 * attempt, attempt)
        scene.requeue()
        scene.start_now()
    check_completed(scene, references, [*[("requeued", "signal")] * 5, "done"])


@scenario(ONE)
def one_array_element_requeued(scene: Scene, references: References) -> None:
    """The warning reaches one element of three: it comes back alone, its siblings notice nothing."""
    scene.submit(seeds=(0, 1, 2))
    middle = scene.runs[1]
    for run in scene.runs:
        scene.wait_for_step(10, run=run)
    scene.signal("USR2", middle)
    scene.wait_for_job("PENDING", run=middle)
    restarts = [scene.slurm.job(run.job_id)["Restarts"] for run in scene.runs]
    assert restarts == ["0", "1", "0"]
    scene.come_back(middle)
    for run, causes in zip(scene.runs, (["done"], ["signal", "done"], ["done"]), strict=True):
        check_completed(scene, references, causes, run)


@scenario(ONE)
def raw_array_id_requeued(scene: Scene, references: References) -> None:
    """`scontrol requeue <array>` hits every element, which is why we name one; all come back all the same."""
    scene.submit(seeds=(0, 1, 2))
    for run in scene.runs:
        scene.wait_for_step(10, run=run)
    scene.requeue(scene.run.job_id.partition("_")[0])
    for run in scene.runs:
        scene.wait_for_job("PENDING", run=run)
    assert {scene.slurm.job(run.job_id)["Restarts"] for run in scene.runs} == {"1"}, "siblings were hit"
    for run in scene.runs:
        scene.come_back(run)
    for run in scene.runs:
        check_completed(scene, references, [("requeued", "signal"), "done"], run)


@scenario(variant="norequeue")
def site_default_is_no_requeue(scene: Scene, references: References) -> None:
    """JobRequeue=0 is only a default: our --requeue wins."""
    scene.submit()
    scene.wait_for_step(20)
    scene.signal("USR2")
    scene.wait_for_end(0)
    scene.come_back()
    check_completed(scene, references, ["signal", "done"])


@scenario()
def requeue_refused(scene: Scene, references: References) -> None:
    """An administrator's Requeue=0 on the job: another job carries the run on."""
    scene.submit()
    first = scene.run.job_id
    scene.slurm.run("scontrol", "update", f"jobid={first}", "requeue=0")
    scene.wait_for_step(20)
    scene.signal("USR2")
    scene.wait_for_end(0)
    scene.wait_for(lambda: scene.driver.only_run("scene")["job_id"] != first, "a successor of the job", 20)
    scene.follow_job()
    check_completed(scene, references, ["signal", "done"])


@scenario(variant="requeueexit")
def exit_code_that_the_site_requeues(scene: Scene, references: References) -> None:
    """RequeueExit=75: Slurm requeues what we requeued already; still one incarnation at a time, and one result."""
    scene.submit(partition="preempt")
    scene.wait_for_step(20)
    preemptor = scene.preempt()
    scene.wait_for_end(0)
    scene.wait_for_job("PENDING")
    scene.slurm.run("scancel", str(preemptor))
    scene.come_back()
    check_completed(scene, references, ["preempted", "done"])


@scenario(ONE, variant="requeueexit")
def no_progress_where_the_site_requeues_it(scene: Scene, references: References) -> None:
    """RequeueExit=76: a run that stopped for good is not started again and again."""
    scene.close("train")
    scene.submit("cluster.max_no_progress=1")
    scene.wait_at("train")
    scene.requeue()
    scene.start_now()
    scene.wait_for_end(1)
    check_stays(scene, "FAILED", "no_progress")


@scenario(TWO_NODES, ONE)
def no_progress(scene: Scene, references: References) -> None:
    """Three restarts without a new step (with four ranks, one): the next start says so and stops for good."""
    allowed = 3 if scene.num_ranks == 1 else 1
    scene.close("train")
    scene.submit(f"cluster.max_no_progress={allowed}")
    for attempt in range(allowed):
        scene.wait_for(lambda attempt=attempt: len(scene.run.records("resume")) > attempt, "the loop to begin")
        scene.requeue()
        scene.start_now()
    scene.wait_for_end(allowed)
    scene.open("train")
    check_stays(scene, "FAILED", "no_progress")


@scenario(ONE)
def restart_that_crashes_before_python(scene: Scene, references: References) -> None:
    """A line of cluster.setup that fails at the second start: FAILED with what it printed; mended, the run goes on."""
    setup = scene.folder / "setup.sh"
    setup.touch()
    scene.submit(f"cluster.setup=['. {setup}']")
    scene.wait_for_step(20)
    scene.requeue()
    setup.write_text("echo 'module: no module cuda/99' >&2\nexit 3\n")
    scene.start_now()
    scene.wait_for_job("FAILED")
    row = scene.driver.only_run("scene")
    assert row["state"] == "FAILED", row
    why = scene.driver.json("why", scene.run.folder.name)
    assert "module: no module cuda/99" in why["evidence"][0], why
    assert any("--retry-failed" in line for line in why["advice"]), why
    setup.write_text("")
    assert scene.submit_again()["submitted"] == 0
    assert scene.submit_again("--retry-failed")["submitted"] == 1
    scene.follow_job()
    check_completed(scene, references, [("requeued", "signal"), "done"])
