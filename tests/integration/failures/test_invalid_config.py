"""What only the run itself can see to be wrong: it says the rule and what can be, and nobody starts it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

FLAT = """
from torch import nn

def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.mark.long
def test_a_model_without_the_layers_that_a_key_is_about(local: LocalDriver) -> None:
    (local.folder / "flat.py").write_text(FLAT)
    words = ("experiment=digits", "cluster=local", "sweep_name=flat", "train.num_steps=20", "--trust", "flat")
    done = local.run("train", *words, "model=custom", "model._target_=flat.build", "train.recompute=full", check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "train.recompute=full computes blocks again, and Sequential has none" in done.stderr
    (end,) = local.events("flat", "end")
    assert (end["state"], end["cause"], end["error"]["exit_code"]) == ("FAILED", "invalid_config", 78)
    said = local.run("why", "flat", check=False).stdout
    assert "Its configuration is invalid" in said
    assert "Use train.recompute=none" in said
    assert "Traceback" not in said + done.stderr
    assert "recompute.py" not in said, "where in our code tells nobody anything"
