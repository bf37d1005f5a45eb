"""A run goes on with another number of ranks, by the command line; and one ends early."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

WORDS = ("experiment=digits", "model=mlp", "model.dropout=0.1", "train.num_steps=400", "train.global_batch_size=32",
         "monitor.log_every_steps=5", "monitor.heartbeat_every_s=0", "checkpoint.every_steps=100000")  # fmt: skip


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("key", ["train.logical_ranks=2", "parallel.elastic=true"])
def test_stopped_on_one_rank_it_goes_on_with_two(local: LocalDriver, key: str) -> None:
    words = [*WORDS, key, "train.eval_every_steps=100"]
    process = local.start("train", *words, "hardware=cpu_x1", "sweep_name=moved")
    local.wait_for_step("moved", 10)
    local.signal_rank("moved", signal.SIGUSR2)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 1, output + errors
    resumed = local.train(*words, "hardware=cpu_x2", "sweep_name=moved")
    assert (resumed["state"], resumed["step"]) == ("COMPLETED", 400)
    assert [record["world_size"] for record in local.events("moved", "start")] == [1, 2]
    first, second = (record["step"] for record in local.events("moved", "resume"))
    assert first == 0
    assert 10 <= second < 400
    if key.startswith("train.logical_ranks"):
        local.train(*words, "hardware=cpu_x1", "sweep_name=undisturbed")
        assert local.final_state("moved") == local.final_state("undisturbed")
        assert local.metrics("moved", "loss") == local.metrics("undisturbed", "loss")
        assert local.metrics("moved", "eval_loss") == local.metrics("undisturbed", "eval_loss")


def test_a_run_that_gets_no_better_is_complete_and_says_why(local: LocalDriver) -> None:
    words = [*WORDS, "hardware=cpu_x1", "train.eval_every_steps=5", "optim.lr=1e-12", "train.early_stop.patience=2",
             "train.early_stop.metric=eval_accuracy", "train.early_stop.mode=max", "sweep_name=early"]  # fmt: skip
    done = local.train(*words)
    assert (done["state"], done["step"]) == ("COMPLETED", 15)
    (run,) = local.json("status", "early")["runs"]
    assert (run["state"], run["cause"], run["step"]) == ("COMPLETED", "early_stop", 15)
    (end,) = local.events("early", "end")
    assert end["cause"] == "early_stop"
