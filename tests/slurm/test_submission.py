"""Submission on a real Slurm: within its limits, exactly once, and refused with the nearest legal value."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.record.layout import SWEEP_FILES
from tests.journals import journal_records
from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import HOST_RELEASE, NODES
from tests.unit.api.damaged_sweeps import SUBSETS

TINY = (
    "experiment=digits", "cluster=testbed", "hardware=testbed_x1", "model=mlp", "train.num_steps=2",
    "train.eval_every_steps=0", "schedule.warmup_steps=0",
)  # fmt: skip


@pytest.fixture
def limited(slurm_variant: Callable[[str], SlurmCluster], tmp_path: Path) -> Driver:
    """MaxArraySize=21, and a QOS `limited` with MaxSubmitJobsPerUser=15."""
    return Driver(slurm_variant("smallarray"), tmp_path)


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


def _starts(driver: Driver, sweep: str) -> Counter[str]:
    """How often each run began: its journals."""
    files = (driver.runs / sweep).glob("*/attempt-000.jsonl")
    return Counter({path.parent.name: len(journal_records(path.parent, "start")) for path in files})


@pytest.mark.timeout(900)
@pytest.mark.parametrize("host_count", [16, pytest.param(60, marks=pytest.mark.long)])
def test_a_grid_above_every_limit_completes_although_its_shell_was_killed(limited: Driver, host_count: int) -> None:
    # Each run costs two seconds of two cores in importing torch. Arrays of 14 at most come one after another: 16 runs
    # are two, 60 are five. On one release the first was accepted when the shell was killed, on the others the top-up
    # job alone.
    count, killed_after = (host_count, 2) if limited.slurm.spec.release == HOST_RELEASE else (16, 1)
    words = (*TINY, "hardware.qos=limited", f"seed=range(0,{count})", "sweep_name=many")
    limited.run_killed_after_sbatch(killed_after, "submit", *words)
    runs = limited.wait_for_states("many", "COMPLETED", timeout_s=800)
    assert len(runs) == count
    assert limited.seen["many"] <= {"NEW", "UNKNOWN", "PENDING", "RUNNING", "COMPLETED"}, "no state that was never true"
    assert _starts(limited, "many") == Counter(runs.keys()), "every run once"
    assert limited.json("submit", *words)["submitted"] == 0


def test_plan_names_the_limits_that_bind_and_the_expected_start(limited: Driver) -> None:
    plan = limited.json("plan", *TINY, "hardware.qos=limited", "seed=range(0,30)", "sweep_name=planned")
    assert ([array["runs"] for array in plan["arrays"]], plan["waiting"]) == ([14], 16)
    assert plan["limits"] == ["MaxSubmitJobsPerUser of QOS limited is 15, 0 in use"]
    plan = limited.json("plan", *TINY, "seed=range(0,30)", "sweep_name=planned")
    assert ([array["runs"] for array in plan["arrays"]], plan["waiting"]) == ([21, 9], 0)
    assert plan["limits"] == ["MaxArraySize is 21: 30 runs on testbed_x1 are 2 arrays"]
    impossible = limited.run("plan", *TINY, "hardware.partition=main2", check=False)
    assert (impossible.returncode, "Problem: hardware.partition=main2" in impossible.stdout) == (2, True)
    assert plan["arrays"][0]["start"].startswith("20")
    assert not (limited.runs).exists(), "a plan writes nothing"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hardware.partition=main2"], "Did you mean main?"),
        (["hardware.qos=limitid"], "Did you mean limited?"),
        (["cluster.account=resaerch"], "Did you mean research?"),
        (["hardware.gpu_type=a10"], "no node in partition main has such GPUs. Did you mean a100?"),
        (["hardware.constraint=fast"], "no node in partition main has the feature fast"),
        (
            ["hardware.partition=short", "hardware.time_limit_min=11"],
            "at most 10, the MaxTime of partition short",
        ),
        (["hardware.num_nodes=5", "train.global_batch_size=60"], "hardware.num_nodes=5 must be at most 4"),
        (["hardware.gpus_per_node=5", "train.global_batch_size=60"], "hardware.gpus_per_node=5 must be at most 4"),
        (["hardware.mem_gb_per_node=9"], "at most 8000 MB"),
        (["hardware.cpus_per_gpu=9"], "Use hardware.cpus_per_gpu=8"),
    ],
)
def test_what_the_cluster_would_refuse_is_refused_before_anything_is_written(
    limited: Driver, words: list[str], message: str
) -> None:
    done = limited.run("submit", *TINY, *words, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (limited.runs).exists()


def test_slurm_itself_is_asked_too(driver: Driver) -> None:
    """A combination that no rule of ours judges: Slurm's own words."""
    words = (*TINY, "hardware.constraint='[fast*1&slow*1]'")
    done = driver.run("submit", *words, check=False)
    assert done.returncode == 2
    assert "Slurm would refuse hardware=testbed_x1" in done.stderr
    assert not (driver.runs).exists()


