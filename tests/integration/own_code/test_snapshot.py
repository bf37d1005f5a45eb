"""The local executor runs the code as it stood at submit, also for runs that wait in its queue."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

DATA = """
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.datasets import digits

def build(split):
    print("the WORD code")
    return digits.build(DigitsConfig(), split)
"""
WORDS = (
    "experiment=digits", "cluster=local", "model=mlp", "data=custom", "data._target_=my_data.build", "--trust",
    "my_data", "train.eval_every_steps=0", "monitor.heartbeat_every_s=0",
)  # fmt: skip


def _logs(local: LocalDriver, sweep: str) -> dict[str, str]:
    """Run id -> what all its attempts printed."""
    logs: dict[str, str] = {}
    for path in sorted((local.folder / "runs" / sweep).glob("*/logs/*.log")):
        run_id = path.parents[1].name
        logs[run_id] = logs.get(run_id, "") + path.read_text()
    return logs


@pytest.mark.long
def test_a_run_that_waits_takes_the_code_of_its_submit(local: LocalDriver) -> None:
    module = local.folder / "my_data.py"
    module.write_text(DATA.replace("WORD", "submitted"))
    words = (*WORDS, "seed=0,1", "train.num_steps=2000", "sweep_name=waits")
    local.json("submit", *words)
    local.wait_for_step("waits", 5)  # the first one is at work, the second one waits for its slot
    module.write_text("raise RuntimeError('edited')\n")
    deadline = time.monotonic() + 120
    while local.json("status", "waits")["counts"] != {"COMPLETED": 2}:
        assert time.monotonic() < deadline, local.logs()
        time.sleep(0.2)
    logs = _logs(local, "waits")
    assert len(logs) == 2
    assert all("the submitted code" in text for text in logs.values()), logs
    code = json.loads((local.folder / "runs/waits/sweep.json").read_text())["code"]["snapshot"]
    assert (str(local.folder), "copy") in [(root["source"], root["how"]) for root in code["roots"]]


@pytest.mark.long
def test_a_new_submit_takes_the_new_code_and_goes_on(local: LocalDriver) -> None:
    module = local.folder / "my_data.py"
    module.write_text("def build(split):\n    raise RuntimeError('a mistake')\n")
    words = ("submit", *WORDS, "train.num_steps=10", "schedule.warmup_steps=0", "sweep_name=again", "--wait")
    assert local.run(*words, check=False).returncode == 1
    module.write_text(DATA.replace("WORD", "mended"))
    assert local.json(*words, "--retry-failed")["status"]["counts"] == {"COMPLETED": 1}
    (text,) = _logs(local, "again").values()
    assert "RuntimeError: a mistake" in text
    assert "the mended code" in text


def test_off_is_a_choice(local: LocalDriver) -> None:
    (local.folder / "my_data.py").write_text(DATA)
    local.json("train", *WORDS, "train.num_steps=4", "schedule.warmup_steps=0", "snapshot=off", "sweep_name=off")
    assert not (local.folder / "runs/off/code").exists()


def test_the_plan_shows_what_submit_does_and_writes_nothing(local: LocalDriver) -> None:
    (local.folder / "my_data.py").write_text(DATA)
    words = ("plan", *WORDS, "cluster=slurm")
    (array,) = local.json(*words)["arrays"]
    assert ".zip --sweep-dir" in array["script"]
    assert not (local.folder / "runs").exists()
    refused = local.run(*words, "snapshot.max_mb=0.001", check=False)
    assert refused.returncode == 2
    assert "more than snapshot.max_mb=0.001" in refused.stderr
