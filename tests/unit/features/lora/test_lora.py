"""`train.lora`: adapters alone are trained, saved and resumed; the base comes back; merged they compute the same."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.model import CnnConfig
from hpc_trainer.config.schema.train import LoopConfig, TrainConfig
from hpc_trainer.errors import ConfigError, IncompatibleResumeError
from hpc_trainer.features.init_from.init_from import BaseAbility
from hpc_trainer.features.lora import LoraConfig
from hpc_trainer.features.lora.lora import LoraAbility, leave_out_base, merge, put_in
from hpc_trainer.models.cnn import Cnn
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.ability import abilities
from hpc_trainer.training.build import build_model
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.rng import seed_everything
from tests.unit.training.train_here import config_of, saved_bytes, train_here

with warnings.catch_warnings():  # of packages that it looks for
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")

TEXT = Path(__file__).parents[3] / "text.txt"
DATA = ("data=text_bytes", f"data.path={TEXT}", "data.seq_len=16", "data.eval_fraction=0.02")
WORDS = (*DATA, "train.global_batch_size=8", "train.num_steps=3", "train.eval_every_steps=0", "optim.lr=0.01",
         "checkpoint.every_steps=1", "checkpoint.keep_last=9", "train.lora.rank=2")  # fmt: skip
GPT = ("model=gpt", "model.num_layers=2", "model.embed_dim=16", "model.num_heads=2")
SHAPE = SimpleNamespace(input_shape=(16,), num_classes=256)
TOKENS = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))


def _objects(run: RunContext) -> dict[str, Any]:
    store = CheckpointStore(run.paths.checkpoints, group=RankGroup(), keep_last=9, attempt=0, read_only=True)
    info = store.newest_valid()
    assert info is not None
    found: dict[str, Any] = store.load(info)[0]["objects"]
    return found


def _deployed(config: TrainConfig, weights: dict[str, torch.Tensor]) -> tuple[nn.Module, nn.Module]:
    """(the model with its adapters, the same merged), by the hooks that an export calls."""
    models = []
    for is_merged in (False, True):
        active = abilities(config)
        seed_everything(config.seed)
        model, given = build_model(config, SHAPE), dict(weights)
        for each in active:
            given = each.fit_weights(model, given) if isinstance(each, (BaseAbility, LoraAbility)) else given
        model.load_state_dict(given)
        if is_merged:
            model = next(each for each in active if isinstance(each, LoraAbility)).deployed(model)
        models.append(model.eval())
    return models[0], models[1]


def test_adapters_alone_are_trained_and_saved_and_a_resume_has_the_same_bits(tmp_path: Path) -> None:
    config = config_of(*WORDS, *GPT, "train.lora.dropout=0.1", "train.ema_decay=0.5", "optim.layer_decay=0.5")
    whole = train_here(config, tmp_path / "whole")
    found = _objects(whole)
    layers = ("attention.query_key_value", "attention.out", "mlp_in", "mlp_out")
    expected = {
        f"blocks.{block}.{layer}.lora_{which}.default.weight" for block in (0, 1) for layer in layers for which in "AB"
    }
    assert set(found["model"]) == expected
    assert set(found["optimizer"]["state"]) == {f"model.{name}" for name in expected}
    assert set(found["ema"]) == {f"module.{name}" for name in expected} | {"n_averaged"}
    train_here(config, tmp_path / "cut", stop_at=2)
    assert saved_bytes(train_here(config, tmp_path / "cut", attempt=1)) == saved_bytes(whole)


def test_merged_it_is_the_plain_model_and_computes_the_same(tmp_path: Path) -> None:
    config = config_of(*WORDS, *GPT, "train.lora.also=['norm.*']")
    weights = _objects(train_here(config, tmp_path / "run"))["model"]
    assert {"norm.weight", "norm.bias"} <= set(weights)
    adapted, merged = _deployed(config, weights)
    seed_everything(config.seed)
    base = build_model(config, SHAPE).eval()
    assert list(merged.state_dict()) == list(base.state_dict())
    with torch.no_grad():
        assert (merged(TOKENS) - adapted(TOKENS)).abs().max() < 1e-5
        assert (merged(TOKENS) - base(TOKENS)).abs().max() > 1e-3
    moved = {name for name, each in merged.state_dict().items() if not torch.equal(each, base.state_dict()[name])}
    assert moved == {"norm.weight", "norm.bias"} | {
        f"blocks.{block}.{layer}.weight"
        for block in (0, 1)
        for layer in ("attention.query_key_value", "attention.out", "mlp_in", "mlp_out")
    }


def test_another_base_is_refused(tmp_path: Path) -> None:
    train_here(config_of(*WORDS, *GPT), tmp_path / "run", stop_at=2)
    other = config_of(*WORDS, *GPT, "seed=1", "checkpoint.allow_changes=[seed]")
    with pytest.raises(IncompatibleResumeError, match=r"lora_base: [0-9a-f]{64} -> "):
        train_here(other, tmp_path / "run", attempt=1)


@pytest.mark.long
def test_a_model_of_transformers_with_its_weights_from_a_folder(tmp_path: Path) -> None:
    """GPT-2's linear layers have their weights the other way round. Each start takes the base from the source."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 256, "bos_token_id": 0}
    torch.manual_seed(3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=0)).eval()
    folder = tmp_path / "hf"
    theirs.save_pretrained(folder)
    config = config_of(*WORDS, "model=hf", f"model.path={folder}", f"init_from.path={folder}")
    whole = train_here(config, tmp_path / "whole")
    weights = _objects(whole)["model"]
    assert len(weights) == 2 * 4 * 2
    adapted, merged = _deployed(config, weights)
    with torch.no_grad():
        assert (merged(TOKENS) - adapted(TOKENS)).abs().max() < 1e-5
        assert (merged(TOKENS) - theirs(TOKENS).logits).abs().max() > 1e-3
    assert torch.equal(merged.state_dict()["transformer.wte.weight"], theirs.transformer.wte.weight)

    train_here(config, tmp_path / "cut", stop_at=2)
    assert saved_bytes(train_here(config, tmp_path / "cut", attempt=1)) == saved_bytes(whole)
    train_here(config, tmp_path / "gone", stop_at=2)
    file = folder / "model.safetensors"
    kept = safetensors.torch.load_file(file)
    safetensors.torch.save_file({**kept, "transformer.ln_f.bias": kept["transformer.ln_f.bias"] + 1}, file)
    with pytest.raises(ConfigError, match="has changed since this run was planned"):
        train_here(config, tmp_path / "gone", attempt=1)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="is not there: it was moved or deleted"):
        train_here(config, tmp_path / "gone", attempt=2)