@pytest.mark.long
def test_a_site_without_accounting_works(slurm_variant: Callable[[str], SlurmCluster], tmp_path: Path) -> None:
    driver = Driver(slurm_variant("noaccounting"), tmp_path)
    driver.run("submit", *TINY, "sweep_name=bare")
    driver.wait_for_states("bare", "COMPLETED")
    refused = driver.run("submit", *TINY, "hardware.num_nodes=8", "sweep_name=big", check=False)
    assert (refused.returncode, "must be at most 4" in refused.stderr) == (2, True)


def test_killed_between_two_arrays_the_next_submit_finishes(driver: Driver) -> None:
    words = (*TINY, "hardware=testbed_x1,testbed_x4", "train.global_batch_size=64", "sweep_name=halved")
    driver.run_killed_after_sbatch(1, "submit", *words)
    again = driver.json("submit", *words)
    assert (again["submitted"], again["already"]) == (1, 1)
    runs = driver.wait_for_states("halved", "COMPLETED")
    assert _starts(driver, "halved") == Counter(runs.keys())
    assert driver.json("submit", *words)["submitted"] == 0


def test_an_orphan_that_has_ended_already_is_found(driver: Driver) -> None:
    """Killed after sbatch; the job is over, and out of the queue, before anybody looks."""
    words = (*TINY, "sweep_name=orphan")
    driver.run_killed_after_sbatch(1, "submit", *words)
    folder = driver.runs / "orphan"
    driver.slurm.wait_for(lambda: any(folder.glob("*/DONE")), 120, "the orphan's end")
    assert driver.json("submit", *words)["submitted"] == 0
    assert driver.only_run("orphan")["state"] == "COMPLETED"


@pytest.mark.long
def test_a_sweep_that_loses_its_files_goes_on_and_is_submitted_once(driver: Driver) -> None:
    """A flipped bit ended the elements that had not begun; without its files it was a new sweep, and all was sent."""
    words = (*TINY, "cluster.array_parallelism=1", "seed=range(0,5)", "sweep_name=robbed")
    folder = driver.runs / "robbed"
    driver.run("submit", *words)
    lines = (folder / "submissions.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "submissions.jsonl").write_bytes(lines[0].replace(b"intent", b"intdnt") + b"".join(lines[1:]))
    driver.slurm.wait_for(lambda: len([*folder.glob("*/DONE")]) == 2, 120, "the end of two runs")
    assert driver.json("submit", *words)["submitted"] == 0
    for node in NODES:  # what is at work goes on, and nothing begins
        driver.slurm.set_node(node, "drain")
    # One that has its node already reads its spec in these seconds; without specs.jsonl it ends with 78.
    driver.slurm.wait_for(
        lambda: not driver.slurm.run("squeue", "-h", "-t", "RUNNING,COMPLETING,CONFIGURING").stdout, 60, "idle nodes"
    )
    whole = {name: (folder / name).read_bytes() for name in SWEEP_FILES}
    for gone in SUBSETS:
        for name, data in whole.items():
            (folder / name).write_bytes(data)
        for name in gone:
            (folder / name).unlink()
        states = {run["state"] for run in driver.status("robbed").values()}
        assert states <= {"COMPLETED", "RUNNING", "PENDING"}, gone
        again = driver.json("submit", *words)
        assert (again["submitted"], again["already"], len(again["arrays"])) == (0, 5, 0), gone
    for node in NODES:
        driver.slurm.set_node(node, "resume")
    runs = driver.wait_for_states("robbed", "COMPLETED")
    assert _starts(driver, "robbed") == Counter(runs.keys()), "every run once"
    assert len([*(folder / "slurm").glob("*.sh")]) == 1


def test_jobs_that_wait_are_found_in_the_queue_when_all_files_about_them_are_lost(driver: Driver) -> None:
    """Slurm tells whose they are: their name, and the path that their script had. Another sweep keeps the same name."""
    words = (*TINY, "seed=range(0,3)", "sweep_name=forgotten")
    for node in NODES:
        driver.slurm.set_node(node, "drain")
    driver.submit(*words)
    elsewhere = Driver(driver.slurm, driver.folder / "elsewhere")
    elsewhere.folder.mkdir()
    elsewhere.submit(*words)
    folder = driver.runs / "forgotten"
    for name in ("slurm", "submissions"):
        shutil.rmtree(folder / name)
    (folder / "submissions.jsonl").unlink()
    runs = driver.status("forgotten").values()
    assert {run["state"] for run in runs} == {"UNKNOWN"}
    assert driver.json("submit", *words)["submitted"] == 0
    driver.run("cancel", "forgotten")
    assert {run["state"] for run in elsewhere.status("forgotten").values()} == {"PENDING"}, "its jobs are its own"
    elsewhere.run("cancel", "forgotten")
    for each in (driver, elsewhere):
        each.wait_for_states("forgotten", "CANCELLED")
    for node in NODES:
        driver.slurm.set_node(node, "resume")


def test_over_budget_is_refused_with_the_number(driver: Driver) -> None:
    done = driver.run("submit", *TINY, "seed=range(0,9)", "budget.max_jobs=8", check=False)
    assert (done.returncode, "budget.max_jobs=8: this grid would have 9 jobs" in done.stderr) == (2, True)
    done = driver.run("submit", *TINY, "seed=range(0,9)", "budget.max_gpu_hours=1.4", check=False)
    assert (done.returncode, "may take up to 1.5 GPU-hours" in done.stderr) == (2, True)
    assert not (driver.runs).exists()


def test_options_of_sbatch_reach_the_job(driver: Driver) -> None:
    answer = driver.submit(
        "experiment=digits",
        "debug=smoke",
        "hardware=testbed_x1",
        "sweep_name=more",
        "+cluster.sbatch={nice: 7, hold: true}",
    )
    (array,) = answer["arrays"]
    told = driver.slurm.run("scontrol", "show", "job", array["job_id"]).stdout
    assert "Nice=7" in told
    driver.wait_for_states("more", "HELD")
    refused = driver.run("plan", "cluster=testbed", "experiment=digits", "+cluster.sbatch.time=5", check=False)
    assert (refused.returncode, "Use hardware.time_limit_min" in refused.stderr) == (2, True)
    driver.run("cancel", "more")


def _jobs_of(driver: Driver) -> dict[str, str]:
    """Job element -> its state, of every job that Slurm still remembers."""
    rows = driver.slurm.run("squeue", "-h", "-r", "-t", "all", "-o", "%i %T").stdout.splitlines()
    return dict(row.split() for row in rows)


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.long)])
def test_of_two_jobs_of_a_run_that_start_in_the_same_second_one_trains(driver: Driver, count: int) -> None:
    before = _jobs_of(driver)
    words = (*TINY, "hardware.partition=first:main,high", f"seed=range(0,{count})", "sweep_name=both")
    arrays = [array["job_id"] for array in driver.json("submit", *words)["arrays"]]
    assert len(arrays) == 2
    runs = driver.wait_for_states("both", "COMPLETED", timeout_s=800)
    assert _starts(driver, "both") == Counter(runs.keys()), "every run once"
    for run_id, run in runs.items():
        (claim,) = (driver.runs / "both" / run_id).glob("claim-*.json")
        assert run["job_id"] == json.loads(claim.read_text())["job_id"] + "_" + run["job_id"].partition("_")[2]
    driver.slurm.wait_for(
        lambda: not {"PENDING", "RUNNING", "COMPLETING"} & {*_jobs_of(driver).values()}, 120, "the others to leave"
    )
    ends = {job_id: state for job_id, state in _jobs_of(driver).items() if job_id not in before}
    assert set(ends.values()) <= {"COMPLETED", "CANCELLED"}
    assert driver.json("submit", *words)["submitted"] == 0


