"""A run that was interrupted ends with the same bits as one that was not: signals, kills, precisions, ranks."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.conftest import PACED

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

BASE = (
    "experiment=digits",
    "train.eval_every_steps=0",
    "monitor.log_every_steps=5",
    "monitor.heartbeat_every_s=0",
)
# (model, precision, ranks, steps): each precision, each kind of model, one and two ranks, dropout where it has any.
CASES = [
    ("mlp", "fp16", "cpu_x1", 300),
    ("cnn", "bf16", "cpu_x2", 60),
    ("mlp", "fp32", "cpu_x2", 200),
    ("gpt", "fp32", "cpu_x1", 40),
    # BatchNorm's buffers differ by rank, loader processes, and an evaluation after every step.
    ("resnet18", "fp32", "cpu_x2", 30),
    ("gpt", "fp32", "cpu_x2 parallel=fsdp", 40),
    ("mlp", "fp16", "cpu_x2 parallel.zero1=true", 200),
    ("gpt", "bf16", "cpu_x2 optim=lion parallel=fsdp", 40),
    ("gpt", "bf16_sr", "cpu_x2 parallel=fsdp", 40),
]
SAMPLE = (CASES[0], CASES[5])
"""In `make test`: one rank in fp16, two under FSDP. Two under DDP with BatchNorm and loader processes are a cell of
resume_matrix, and test_background_saves.py stops two by a signal.
"""


def _words(model: str, precision: str, hardware: str, steps: int) -> list[str]:
    words = [*BASE, f"model={model}", f"precision={precision}", *f"hardware={hardware}".split()]
    words += [f"train.num_steps={steps}"]
    if model == "gpt":
        text = Path(__file__).parents[2] / "text.txt"  # a short one: the evaluation at the end is soon done
        words += ["data=text_bytes", f"data.path={text}", "data.seq_len=32", "model.num_layers=2", "model.dropout=0.1"]
    if model == "resnet18":
        words += ["model.width=4", "data.num_workers=2", "train.eval_every_steps=1"]
    return [*words, "train.global_batch_size=32", "train.grad_accum_steps=2", "checkpoint.every_steps=100000"]


@pytest.mark.few(1)
@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "precision", "hardware", "steps"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.long) for case in CASES],
)
def test_stopped_by_a_signal(local: LocalDriver, model: str, precision: str, hardware: str, steps: int) -> None:
    words = _words(model, precision, hardware, steps)
    process = local.start("train", *words, "sweep_name=stopped")
    local.wait_for_step("stopped", 10)
    local.signal_rank("stopped", signal.SIGUSR2)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1, output + errors
    (end,) = local.events("stopped", "end")
    assert (end["state"], end["signal"]) == ("PREEMPTED", "SIGUSR2")
    assert 10 <= end["saved_step"] < steps

    resumed = local.train(*words, "sweep_name=stopped")
    assert (resumed["state"], resumed["step"]) == ("COMPLETED", steps)
    assert [record["step"] for record in local.events("stopped", "resume")] == [0, end["saved_step"]]
    local.train(*words, "sweep_name=undisturbed")
    assert local.final_state("stopped") == local.final_state("undisturbed")
    assert local.metrics("stopped", "loss") == local.metrics("undisturbed", "loss")
    assert local.metrics("stopped", "eval_loss") == local.metrics("undisturbed", "eval_loss")


def test_killed_loses_at_most_one_interval(local: LocalDriver) -> None:
    slow = local.slow_digits()
    words = [*_words("mlp", "fp32", "cpu_x1", 200), *PACED[1:], "checkpoint.every_steps=20"]
    process = local.start("train", *words, "sweep_name=killed")
    local.wait_for_step("killed", 45)
    committed = local.wait_for_checkpoint("killed")  # on a busy machine steps pass while one is written
    local.signal_rank("killed", signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "killed, or out of memory" in errors
    (end,) = local.events("killed", "end")
    assert (end["state"], end["cause"]) == ("FAILED", "killed")

    slow.unlink()
    assert local.train(*words, "sweep_name=killed")["state"] == "COMPLETED"
    resumed = local.events("killed", "resume")[1]["step"]
    # The save of a later step may still be written: then the one that was whole counts.
    assert resumed >= committed >= 20
    local.train(*words, "sweep_name=undisturbed")
    assert local.final_state("killed") == local.final_state("undisturbed")
    steps = list(local.metrics("killed", "loss"))
    assert steps == sorted(set(steps))


@pytest.mark.long
def test_damaged_checkpoint_is_passed_over(local: LocalDriver) -> None:
    words = [*_words("mlp", "fp32", "cpu_x1", 100), "checkpoint.every_steps=50"]
    local.train(*words, "sweep_name=damaged")
    folder = local.run_folder("damaged")
    newest = folder / "checkpoints" / "step-00000100" / "state.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    (folder / "DONE").unlink()
    assert local.train(*words, "sweep_name=damaged")["state"] == "COMPLETED"
    assert [record["step"] for record in local.events("damaged", "resume")] == [0, 50]
    assert [path.name for path in (folder / "checkpoints").glob("*.bad-*")]


@pytest.mark.long
def test_train_again_says_that_all_is_done(local: LocalDriver) -> None:
    words = [*_words("mlp", "fp32", "cpu_x1", 20), "sweep_name=again"]
    first = local.train(*words)
    said = local.run("train", *words).stdout
    assert "all steps are done" in said
    assert len(local.events("again", "start")) == 1
    anew = local.train(*words, "--fresh")
    assert anew["metrics"] == first["metrics"]
    assert len(list((local.folder / "runs" / "again").glob("*/attempt-000.jsonl"))) == 2
