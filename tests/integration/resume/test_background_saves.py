"""Runs that save while they train: kept checkpoints, stops beside a running save, and the same bits after it all."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

WORDS = (
    "experiment=digits", "model=mlp", "train.num_steps=400", "monitor.log_every_steps=5", "monitor.heartbeat_every_s=0",
)  # fmt: skip


def _kept(local: LocalDriver, sweep: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in (local.run_folder(sweep) / "checkpoints").glob("step-*"))


@pytest.mark.long
def test_what_is_kept_and_the_best_survives_a_kill(local: LocalDriver) -> None:
    """The best is known after the save and its evaluation, and told by metrics.jsonl to the attempt after a kill."""
    words = [
        *WORDS, "checkpoint.every_steps=20", "train.eval_every_steps=30", "checkpoint.keep_last=1",
        "checkpoint.keep_every_steps=200", "checkpoint.keep_best=eval_accuracy",
    ]  # fmt: skip
    process = local.start("train", *words, "sweep_name=kept")
    local.wait_for_step("kept", 150)
    local.signal_rank("kept", signal.SIGKILL)
    process.communicate(timeout=100)
    assert local.train(*words, "sweep_name=kept")["state"] == "COMPLETED"
    scores = local.metrics("kept", "eval_accuracy")
    # The score of the last step comes after its save, so what was the best before it is still there.
    before = {step: score for step, score in scores.items() if step < 400}
    best = max(before, key=lambda step: (before[step], step))
    assert _kept(local, "kept") == sorted({200, 400, best})
    manifest = json.loads((local.run_folder("kept") / "checkpoints" / "step-00000400" / "manifest.json").read_text())
    assert "best_metric" in json.dumps(manifest["replicated"])
    local.train(*words, "sweep_name=undisturbed")
    assert local.metrics("kept", "eval_accuracy") == local.metrics("undisturbed", "eval_accuracy")
    assert local.final_state("kept") == local.final_state("undisturbed")
    assert _kept(local, "undisturbed") == _kept(local, "kept")


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("hardware", ["cpu_x1", "cpu_x2"])
def test_stopped_beside_a_running_save_goes_on_with_the_same_bits(local: LocalDriver, hardware: str) -> None:
    """A save is due at every step, so one is always being written, whenever the signal comes."""
    words = [
        *WORDS, f"hardware={hardware}", "train.num_steps=250", "checkpoint.every_steps=1", "train.eval_every_steps=0",
        "data.num_workers=2",
    ]  # fmt: skip
    process = local.start("train", *words, "sweep_name=beside")
    for step in (30, 80):
        local.wait_for_step("beside", step)
        local.signal_rank("beside", signal.SIGUSR2)
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 1, output + errors
        end = local.events("beside", "end")[-1]
        assert (end["state"], end["signal"]) == ("PREEMPTED", "SIGUSR2")
        assert max(_kept(local, "beside")) == end["saved_step"]
        process = local.start("train", *words, "sweep_name=beside")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, output + errors + local.logs()
    saved = [end["saved_step"] for end in local.events("beside", "end")[:-1]]
    assert [event["step"] for event in local.events("beside", "resume")] == [0, *saved]
    local.train(*words, "checkpoint.every_steps=100000", "sweep_name=undisturbed")
    assert local.final_state("beside") == local.final_state("undisturbed")
    assert local.metrics("beside", "loss") == local.metrics("undisturbed", "loss")
