"""Weights that exist, in a run of one rank: what is loaded, what is refused, and that a resume needs no source."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, StorageError
from hpc_trainer.features.init_from import InitFromConfig
from hpc_trainer.features.init_from.init_from import load
from hpc_trainer.features.init_from.source import resolved
from hpc_trainer.record.journal import read_first_weights
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.training.train_here import config_of, saved_bytes, train_here

WORDS = ("train.num_steps=4", "checkpoint.every_steps=2", "train.ema_decay=0.5")
STILL = ("optim=sgd", "optim.lr=1e-30", "optim.weight_decay=0", "optim.momentum=0", "optim.nesterov=false")
"""A step that moves no weight: the checkpoint shows what the run began with."""


def _is_still(now: torch.Tensor, was: torch.Tensor) -> bool:
    return torch.allclose(now, was, rtol=0, atol=1e-25)


def _config(path: Path, *words: str) -> TrainConfig:
    return config_of(*WORDS, f"init_from.path={path}", *words)


def _model(*words: str, seed: int = 5) -> nn.Module:
    config = config_of(*words)
    torch.manual_seed(seed)
    return build_model(config, build_dataset(config, "train", build_task(config)))


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file({name: each.detach().clone() for name, each in tensors.items()}, path)
    return path


def _saved_model(folder: Path, name: str = "model") -> dict[str, torch.Tensor]:
    store = CheckpointStore(folder / "checkpoints", group=RankGroup(), keep_last=1, attempt=0, read_only=True)
    info = store.newest_valid()
    assert info is not None
    found: dict[str, torch.Tensor] = store.load(info)[0]["objects"][name]
    return found


def test_every_weight_is_the_files(tmp_path: Path) -> None:
    source = _model().state_dict()
    path = _save(tmp_path / "w.safetensors", source)
    train_here(_config(path, *STILL), tmp_path / "run")
    for name in ("model", "ema"):
        saved = _saved_model(tmp_path / "run", name)
        prefix = "" if name == "model" else "module."
        assert all(_is_still(saved[f"{prefix}{key}"], value) for key, value in source.items()), name


def test_other_names_another_number_format_and_a_new_head(tmp_path: Path) -> None:
    """The rest of the run is that of a run which began by itself: its random numbers are the same."""
    source = {f"net.{name}": each.to(torch.bfloat16) for name, each in _model().state_dict().items()}
    source["net.classifier.2.weight"] = torch.zeros(3, 5)
    source["old.bias"] = torch.zeros(3)
    path = _save(tmp_path / "w.safetensors", source)
    words = ("+init_from.rename={net.*:'*'}", "init_from.exclude=[classifier.*]", *STILL)
    train_here(_config(path, *words), tmp_path / "run")
    train_here(config_of(*WORDS, *STILL), tmp_path / "fresh")
    saved, fresh = _saved_model(tmp_path / "run"), _saved_model(tmp_path / "fresh")
    for name, value in saved.items():
        wanted = fresh[name] if name.startswith("classifier") else source[f"net.{name}"].float()
        assert _is_still(value, wanted), name
    found = read_first_weights(RunPaths(tmp_path / "run"))
    assert found is not None
    assert found.loaded["features.0.weight"] == "net.features.0.weight"
    assert list(found.converted) == list(found.loaded)
    assert list(found.begin_anew) == ["classifier.2.weight", "classifier.2.bias"]
    assert sorted(found.unused) == ["net.classifier.2.bias", "net.classifier.2.weight", "old.bias"]
    for said in ("6 weights and buffers are from", "in another number format", "classifier.2.bias began anew", "old.b"):
        assert said in found.line()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_of_tied_weights_one_name_is_enough(tmp_path: Path, name: str) -> None:
    path = _save(tmp_path / "w.safetensors", {name: torch.arange(15.0).reshape(5, 3)})
    config = resolved(InitFromConfig(path=str(path)), None)
    run: Any = SimpleNamespace(group=RankGroup(), beat=lambda: None)
    model = _Tied()
    assert load(model, config, run.group, run.beat).loaded == {name: name}
    assert model.head.weight is model.embed.weight
    assert model.head.weight[4, 2] == 14


def _without(source: dict[str, torch.Tensor]) -> None:
    source["body.weight"] = source.pop("features.0.weight")


def _other_shape(source: dict[str, torch.Tensor]) -> None:
    source["classifier.2.weight"] = torch.zeros(3, 5)
    source["classifier.2.bias"] = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        (_without, (), ["has no features.0.weight, and the model has; the model has no body.weight",
                        "init_from.rename", "init_from.exclude=['features.0.*']"]),
        (_other_shape, (), ["classifier.2.weight [3, 5] float32 and not [10, ", "classifier.2.bias [3] int64 and not",
                            "init_from.exclude=['classifier.2.*']"]),
        (lambda source: None, ("init_from.exclude=[head.*]",), ["'head.*', and no weight of the model has that name",
                                                                 "features.*, classifier.*"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_the_first_step(
    tmp_path: Path, change: Any, words: tuple[str, ...], said: list[str]
) -> None:
    """A ConfigError: the run fails with it, and is not started again."""
    source = _model().state_dict()
    change(source)
    path = _save(tmp_path / "w.safetensors", source)
    with pytest.raises(ConfigError) as caught:
        train_here(_config(path, *words), tmp_path / "run")
    assert all(each in str(caught.value) for each in said), str(caught.value)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_content_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path / "w.safetensors", _model().state_dict())
    config = _config(path)
    _save(path, _model(seed=6).state_dict())
    with pytest.raises(ConfigError, match="has changed since this run was planned"):
        train_here(config, tmp_path / "run")
    path.unlink()
    with pytest.raises(ConfigError, match=r"w\.safetensors is not there"):
        train_here(config, tmp_path / "run")


def test_another_runs_checkpoint(tmp_path: Path) -> None:
    train_here(config_of(*WORDS), tmp_path / "source")
    source = _saved_model(tmp_path / "source")
    config = _config(tmp_path / "source", *STILL)
    train_here(config, tmp_path / "run")
    saved = _saved_model(tmp_path / "run")
    assert all(_is_still(saved[name], value) for name, value in source.items())
    damaged = tmp_path / "source" / "checkpoints" / "step-00000004" / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(Exception, match="is damaged"):
        train_here(config, tmp_path / "again")
    assert damaged.exists(), "of another run nothing is renamed"


def test_a_resumed_run_needs_its_source_no_more(tmp_path: Path) -> None:
    path = _save(tmp_path / "w.safetensors", _model().state_dict())
    config = _config(path)
    whole = train_here(config, tmp_path / "whole")
    train_here(config, tmp_path / "cut", stop_at=2)
    path.unlink()
    resumed = train_here(config, tmp_path / "cut", attempt=1)
    assert saved_bytes(resumed) == saved_bytes(whole)


def test_a_run_whose_checkpoints_are_all_damaged_begins_with_its_source_again(tmp_path: Path) -> None:
    """Never with the model's own first weights: the start that finds it out ends, and the next one loads."""
    path = _save(tmp_path / "w.safetensors", _model().state_dict())
    config = _config(path)
    whole = train_here(config, tmp_path / "whole")
    train_here(config, tmp_path / "cut", stop_at=2)
    for each in (tmp_path / "cut" / "checkpoints").glob("*/manifest.json"):
        each.write_text("{}")
    with pytest.raises(StorageError, match="has not loaded init_from"):
        train_here(config, tmp_path / "cut", attempt=1, cause="storage")
    assert saved_bytes(train_here(config, tmp_path / "cut", attempt=2)) == saved_bytes(whole)


def test_without_init_from_nothing_of_it_is_written(tmp_path: Path) -> None:
    run = train_here(config_of(*WORDS), tmp_path / "run")
    assert read_first_weights(run.paths) is None
    assert dataclasses.asdict(config_of(*WORDS).init_from)["digest"] is None