@pytest.mark.long
def test_the_job_that_starts_cancels_the_one_that_waits(driver: Driver) -> None:
    """The other way round too: whichever partition is down, and with other ranks."""
    for down, up in (("high", "main"), ("main", "high")):
        driver.slurm.run("scontrol", "update", f"PartitionName={down}", "State=DOWN")
        try:
            sweep = f"down-{down}"
            elastic = ("hardware=first:testbed_x1,testbed_x4", "parallel.elastic=true", "train.global_batch_size=64")
            lists = ("hardware.partition=first:main,high", *(elastic if down == "main" else ()))
            driver.json("submit", *TINY, *lists, f"sweep_name={sweep}")
            ((run_id, run),) = driver.wait_for_states(sweep, "COMPLETED").items()
            assert driver.seen[sweep] <= {"PENDING", "RUNNING", "COMPLETED"}
            assert _starts(driver, sweep) == Counter([run_id])
            job = driver.slurm.run("scontrol", "show", "job", "-o", run["job_id"]).stdout
            assert f"Partition={up} " in job
            driver.slurm.wait_for(lambda: "PENDING" not in _jobs_of(driver).values(), 60, "the others to be cancelled")
        finally:
            driver.slurm.run("scontrol", "update", f"PartitionName={down}", "State=UP")


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
def test_a_submit_to_two_shapes_that_was_killed_is_taken_up(driver: Driver, number: int) -> None:
    words = (*TINY, "hardware.partition=first:main,high", "seed=0,1", f"sweep_name=killed{number}")
    driver.run_killed_after_sbatch(number, "submit", *words)
    driver.run("submit", *words)
    runs = driver.wait_for_states(f"killed{number}", "COMPLETED")
    assert _starts(driver, f"killed{number}") == Counter(runs.keys()), "every run once"
