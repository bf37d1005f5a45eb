"""`prune`: as sparse as asked for, zeros that stay zero, the same bits after an interruption, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.local_sgd import Sync
from hpc_trainer.features.prune import PruneMethod, is_due, share_done
from hpc_trainer.features.prune.prune import PruneAbility
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.rng import seed_everything
from tests.unit.record.builders import make_config
from tests.unit.training.train_here import config_of, saved_bytes, train_here

WORDS = (
    "train.num_steps=8", "monitor.log_every_steps=1",
    "train.global_batch_size=16", "optim.lr=0.01",
)  # fmt: skip
WAYS = {
    "layer": ("model=mlp", "model.hidden_dim=20", "prune.method=unstructured", "prune.sparsity=0.9"),
    "global": (
        "model=cnn", "prune.method=unstructured", "prune.scope=global", "prune.sparsity=0.7", "train.ema_decay=0.9",
        "optim=sgd", "optim.momentum=0.9",
    ),
    "n_m": ("model=mlp", "model.hidden_dim=20", "prune.method=n_m"),
    "channels": ("model=cnn", "prune.method=channels", "train.ema_decay=0.5", "train.guard.on_spike=skip"),
}  # fmt: skip
_FIRST = {"features.0.weight", "features.1.weight", "features.1.bias"}
GRADUAL = ("prune.start_step=1", "prune.end_step=5", "prune.every_steps=2")


def _objects(run: RunContext, step: int) -> dict[str, Any]:
    store = CheckpointStore(run.paths.checkpoints, group=RankGroup(), keep_last=9, attempt=0, read_only=True)
    info = store.newest_valid(step)
    assert info is not None
    found: dict[str, Any] = store.load(info)[0]["objects"]
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WAYS)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, name: str) -> None:
    """Stopped between two choices, and right after one."""
    config = config_of(*WORDS, *WAYS[name], *GRADUAL)
    whole = train_here(config, tmp_path / "whole")
    stopped = train_here(config, tmp_path / "cut", stop_at=3)
    states = [_objects(stopped, 3)]
    train_here(config, tmp_path / "cut", attempt=1, stop_at=4)
    states.append(_objects(stopped, 5))
    resumed = train_here(config, tmp_path / "cut", attempt=2)
    assert saved_bytes(resumed) == saved_bytes(whole)
    states.append(_objects(whole, 8))
    for before, after in itertools.pairwise(states):
        for key, pruned in before["prune"]["pruned"].items():
            assert pruned.any()
            assert not (pruned & ~after["prune"]["pruned"][key]).any(), "zero stays zero"
    last = states[-1]
    for key, pruned in last["prune"]["pruned"].items():
        assert not last["model"][key][pruned].any()
        if "ema" in last:
            assert not last["ema"][f"module.{key}"][pruned].any()
            assert last["ema"][f"module.{key}"][~pruned].any()


@pytest.mark.parametrize("name", ["layer", "global"])
def test_at_the_end_step_it_is_as_sparse_as_asked_for(tmp_path: Path, name: str) -> None:
    config = config_of(*WORDS, *WAYS[name], *GRADUAL)
    run = train_here(config, tmp_path / "run")
    model = _objects(run, 8)["model"]
    weights = {key: each for key, each in model.items() if each.ndim > 1}
    zeros = {key: int((each == 0).sum()) for key, each in weights.items()}
    share, counts = config.prune.sparsity, {key: each.numel() for key, each in weights.items()}
    if name == "layer":
        assert zeros == {key: round(share * count) for key, count in counts.items()}
    else:
        assert sum(zeros.values()) == round(share * sum(counts.values()))
        assert len({round(zeros[key] / counts[key], 2) for key in zeros}) > 1
    logged = [line["sparsity"] for line in read_metrics(run.paths.metrics) if "sparsity" in line]
    assert logged == pytest.approx([0, 0, share * 0.875, share * 0.875, share, share, share, share], abs=1e-3)


def test_of_each_four_weights_two_are_zero(tmp_path: Path) -> None:
    run = train_here(config_of(*WORDS, *WAYS["n_m"], *GRADUAL), tmp_path / "run")
    weights = [each for each in _objects(run, 8)["model"].values() if each.ndim > 1]
    assert len(weights) == 3
    for weight in weights:
        assert (weight.reshape(-1, 4) == 0).sum(1).eq(2).all()


def test_channels_are_zero_and_a_smaller_model_says_the_same(tmp_path: Path) -> None:
    config = config_of(*WORDS, *WAYS["channels"], "prune.start_step=3", "prune.end_step=3")
    run = train_here(config, tmp_path / "run")
    dataset = build_dataset(config, "train", build_task(config))
    model = build_model(config, dataset).eval()
    model.load_state_dict(_objects(run, 8)["model"])
    smaller = PruneAbility(config).deployed(model)
    assert sum(map(torch.numel, smaller.parameters())) < 0.35 * sum(map(torch.numel, model.parameters()))
    inputs = dataset.__getitems__(range(32))[0]
    with torch.no_grad():
        assert torch.allclose(model(inputs), smaller(inputs), atol=1e-6)
    logged = [line["sparsity"] for line in read_metrics(run.paths.metrics) if "sparsity" in line]
    assert logged == [0, 0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_what_is_frozen_stays_whole(tmp_path: Path) -> None:
    words = ("model=cnn", "prune.end_step=2", "train.num_steps=2", "train.freeze=['features.4.*']")
    for method, expected in (("unstructured", {"features.0.weight", "classifier.2.weight"}), ("channels", _FIRST)):
        run = train_here(config_of(*WORDS, *words, f"prune.method={method}"), tmp_path / method)
        assert set(_objects(run, 2)["prune"]["pruned"]) == expected


def test_one_shot_before_the_first_step_prunes_the_weights_that_it_began_with(tmp_path: Path) -> None:
    config = config_of(*WORDS, *WAYS["layer"], "prune.end_step=0")
    seed_everything(config.seed)
    first = build_model(config, build_dataset(config, "train", build_task(config))).state_dict()
    run = train_here(config, tmp_path / "run")
    for key, pruned in _objects(run, 8)["prune"]["pruned"].items():
        kept = first[key].abs()[~pruned].min()
        assert kept >= first[key].abs()[pruned].max()


def test_masked_gradients_count_for_no_norm(tmp_path: Path) -> None:
    """As a model that multiplies by its mask: what it cannot change does not shrink the step of the others."""
    config = config_of(*WORDS, *WAYS["layer"], "prune.sparsity=0.999", "prune.end_step=1", "train.num_steps=2")
    norms = [line["grad_norm"] for line in read_metrics(train_here(config, tmp_path / "run").paths.metrics)
             if "grad_norm" in line]  # fmt: skip
    dense = config_of(*WORDS, "model=mlp", "model.hidden_dim=20", "train.num_steps=2")
    expected = [line["grad_norm"] for line in read_metrics(train_here(dense, tmp_path / "dense").paths.metrics)
                if "grad_norm" in line]  # fmt: skip
    assert norms[0] == expected[0]
    assert norms[1] < 0.7 * expected[1]


def test_patterns_choose_layers_and_those_of_one_input_stay_whole_of_two_in_four(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(*WORDS, "model=cnn", "prune.method=n_m", "prune.include=['features.*']", "prune.end_step=2")
    run = train_here(config, tmp_path / "run")
    said = capsys.readouterr().out
    assert "prune: features.0.weight stay whole, as prune.m=4 does not divide their inputs." in said
    assert "step 2: pruned 9,216 of 18,432 elements in 1 tensors, sparsity 0.5 (n_m)" in said
    assert list(_objects(run, 8)["prune"]["pruned"]) == ["features.4.weight"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("prune.method=unstructured", "prune.include=['head.*']"), r"no weight of Cnn has that name"),
        (("prune.method=unstructured", "prune.include=['features.1.*']"), "names no matrix or filter that is trained"),
        (("prune.method=n_m", "prune.include=['features.0.weight']"), r"whose inputs prune.m=4 divides"),
        (("prune.method=channels", "prune.include=['classifier.*']"), r"There are features.0, features.4"),
        (
            ("prune.method=channels", "model.num_channels=8", "prune.include=['features.0.*']"),
            "one unit of each group must stay",
        ),
    ],
)
def test_what_leaves_nothing_to_prune_ends_the_run_before_its_first_step(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train_here(config_of(*WORDS, "model=cnn", *words), tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"prune__method": PruneMethod.n_m, "prune__n": 4}, "prune.n=4 must be less than prune.m=4"),
        ({"prune__start_step": 9, "prune__end_step": 4}, "prune.end_step=4 must be at least prune.start_step=9"),
        ({"prune__end_step": 999}, "prune.end_step=999 must be at most train.num_steps=200"),
        ({"prune__start_step": 999}, "prune.start_step=999 must be at most train.num_steps=200"),
        ({"prune__exclude": ["*"]}, "leaves nothing to prune"),
        ({"prune__sparsity": 1.0}, "prune.sparsity=1"),
        ({"parallel__sync": Sync.post_local_sgd}, "would prune different ones"),
        ({"prune__method": PruneMethod.none, "prune__sparsity": 0.7}, "prune.sparsity"),
    ],
)
def test_values_that_do_not_go_together_are_refused_at_plan_time(words: dict[str, Any], said: str) -> None:
    problems = find_problems(make_config(**{"prune__method": PruneMethod.unstructured, **words}))
    assert any(said in each for each in problems), problems


def test_the_sparsity_grows_fast_and_then_slowly() -> None:
    config = config_of("prune.method=unstructured", "prune.start_step=10", "prune.end_step=50", "train.num_steps=80")
    assert [round(share_done(config, step), 4) for step in (0, 10, 20, 30, 50, 80)] == [0, 0, 0.5781, 0.875, 1, 1]
    assert [step for step in range(81) if is_due(config, step)] == [20, 30, 40, 50]
    half = config_of("prune.method=unstructured", "train.num_steps=65")
    assert [step for step in range(66) if is_due(half, step)] == [10, 20, 30, 32]