def _cnn() -> nn.Module:
    torch.manual_seed(0)
    return Cnn(CnnConfig(num_channels=8), input_shape=(1, 8, 8), num_classes=10)


def test_layers_are_named_by_patterns_and_begin_as_they_were() -> None:
    model, images = _cnn().eval(), torch.randn(2, 1, 8, 8)
    expected, base = model(images), model.state_dict()
    assert put_in(model, LoraConfig(rank=2, targets=["features.0", "classifier.*"])) == ["features.0", "classifier.2"]
    assert torch.equal(model(images), expected), "the second matrix begins at 0"
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {
        f"{layer}.lora_{which}.default.weight" for layer in ("features.0", "classifier.2") for which in "AB"
    }
    leave_out_base(model)
    assert set(model.state_dict()) == trained
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="lora_A"):
        model.load_state_dict({})
    merge(model)
    assert all(torch.equal(each, dict(model.named_parameters())[name]) for name, each in base.items())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LoraConfig(rank=2), "adapts the linear layers of blocks, and Cnn has none. Name layers"),
        (LoraConfig(rank=2, targets=["head"]), "train.lora.targets has 'head', and no layer of Cnn has that name"),
        (LoraConfig(rank=2, targets=["features.1"]), "peft cannot adapt these layers"),
        (LoraConfig(rank=2, targets=["features.0"], also=["h.*"]), "train.lora.also has 'h.*', and no weight of Cnn"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_layers_that_cannot_be_are_refused(config: LoraConfig, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        put_in(_cnn(), config)
    assert words in str(caught.value)


def test_what_it_needs_is_said_when_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(train=LoopConfig(lora=LoraConfig(rank=2), freeze=["norm.*"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = "\n".join(find_problems(config))
    assert "pip install 'hpc_trainer[hub]'" in said
    assert "train.freeze=['norm.*']: all weights but the adapters stay as they are" in said
