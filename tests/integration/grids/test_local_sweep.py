"""Grids on one machine: the detached queue, Ctrl-C, cancel, failing ranks, and every shipped experiment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.status import read_status
from tests import warm
from tests.benchmarks.gpu import EXPERIMENTS
from tests.integration.conftest import PACED
from tests.journals import journal_records

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

CONF = Path(__file__).parents[3] / "conf"
TINY = (
    "experiment=digits",
    "cluster=local",
    "train.num_steps=20",
    "train.eval_every_steps=0",
    "schedule.warmup_steps=0",
)


def _wait_until(local: LocalDriver, sweep: str, *states: str, timeout_s: float = 90) -> dict[str, str]:
    deadline = time.monotonic() + timeout_s
    while True:
        runs = {run.run_id: run.state.value for run in read_status(SweepPaths(local.folder / "runs" / sweep)).runs}
        if all(state in states for state in runs.values()):
            return runs
        assert time.monotonic() < deadline, (runs, local.logs())
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.dist
def test_grid_with_two_hardware_shapes(local: LocalDriver) -> None:
    done = local.json("submit", *TINY, "hardware=cpu_x1,cpu_x2", "model=mlp", "sweep_name=mixed", "--wait")
    assert (done["submitted"], done["already"]) == (2, 0)
    assert [(array["hardware"], array["runs"]) for array in done["arrays"]] == [("cpu_x1", 1), ("cpu_x2", 1)]
    assert done["status"]["counts"] == {"COMPLETED": 2}
    worlds = {json.loads(p.read_text())["world_size"] for p in (local.folder / "runs/mixed").glob("*/result.json")}
    assert worlds == {1, 2}
    again = local.json("submit", *TINY, "hardware=cpu_x1,cpu_x2", "model=mlp", "sweep_name=mixed", "--wait")
    assert (again["submitted"], again["already"]) == (0, 2)


def test_submit_is_detached_and_ctrl_c_stops_with_a_checkpoint(local: LocalDriver) -> None:
    slow = local.slow_digits()
    words = ("submit", *PACED, "cluster=local", "model=mlp", "seed=0,1", "train.num_steps=200",
             "monitor.heartbeat_every_s=0", "sweep_name=long")  # fmt: skip
    process = local.start(*words, "--wait")
    assert process.stdout is not None
    # It watches by then: in an import, as of what it watches with, Python may drop a KeyboardInterrupt.
    while "RUNNING" not in (line := process.stdout.readline()):
        assert line, "it ended before a run began"
    local.wait_for_step("long", 20)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "continues from here" in errors, output + errors
    states = sorted(run["state"] for run in local.json("status", "long")["runs"])
    assert states == ["NEW", "PREEMPTED"]

    slow.unlink()
    local.json(*words)  # returns at once; the queue works on by itself
    _wait_until(local, "long", "COMPLETED", timeout_s=200)
    resumed = [
        record["step"]
        for path in (local.folder / "runs/long").glob("*/attempt-000.jsonl")
        for record in journal_records(path.parent, "resume")
    ]
    assert len(resumed) == 3
    assert max(resumed) >= 20


def test_cancel_local_runs(local: LocalDriver) -> None:
    words = ("submit", "experiment=digits", "cluster=local", "model=mlp", "seed=0,1", "train.num_steps=100000",
             "monitor.heartbeat_every_s=0", "sweep_name=cancelled")  # fmt: skip
    local.json(*words)
    local.wait_for_step("cancelled", 5)
    assert len(local.json("cancel", "cancelled")["cancelled"]) == 2
    _wait_until(local, "cancelled", "CANCELLED")
    assert local.json(*words)["submitted"] == 0


@pytest.mark.long
@pytest.mark.dist
def test_failing_rank_ends_the_run_and_shows_its_error(local: LocalDriver) -> None:
    (local.folder / "one_rank_fails.py").write_text(
        "import os\n"
        "from hpc_trainer.config.schema.data import DigitsConfig\n"
        "from hpc_trainer.training.data.digits import build as digits\n"
        "def build(split, **options):\n"
        "    if os.environ['SUBMITIT_LOCAL_GLOBALID'] == '1' and split == 'eval':\n"
        "        raise RuntimeError('rank one is broken')\n"
        "    return digits(DigitsConfig(), split)\n"
    )
    words = (*TINY, "hardware=cpu_x2", "data=custom", "data._target_=one_rank_fails.build", "sweep_name=broken")
    begin = time.monotonic()
    done = local.run("submit", *words, "--trust", "one_rank_fails", "--wait", check=False)
    assert done.returncode == 1
    assert time.monotonic() - begin < 60
    (run,) = local.json("status", "broken")["runs"]
    assert run["state"] == "FAILED"
    assert "rank one is broken" in local.run("status", "broken").stdout
    logs = local.run("logs", run["run_id"], "--all-ranks").stdout
    assert "RuntimeError: rank one is broken" in logs
    left = [p for p in psutil.process_iter(["cmdline", "environ"]) if str(local.folder) in str(p.info["cmdline"])]
    assert not [p for p in left if p.pid != os.getpid() and "--run" in p.info["cmdline"]]


# Those that are meant for a GPU, as `tests.benchmarks.gpu --small` has them.
MADE_SMALL = {each.name: (*each.small, "train.compile=false") for each in EXPERIMENTS.values()}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=() if path.stem == "gpt_bytes" else pytest.mark.long)
        for path in sorted((CONF / "experiment").glob("*.yaml"))
    ],
)
def test_every_shipped_experiment_runs(local: LocalDriver, name: str) -> None:
    done = local.train(f"experiment={name}", "debug=smoke", *MADE_SMALL.get(name, ()))
    assert (done["state"], done["step"]) == ("COMPLETED", 4)


@pytest.mark.parametrize("model", ["resnet50", "cnn"])
@pytest.mark.long
def test_models_train_on_larger_images(local: LocalDriver, model: str) -> None:
    done = local.train(
        f"model={model}", "data=synthetic_images", "data.image_size=64", "data.num_samples=8", "data.num_eval=4",
        "train.global_batch_size=4", "optim=sgd", "debug=smoke", "train.num_steps=2", "sweep_name=images",
    )  # fmt: skip
    assert done["state"] == "COMPLETED"


@pytest.mark.long
def test_tensorboard_events_are_written(local: LocalDriver) -> None:
    pytest.importorskip("tensorboard")
    local.train("experiment=digits", "debug=smoke", "tracker=tensorboard", "sweep_name=tracked")
    assert list(local.run_folder("tracked").glob("tensorboard/events*"))


@pytest.mark.long
def test_cancel_while_the_run_starts(local: LocalDriver) -> None:
    """The ranks are not there yet to be signalled: they find the marker."""
    words = ("submit", "experiment=digits", "cluster=local", "model=mlp", "train.num_steps=100000",
             "monitor.heartbeat_every_s=0", "sweep_name=early")  # fmt: skip
    local.json(*words)
    deadline = time.monotonic() + 60
    while not list((local.folder / "runs/early").glob("*/logs/*.log")):  # the worker is alive and imports torch
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(local.json("cancel", "early")["cancelled"]) == 1
    _wait_until(local, "early", "CANCELLED")
    assert not list((local.folder / "runs/early").glob("*/DONE"))
    assert local.json(*words)["submitted"] == 0


def _queue_lives(local: LocalDriver, sweep: str) -> bool:
    wanted = {"hpc_trainer.launch.local_queue", str(local.folder / "runs" / sweep)}
    return any(wanted <= set(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))


@pytest.mark.long
@pytest.mark.dist
def test_stop_before_the_ranks_have_met(local: LocalDriver) -> None:
    """Rank 1 never comes: rank 0 must still hear the signal, record it and leave."""
    words = ("train", *TINY, "hardware=cpu_x2", "sweep_name=lonely")
    local.json(*words)
    folder = local.run_folder("lonely")
    while _queue_lives(local, "lonely"):  # it looks at the run's folder once more after the run has ended
        time.sleep(0.05)
    shutil.rmtree(folder)
    environ = {**local.env, "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    rank = warm.Popen(
        [sys.executable, "-m", "hpc_trainer.worker", "--sweep-dir", str(folder.parent), "--run", folder.name],
        env=environ, cwd=local.folder,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (folder / "rendezvous.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(timeout=30) == 75
    finally:
        rank.kill()
    (end,) = local.events("lonely", "end")
    assert (end["state"], end["cause"], end["saved_step"]) == ("PREEMPTED", "stopped", None)


@pytest.mark.long
def test_run_outlives_its_queue_and_is_not_started_twice(local: LocalDriver) -> None:
    words = ("submit", "experiment=digits", "cluster=local", "model=mlp", "train.num_steps=4000",
             "monitor.heartbeat_every_s=0", "sweep_name=orphan")  # fmt: skip
    local.json(*words)
    local.wait_for_step("orphan", 5)
    processes = psutil.process_iter(["cmdline"])
    ours = [each for each in processes if str(local.folder) in str(each.info["cmdline"])]
    (queue,) = [each for each in ours if "hpc_trainer.launch.local_queue" in each.info["cmdline"]]
    queue.kill()
    queue.wait(10)
    assert local.json(*words)["submitted"] == 0
    _wait_until(local, "orphan", "COMPLETED")
    assert len(local.events("orphan", "start")) == 1


@pytest.mark.long
def test_code_that_exits_is_no_success(local: LocalDriver) -> None:
    (local.folder / "leaves.py").write_text("import sys\ndef build(split, **options):\n    sys.exit(0)\n")
    words = (*TINY, "data=custom", "data._target_=leaves.build", "sweep_name=leaves", "--trust", "leaves")
    done = local.run("submit", *words, "--wait", check=False)
    assert done.returncode == 1
    assert "SystemExit" in done.stderr
    assert local.json("submit", *words)["submitted"] == 0


@pytest.mark.long
@pytest.mark.dist
def test_the_demo_reaches_its_accuracy_and_says_that_all_is_done(local: LocalDriver) -> None:
    makefile = (CONF.parent / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if line.startswith("DEMO :=")]
    words = line.removeprefix("DEMO :=").replace("$(DEMO_HARDWARE)", "cpu_x2").split()
    first = local.run(*words)
    best = max(row["eval_accuracy"] for row in local.json("results", "demo"))
    print(f"best accuracy {best}")
    assert best >= 0.97
    assert "Best eval_accuracy" in first.stdout
    assert first.stdout.splitlines()[-1].endswith(" report demo"), "the next step"
    assert first.stdout.count("Next: ") == 1
    again = local.run(*words)
    assert "all is done (4 COMPLETED)" in again.stdout
    assert len(local.json("results", "demo", "--sort", "eval_loss")) == 4


@pytest.mark.long
def test_worker_that_cannot_start_is_failed_with_its_words(local: LocalDriver) -> None:
    """A log folder that is a file: nothing can be journalled by the worker itself."""
    (planned,) = local.json("plan", *TINY, "sweep_name=blocked")["runs"]
    folder = local.folder / "runs" / "blocked" / planned["run_id"]
    folder.mkdir(mode=0o700, parents=True)
    (folder / "logs").write_text("in the way")
    words = ("submit", *TINY, "sweep_name=blocked", "--wait")
    done = local.run(*words, check=False)
    assert done.returncode == 1
    (run,) = local.json("status", "blocked")["runs"]
    assert (run["state"], run["cause"]) == ("FAILED", "not started")
    assert "FileExistsError" in local.run("status", "blocked").stdout
