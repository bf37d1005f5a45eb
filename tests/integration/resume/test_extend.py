"""A run that was extended ends with the bits of one that was never shorter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.journals import journal_records

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

WORDS = (
    "experiment=digits", "model=mlp", "model.hidden_dim=32", "train.eval_every_steps=5", "monitor.log_every_steps=1",
    "schedule.warmup_steps=4",
)  # fmt: skip


def _same_as_straight(local: LocalDriver, short: int, begins: int, longer: int, *words: str) -> None:
    """Trains `short` steps, extends them from step `begins`, and compares with a straight run."""
    local.train(*WORDS, *words, f"train.num_steps={short}", "sweep_name=mine")
    told = local.run("plan", *WORDS, *words, f"train.num_steps={longer}", "sweep_name=mine").stdout
    assert f"step {begins})" in told
    assert "--extend" in told
    extended = local.train("--extend", *WORDS, *words, f"train.num_steps={longer}", "sweep_name=mine")
    straight = local.train(*WORDS, *words, f"train.num_steps={longer}", "sweep_name=straight")
    assert extended["metrics"] == straight["metrics"]
    folder = local.folder / "runs/mine" / extended["run_id"]
    newest = f"checkpoints/step-{longer:08d}/state.safetensors"
    assert (folder / newest).read_bytes() == (local.run_folder("straight") / newest).read_bytes()
    assert [record["step"] for record in journal_records(folder, "resume")] == [begins]


@pytest.mark.long
def test_a_constant_rate_from_its_end(local: LocalDriver) -> None:
    _same_as_straight(local, 12, 12, 20, "schedule=constant", "train.ema_decay=0.9", "model.dropout=0.2")


@pytest.mark.long
def test_warm_up_stable_decay_from_before_its_decay(local: LocalDriver) -> None:
    kept = ("checkpoint.every_steps=5", "checkpoint.keep_every_steps=5", "checkpoint.asynchronous=false")
    _same_as_straight(local, 14, 10, 20, "schedule=wsd", "schedule.decay_steps=4", *kept)
