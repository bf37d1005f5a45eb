"""The text of load.py, where a model's configuration has choices in it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.model import MlpConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.deploy.card import weights_lines
from hpc_trainer.deploy.trained import DataShape


class Norm(str, enum.Enum):
    layer = "layer"
    rms = "rms"


@dataclass(kw_only=True, slots=True)
class ChoosingConfig(MlpConfig):
    norm: Norm = Norm.rms


def test_a_choice_is_imported_and_named() -> None:
    config = TrainConfig(model=ChoosingConfig(_target_="lab.Net"))
    text = weights_lines("a run", config, "torch", None, DataShape((2,), 3))
    compile(text, "load.py", "exec")
    assert f"from {__name__} import ChoosingConfig, Norm" in text.splitlines()
    assert "model = Net(ChoosingConfig(hidden_dim=256, num_layers=2, dropout=0.1, norm=Norm.rms), " in text


def test_quantized_weights_take_the_place_of_the_models_own() -> None:
    text = weights_lines("a run", TrainConfig(model=MlpConfig()), "torch", "int8", DataShape((1, 8, 8), 10))
    assert "import torchao.quantization  # noqa: F401 -- tensors of the file are torchao's" in text.splitlines()
    assert 'torch.load(here / "model.pt", weights_only=True), assign=True)' in text


def test_nobody_but_the_loop_knows_how_its_model_is_built() -> None:
    config = TrainConfig()
    config.train.main = "lab.main"
    text = weights_lines("a run", config, "safetensors", None, None)
    assert 'weights = load_file(here / "model.safetensors")\n# Build the model as lab.main does' in text
