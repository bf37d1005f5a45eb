"""Code and YAML edited after submit change no run that waits in the queue or comes back from a preemption."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
DATA = """\"\"\"The digits, and a line in the log that says which code this is.\"\"\"

from hpc_trainer.config.schema.data import DigitsConfig

from hpc_trainer.datasets import digits
from my_lab.words import WORD


def build(split):
    print(f"{split}: the {WORD} code")
    return digits.build(DigitsConfig(num_eval=360), split)
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /data: custom

experiment_name: frozen
data:
  _target_: my_lab.data.build
train:
  num_steps: 4000
"""
WORDS = (
    "--config-dir", "conf_mine", "--trust", "my_lab", "experiment=frozen", "model=mlp", "hardware=testbed_x1",
    "train.eval_every_steps=0", "checkpoint.every_steps=100000", "monitor.heartbeat_every_s=0.1",
)  # fmt: skip


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    """A person's checkout: their package, their configuration, and hpc_trainer as its developers have it."""
    shutil.copytree(ROOT / "hpc_trainer", tmp_path / "hpc_trainer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for name, text in (
        ("my_lab/__init__.py", ""),
        ("my_lab/words.py", "WORD = 'committed'\n"),
        ("my_lab/data.py", DATA),
        ("conf_mine/experiment/frozen.yaml", EXPERIMENT),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    author = ("-c", "user.name=Me", "-c", "user.email=me@example.org")
    for argv in (("init", "-q"), ("add", "-A"), (*author, "commit", "-q", "-m", "First")):
        subprocess.run(["git", *argv], cwd=tmp_path, check=True)
    (tmp_path / "my_lab" / "words.py").write_text("WORD = 'submitted'\n")  # not committed, and frozen all the same
    return Driver(slurm, tmp_path)


def _edit(driver: Driver, word: str) -> None:
    (driver.folder / "my_lab" / "words.py").write_text(f"WORD = {word!r}\n")
    yaml = driver.folder / "conf_mine" / "experiment" / "frozen.yaml"
    yaml.write_text(EXPERIMENT.replace("4000", "7"))
    # hpc_trainer's own developers save half-done work too.
    (driver.folder / "hpc_trainer" / "worker" / "rank.py").write_text("raise RuntimeError('half edited')\n")


def _log(driver: Driver, attempt: int) -> str:
    return (driver.run_folder("frozen") / "logs" / f"attempt-{attempt:03d}.rank-0.log").read_text()


def test_edits_change_neither_a_waiting_nor_a_requeued_run(driver: Driver) -> None:
    busy = driver.slurm.preempt()
    driver.slurm.wait_for_state(busy, "RUNNING")
    driver.submit(*WORDS, "hardware.partition=preempt", "sweep_name=frozen")
    job_id = driver.only_run("frozen")["job_id"]
    assert driver.slurm.job_state(job_id) == "PENDING"
    (archive,) = (driver.runs / "frozen" / "code").iterdir()
    _edit(driver, "edited while it waited")
    driver.slurm.run("scancel", str(busy))

    preemptor = driver.preempt_at("frozen", 100, job_id)
    driver.wait_for_states("frozen", "REQUEUED")
    _edit(driver, "edited before it came back")
    for place in ("/tmp", os.environ.get("SLURM_TMPDIR", "/nowhere")):  # what was unpacked is made again
        shutil.rmtree(Path(place) / f"hpc_trainer-{os.getuid()}" / archive.stem, ignore_errors=True)
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    (run,) = driver.wait_for_states("frozen", "COMPLETED").values()
    assert (run["job_id"], run["attempt"], run["step"]) == (job_id, 2, 4000)
    for attempt in (0, 1):
        assert "train: the submitted code\n" in _log(driver, attempt)
        assert "edited" not in _log(driver, attempt)

    code = json.loads((driver.runs / "frozen" / "sweep.json").read_text())["code"]["snapshot"]
    assert archive.name == f"{code['digest'][:12]}.zip"
    assert [(root["source"], root["how"]) for root in code["roots"]] == [(str(driver.folder), "git")]


@pytest.mark.long
def test_a_later_submit_takes_the_later_code(driver: Driver) -> None:
    words = (*WORDS, "sweep_name=frozen", "train.num_steps=20")
    driver.submit(*words)
    driver.wait_for_states("frozen", "COMPLETED")
    (driver.folder / "my_lab" / "words.py").write_text("WORD = 'later'\n")
    driver.submit(*words, "seed=1")
    runs = driver.wait_for_states("frozen", "COMPLETED")
    folder = driver.runs / "frozen"
    logs = {run_id: (folder / run_id / "logs" / "attempt-000.rank-0.log").read_text() for run_id in runs}
    assert {("-s1-" in run_id, "the later code" in text) for run_id, text in logs.items()} == {
        (False, False),
        (True, True),
    }
    assert len(list((folder / "code").glob("*.zip"))) == 2
    lines = (folder / "submissions.jsonl").read_text().splitlines()
    intents = [record for record in map(json.loads, lines) if record["event"] == "intent"]
    assert len({record["code"] for record in intents}) == 2


@pytest.mark.long
def test_off_runs_what_stands_there_then(driver: Driver) -> None:
    busy = driver.slurm.preempt()
    driver.slurm.wait_for_state(busy, "RUNNING")
    driver.submit(*WORDS, "hardware.partition=preempt", "snapshot=off", "train.num_steps=20", "sweep_name=frozen")
    (driver.folder / "my_lab" / "words.py").write_text("WORD = 'edited'\n")
    driver.slurm.run("scancel", str(busy))
    driver.wait_for_states("frozen", "COMPLETED")
    assert "train: the edited code\n" in _log(driver, 0)
    assert not (driver.runs / "frozen" / "code").exists()
