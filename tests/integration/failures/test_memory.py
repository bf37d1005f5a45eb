"""A rank that runs out of memory in its backward pass: the state, the reason and the keys that help."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import LocalDriver

# Rank 1's gradient meets the end of the memory in step 3; autograd hands the error on as CUDA's own would come.
MODEL = """
import os

import torch
from torch import nn

from hpc_trainer.models.mlp import Mlp
from hpc_trainer.config.schema.model import MlpConfig


class Net(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.inner = Mlp(MlpConfig(), input_shape=input_shape, num_classes=num_classes)
        self.steps = 0

    def forward(self, inputs):
        logits = self.inner(inputs)
        if self.training:
            self.steps += 1
            if self.steps == 3 and os.environ["SUBMITIT_LOCAL_GLOBALID"] == "1":
                logits.register_hook(self.end)
        return logits

    def end(self, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.0 GiB.")
"""


@pytest.mark.long
@pytest.mark.dist
def test_memory_that_ends_on_one_rank_is_told_as_what_it_is(local: LocalDriver) -> None:
    (local.folder / "hungry.py").write_text(MODEL)
    words = (
        "experiment=digits", "cluster=local", "hardware=cpu_x2", "model=custom", "model._target_=hungry.Net",
        "sweep_name=hungry", "train.num_steps=20", "monitor.log_every_steps=1",
    )  # fmt: skip
    done = local.run("submit", *words, "--trust", "hungry", "--wait", check=False)
    assert done.returncode == 1
    (run,) = local.json("status", "hungry")["runs"]
    assert (run["state"], run["cause"]) == ("OUT_OF_MEMORY", "out_of_memory")
    assert "CUDA out of memory. Tried to allocate" in local.run("status", "hungry").stdout
    why = local.json("why", "hungry")
    assert why["verdict"] == "A rank ran out of memory in a step."
    assert why["evidence"][0].startswith("rank 1 on ")
    assert any(line.startswith("GB on the rank after step 2: weights") for line in why["evidence"]), why["evidence"]
    assert why["advice"][0].startswith("a smaller train.micro_batch_size, as =16 or =auto")
    (end,) = local.events("hungry", "end")
    assert end["error"]["memory"]["micro_batch_size"] == 32
    told = json.loads((local.run_folder("hungry") / "memory.json").read_text())
    assert told["step"] == 1
    again = local.json("submit", *words, "--trust", "hungry")
    assert again["submitted"] == 0, "it would run out again"
