"""A run that begins with another run's weights, by the command line: real ranks, a stop, a source that goes away."""

from __future__ import annotations

import json
import shutil
import signal
import time

import pytest

from tests.integration.conftest import LocalDriver

DIGITS = ("experiment=digits", "schedule.warmup_steps=0", "train.eval_every_steps=0")
TUNED = (*DIGITS, "init_from=source/cnn", "init_from.exclude=[classifier.*]", "train.freeze=[features.0.*]",
         "+optim.lr_of={features.*:0.5}")  # fmt: skip


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_preempted_run_on_two_ranks_needs_its_source_no_more(local: LocalDriver, parallel: str) -> None:
    local.train(*DIGITS, "train.num_steps=20", "sweep_name=source")
    tuned = [*TUNED, "hardware=cpu_x2", f"parallel={parallel}", "train.num_steps=300", "checkpoint.every_steps=50"]
    whole = local.train(*tuned, "sweep_name=whole")
    started = local.start("train", *tuned, "sweep_name=cut")
    local.wait_for_step("cut", 50)
    local.signal_rank("cut", signal.SIGTERM)
    started.communicate(timeout=120)
    stopped = local.events("cut", "end")[-1]
    assert 0 < stopped["saved_step"] < 300, "it was to be stopped on the way"
    shutil.rmtree(local.folder / "runs" / "source" / local.run_folder("source").name / "checkpoints")
    run_id = whole["run_id"]
    local.run("retry", run_id, "--sweep", "cut")
    deadline = time.monotonic() + 120
    while not (local.run_folder("cut") / "DONE").exists():
        assert time.monotonic() < deadline, local.logs()
        time.sleep(0.1)
    assert local.final_state("cut") == local.final_state("whole")
    shown = local.json("show", run_id, "--sweep", "cut")
    assert shown["first_weights"]["begin_anew"] == ["classifier.2.weight", "classifier.2.bias"]
    assert "features.0.weight" in shown["first_weights"]["loaded"]
    assert any("began anew" in line for line in local.json("why", run_id, "--sweep", "cut")["evidence"])


@pytest.mark.long
def test_what_does_not_fit_fails_once_with_its_reason(local: LocalDriver) -> None:
    """Other shapes are known on the compute node alone: the run says so, and is not started again."""
    local.train(*DIGITS, "train.num_steps=3", "sweep_name=source")
    wide = (*DIGITS, "init_from=cnn-digits", "model.num_channels=24", "train.num_steps=3", "sweep_name=wide")
    failed = local.run("train", *wide, check=False)
    assert failed.returncode == 1
    assert "has other shapes than the model: features.0.weight [32, 1, 3, 3]" in failed.stderr
    assert len(local.events("wide", "start")) == 1
    (end,) = local.events("wide", "end")
    assert end["state"] == "FAILED"
    assert end["cause"] == "invalid_config"
    folder = local.run_folder("wide")
    assert not (folder / "first_weights.json").exists()
    for word, said in (
        ("init_from=nothing", "no run in"),
        (f"init_from={folder}", "has no checkpoint (yet)"),
        ("init_from.include=[features.*]", "has no effect"),
    ):
        refused = local.run("plan", *DIGITS, word, check=False)
        assert refused.returncode == 2
        assert said in refused.stderr


@pytest.mark.long
def test_the_same_weights_elsewhere_are_the_same_run(local: LocalDriver) -> None:
    local.train(*DIGITS, "train.num_steps=3", "sweep_name=source")
    newest = local.run_folder("source") / "checkpoints" / "step-00000003"
    shutil.copytree(newest, local.folder / "elsewhere" / newest.name)
    words = [*DIGITS, "train.num_steps=5", "sweep_name=tuned"]
    first = local.json("plan", *words, "init_from=cnn-digits")["runs"][0]
    second = local.json("plan", *words, f"init_from={local.folder}/elsewhere/{newest.name}")["runs"][0]
    assert first["run_id"] == second["run_id"]
    done = local.train(*words, "init_from=cnn-digits")
    loaded = json.loads((local.run_folder("tuned") / "first_weights.json").read_text())
    assert loaded["path"] == str(newest)
    assert len(loaded["digest"]) == 64
    assert done["run_id"] == first["run_id"]
