"""A project with a project file, as a person types it: no options, to the end of the run and of what is asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

DATA = """
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.datasets import digits

def build(split):
    return digits.build(DigitsConfig(), split)
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /data: custom

experiment_name: mine
data:
  _target_: my_data.build
train:
  num_steps: 4
  eval_every_steps: 0
schedule:
  warmup_steps: 0
"""


def test_train_needs_no_options_and_a_frozen_run_does_not_read_the_file_again(local: LocalDriver) -> None:
    (local.folder / "my_data.py").write_text(DATA)
    experiment = local.folder / "conf" / "experiment" / "mine.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(EXPERIMENT)
    project = local.folder / "hpc_trainer.yaml"
    project.write_text("config_dir: [conf]\ntrust: [my_data]\n")
    words = ("train", "experiment=mine", "cluster=local")
    done = local.run(*words)
    assert f"Note: the project file {project} adds --config-dir {local.folder}/conf --trust my_data." in done.stderr
    assert "COMPLETED at step 4/4" in done.stdout
    assert "the project file" not in local.run(*words).stderr, "once is enough"
    project.unlink()
    assert local.json("status", "mine")["counts"] == {"COMPLETED": 1}
    assert "no such choice" in local.run(*words, check=False).stderr
