"""`model=hf`: a folder of transformers in, its own logits out; steps, a resume, and a folder that it loads again."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.model import HfConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.data.generated import SyntheticImagesConfig
from hpc_trainer.data.text import TextBytesConfig
from hpc_trainer.deploy.trained import take_out, write_weights
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.hf_model import described
from hpc_trainer.models.hf import build
from hpc_trainer.training.build import build_model
from tests.unit.training.train_here import config_of, saved_bytes, train_here

with warnings.catch_warnings():  # of packages that it looks for
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

TEXT = Path(__file__).parents[2] / "text.txt"
WORDS = ("task=language_model", "data=text_bytes", f"data.path={TEXT}", "data.seq_len=16", "data.eval_fraction=0.02",
         "train.global_batch_size=8", "train.num_steps=2", "train.eval_every_steps=0", "monitor.log_every_steps=1",
         "checkpoint.every_steps=1", "checkpoint.keep_last=9")  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "bos_token_id": 0,
                        "eos_token_id": 0},
    "LlamaForCausalLM": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
}  # fmt: skip
DATA = SimpleNamespace(input_shape=(16,), num_classes=256)
TEXT_DATA, IMAGES = TextBytesConfig(), SyntheticImagesConfig()


def _saved(folder: Path, architecture: str) -> nn.Module:
    """As transformers makes and writes it."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(7)
    model: nn.Module = kind(kind.config_class(**SIZES[architecture], vocab_size=256)).eval()
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def _model_of(run: Path, step: int, config: TrainConfig) -> nn.Module:
    """The weights of a checkpoint, in the model that the configuration builds."""
    model = build_model(config, DATA)
    model.load_state_dict(take_out(run / "checkpoints", step, name="model").state)
    return model.eval()


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", SIZES)
def test_a_folder_gives_the_library_s_own_logits_and_trains(tmp_path: Path, architecture: str) -> None:
    theirs = _saved(tmp_path / "hf", architecture)
    still = ("optim=sgd", "optim.lr=1e-30", "optim.momentum=0", "optim.nesterov=false")
    words = (*WORDS, "model=hf", f"model.path={tmp_path / 'hf'}", f"init_from.path={tmp_path / 'hf'}")
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    config = config_of(*words, *still)
    assert isinstance(config.model, HfConfig)
    assert config.model.architecture == architecture
    loaded = train_here(config, tmp_path / "still")
    with torch.no_grad():
        ours, expected = _model_of(loaded.paths.folder, 2, config)(tokens), theirs(input_ids=tokens).logits
    assert (ours - expected).abs().max() < 1e-5
    assert expected.std() > 1e-3

    config = config_of(*words)
    whole = train_here(config, tmp_path / "whole")
    if architecture == "GPT2LMHeadModel":  # which draws for its dropout
        train_here(config, tmp_path / "cut", stop_at=1)
        assert saved_bytes(train_here(config, tmp_path / "cut", attempt=1)) == saved_bytes(whole)
    with torch.no_grad():
        trained = _model_of(whole.paths.folder, 2, config)(tokens)
    assert (trained - expected).abs().max() > 1e-3, "two steps change it"

    out = tmp_path / "out"
    out.mkdir()
    write_weights(out / "model.safetensors", take_out(whole.paths.checkpoints, 2, name="model").state)
    (out / "config.json").write_text(json.dumps(config.model.file_for((16,), 256)))
    again = getattr(transformers, architecture).from_pretrained(out, local_files_only=True).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, trained)


def test_what_the_folder_says_is_frozen_and_counts_in_the_identity(tmp_path: Path) -> None:
    """So a rank needs no folder, and another place is the same run."""
    found = {}
    for name in ("a", "b"):
        kind = transformers.LlamaConfig(**SIZES["LlamaForCausalLM"], vocab_size=256, architectures=["LlamaForCausalLM"])
        kind.save_pretrained(tmp_path / name)
        found[name] = described(HfConfig(path=str(tmp_path / name)), TEXT_DATA)
    assert _digest(found["a"]) == _digest(found["b"])
    (tmp_path / "a" / "config.json").unlink()
    assert described(found["a"], TEXT_DATA) == found["a"], "what is planned is whole"
    model = build(found["a"], input_shape=(16,), num_classes=256)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.get_input_embeddings().weight.shape == (256, 32)  # type: ignore[operator]
    given = HfConfig(path=str(tmp_path / "b"), config={"hidden_size": 16})
    other = described(given, TEXT_DATA)
    assert _digest(other) != _digest(found["b"])
    assert build(other, input_shape=(16,), num_classes=256).get_input_embeddings().weight.shape == (256, 16)  # type: ignore[operator]


def _digest(model: HfConfig) -> str:
    return config_digest(to_plain(TrainConfig(model=model)))


def test_a_classifier_of_images_takes_what_the_data_say(tmp_path: Path) -> None:
    config = config_of(
        "model=hf", "model.architecture=ViTForImageClassification",
        "+model.config={patch_size:4,hidden_size:16,num_hidden_layers:1,num_attention_heads:2,intermediate_size:16}",
        "data=digits", "train.num_steps=2", "train.eval_every_steps=0", "train.global_batch_size=8",
    )  # fmt: skip
    run = train_here(config, tmp_path / "run")
    assert run.step == 2
    assert isinstance(config.model, HfConfig)
    model = build_model(config, SimpleNamespace(input_shape=(1, 8, 8), num_classes=10))
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert config.model.file_for((1, 8, 8), 10)["id2label"]["9"] == "LABEL_9"


def _told(data: DataConfig = TEXT_DATA, **values: Any) -> str:
    """Of a configuration that is planned."""
    return "\n".join(find_problems(TrainConfig(model=HfConfig(**values), data=data)))


def test_what_cannot_be_is_refused_when_it_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2, vit = "GPT2LMHeadModel", "ViTForImageClassification"
    assert not _told(architecture=gpt2)
    assert "needs the name of a class: model.architecture=GPT2LMHeadModel" in _told()
    assert "Did you mean GPT2LMHeadModel" in _told(architecture="GPT2LMHeadModle")
    assert "must be a folder with a config.json" in _told(path="/nowhere")
    assert "reads images, and data=text_bytes is text" in _told(architecture=vit)
    assert "reads text, and data=synthetic_images has images" in _told(IMAGES, architecture=gpt2)
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]')
    assert "config.json is damaged" in _told(path=str(tmp_path))
    file.write_text('{"model_type": "gpt2", "auto_map": {"AutoModel": "theirs.Model"}}')
    assert "code of its own (auto_map), which is never run" in _told(path=str(tmp_path))
    file.write_text('{"model_type": "llama"}')
    said = _told(path=str(tmp_path), architecture=gpt2)
    assert "model.architecture=GPT2LMHeadModel is of the type gpt2" in said
    assert "says llama" in said
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'hpc_trainer[hub]'" in _told(architecture=gpt2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n_positions": 8}, "has positions for 8 tokens, and a window has 16. Use data.seq_len=8"),
        ({"vocab_size": 100}, "model.config.vocab_size=100 must be at least the 256 tokens of the data"),
        ({"n_embd": 30, "n_head": 4}, "transformers cannot build it from model.config: ValueError"),
    ],
)
def test_what_only_the_library_knows_is_refused_before_the_first_step(values: dict[str, Any], words: str) -> None:
    config = HfConfig(architecture="GPT2LMHeadModel", config={**SIZES["GPT2LMHeadModel"], **values})
    with pytest.raises(ConfigError) as caught:
        build(config, input_shape=(16,), num_classes=256)
    assert words in str(caught.value)
