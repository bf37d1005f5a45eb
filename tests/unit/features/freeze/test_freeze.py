"""`train.freeze`: what is named stays to the bit, has no state, and a frozen norm keeps and uses its statistics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from tests.unit.record.builders import make_config
from tests.unit.training.train_here import config_of, saved_bytes, train_here

WORDS = ("train.num_steps=4", "checkpoint.every_steps=1", "checkpoint.keep_last=9", "optim.weight_decay=0.5")
RESNET = ("model=resnet18", "model.width=8", "data=synthetic_images", "data.num_samples=96", "data.num_eval=8",
          "data.image_size=8", "train.global_batch_size=16", "train.eval_every_steps=2")  # fmt: skip


def _objects(run: RunContext, step: int) -> dict[str, dict[str, torch.Tensor]]:
    store = CheckpointStore(run.paths.checkpoints, group=RankGroup(), keep_last=9, attempt=0, read_only=True)
    info = store.newest_valid(step)
    assert info is not None
    found: dict[str, dict[str, torch.Tensor]] = store.load(info)[0]["objects"]
    return found


def test_what_is_frozen_stays_and_has_no_moments(tmp_path: Path) -> None:
    run = train_here(config_of(*WORDS, "train.freeze=['features.*']"), tmp_path / "run")
    first, last = _objects(run, 3), _objects(run, 4)
    changed = {name for name, value in last["model"].items() if not torch.equal(value, first["model"][name])}
    assert changed == {"classifier.2.weight", "classifier.2.bias"}
    assert set(last["optimizer"]["state"]) == {"model.classifier.2.weight", "model.classifier.2.bias"}


@pytest.mark.few(1)
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_norm_uses_its_statistics(tmp_path: Path, is_frozen: bool) -> None:
    """Also after an evaluation; patterns that name the weights alone leave the statistics to the batches."""
    pattern = "stem*" if is_frozen else "stem*.weight"
    run = train_here(config_of(*WORDS, *RESNET, f"train.freeze=['{pattern}']"), tmp_path / "run")
    first, last = _objects(run, 3)["model"], _objects(run, 4)["model"]
    means = [name for name in first if name.endswith("running_mean")]
    still = {name for name in means if torch.equal(first[name], last[name])}
    stems = {name for name in means if name.startswith("stem")}
    assert stems
    assert still == (stems if is_frozen else set())
    assert len(means) > len(stems)
    if is_frozen:
        assert all(not last[name].any() for name in stems), "as the model made them"


@pytest.mark.long
def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    config = config_of(*WORDS, *RESNET, "train.freeze=['stem*']", "train.ema_decay=0.9")
    whole = train_here(config, tmp_path / "whole")
    train_here(config, tmp_path / "cut", stop_at=3)
    assert saved_bytes(train_here(config, tmp_path / "cut", attempt=1)) == saved_bytes(whole)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ("'head.*'", r"'head\.\*', and no weight of Cnn has that name\. There are features\.\*, classifier\.\*"),
        ("features", r"Use 'features\.\*' for all of it"),
        ("'feat*','class*'", "leaves no weight of Cnn to train"),
    ],
)
def test_patterns_that_do_not_fit_end_the_run_before_its_first_step(tmp_path: Path, patterns: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_here(config_of(*WORDS, f"train.freeze=[{patterns}]"), tmp_path / "run")


def test_all_weights_are_refused_at_plan_time() -> None:
    (problem,) = find_problems(make_config(train__freeze=["*"]))
    assert "leaves nothing to train" in problem


def test_muon_gives_frozen_matrices_to_nobody(tmp_path: Path) -> None:
    gpt = ("experiment=gpt_bytes", "model.num_layers=2", "model.embed_dim=16", "model.num_heads=2", "data.seq_len=16",
           "train.global_batch_size=8", "optim=muon")  # fmt: skip
    run = train_here(config_of(*WORDS, *gpt, "train.freeze=['blocks.0.*']"), tmp_path / "run")
    state = _objects(run, 4)["optimizer"]["state"]
    assert any(name.startswith("model.blocks.1.") for name in state)
    assert not any(name.startswith("model.blocks.0.") for name in state)
