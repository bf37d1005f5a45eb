"""Files of every format give the answers of the model in memory, and what cannot be in one is named with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.model import GptConfig, MlpConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.deploy.export_torch import SAME, TOLERANCES, compare
from hpc_trainer.deploy.exported import FORMATS
from hpc_trainer.deploy.graphs import (
    IN_THE_FILE,
    open_file,
    quantize_file,
    quantize_model,
    trace,
    write_onnx,
    write_program,
)
from hpc_trainer.deploy.trained import quantization_of, write_weights
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.qat import QatConfig, QatTo
from hpc_trainer.features.qat.qat import begin_rounding
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.mlp import Mlp


def _mlp() -> nn.Module:
    torch.manual_seed(3)
    model = Mlp(MlpConfig(hidden_dim=64, num_layers=2), input_shape=(1, 8, 8), num_classes=10)
    return model.eval().requires_grad_(False)


def _written(folder: Path, model: nn.Module, inputs: torch.Tensor, to: str) -> Path:
    path = folder / FORMATS[to].file
    if to == "onnx":
        write_onnx(trace(model, inputs, to), path)
    elif to == "torch_export":
        write_program(trace(model, inputs, to), path)
    else:
        write_weights(path, model.state_dict())
    return path


@pytest.fixture(scope="module")
def plain_onnx(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _written(tmp_path_factory.mktemp("plain"), _mlp(), torch.randn(3, 1, 8, 8), "onnx").read_bytes()


WAYS = [(to, kind) for to, each in FORMATS.items() for kind in (None, *each.quantized)]


@pytest.mark.few(4)
@pytest.mark.parametrize(("to", "quantize"), WAYS, ids=[f"{to}-{kind}" for to, kind in WAYS])
def test_a_file_gives_the_models_answers(tmp_path: Path, plain_onnx: bytes, to: str, quantize: str | None) -> None:
    original, model = _mlp(), _mlp()
    torch.manual_seed(4)
    inputs = torch.randn(33, 1, 8, 8)
    count = None
    if quantize is not None and quantize not in IN_THE_FILE.get(to, ()):
        count = quantize_model(model, quantize)
    if to == "onnx" and count is None:  # the file before anybody quantizes it: written once, as it takes seconds
        path = tmp_path / FORMATS[to].file
        path.write_bytes(plain_onnx)
    else:
        path = _written(tmp_path, model, inputs, to)
    file = open_file(path, to, quantize, _mlp)
    same = compare(file, model, inputs, SAME, to)
    assert same["max_abs_difference"] <= 1e-5
    if quantize is None:
        content = path.read_bytes()
        assert str(Path(torch.__file__).parent).encode() not in content, "it names no folder of this machine"
        assert b"hpc_trainer/models" not in content
        return
    if count is None:
        whole = path.stat().st_size
        count = quantize_file(path, quantize)
        assert path.stat().st_size < whole
        assert sorted(tmp_path.iterdir()) == [path]
        file = open_file(path, to, quantize, _mlp)
    assert count == 64 * 64 + 64 * 64 + 64 * 10
    far = compare(file, original, inputs, TOLERANCES[quantize], to)["max_abs_difference"]
    assert far > same["max_abs_difference"], "numbers of fewer bits are others"


def test_tokens_go_into_a_graph(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = GptConfig(num_layers=1, num_heads=2, embed_dim=16)
    model = Gpt(config, input_shape=(8,), num_classes=11).eval().requires_grad_(False)
    tokens = torch.randint(11, (5, 8))
    path = _written(tmp_path, model, tokens, "torch_export")
    compare(open_file(path, "torch_export", None, _mlp), model, tokens, SAME, "here")


class Branch(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if inputs.sum() > 0 else -inputs


class FixedBatch(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view(2, -1)


class Bessel(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(inputs)


def test_what_has_no_graph_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Branch()).eval()
    with pytest.raises(
        ConfigError, match=r"at 1 \(Branch\), .*test_files.py:\d+: return inputs if inputs.sum"
    ) as error:
        trace(model, torch.randn(3, 4), "onnx")
    assert "or use --to safetensors" in str(error.value)
    with pytest.raises(ConfigError, match="fixes the size of the batch"):
        trace(FixedBatch(), torch.randn(3, 4), "torch_export")


@pytest.mark.long
def test_an_operation_that_onnx_has_not_is_named(tmp_path: Path) -> None:
    program = trace(nn.Sequential(nn.Linear(4, 4), Bessel()).eval(), torch.randn(3, 4), "onnx")
    with pytest.raises(
        ConfigError, match=r"ONNX has no prims.bessel_j0, which 1 \(.*Bessel\), .*test_files.py"
    ) as error:
        write_onnx(program, tmp_path / "model.onnx")
    assert "use --to torch_export" in str(error.value)
    assert not [*tmp_path.iterdir()]


def test_nothing_to_quantize() -> None:
    with pytest.raises(ConfigError, match=r"Sequential has no linear layer, .* Use --to onnx --quantize dynamic_int8"):
        quantize_model(nn.Sequential(nn.Conv2d(1, 2, 3)), "int8")


def test_other_answers_are_refused() -> None:
    model, inputs = _mlp(), torch.randn(5, 1, 8, 8)
    with pytest.raises(ConfigError, match=re.escape("differ from the model's by up to 0.01 on 5 validation samples")):
        compare(lambda batch: model(batch) + 0.01, model, inputs, SAME, "--to onnx")
    with pytest.raises(ConfigError, match="differ from the model's by up to inf"):
        compare(lambda batch: model(batch) * float("nan"), model, inputs, SAME, "--to onnx")
    with pytest.raises(ConfigError, match="are not finite"):
        compare(model, lambda batch: model(batch) * float("nan"), inputs, SAME, "--to onnx")
    with pytest.raises(ConfigError, match="outputs have another shape"):
        compare(lambda batch: model(batch)[:1], model, inputs, SAME, "--to onnx")
    with pytest.raises(ConfigError, match="or a larger --tolerance"):
        compare(lambda batch: -model(batch), model, inputs, 0.1, "--to onnx --quantize int8")
    told = compare(lambda batch: model(batch) + 0.01, model, inputs, 0.5, "--to onnx")
    assert told["max_abs_difference"] == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("kind", ["dynamic_int8", "int8"])
def test_a_run_that_rounded_gets_the_numbers_that_it_rounded_to(kind: str) -> None:
    trained, plain = _mlp(), _mlp()
    qat = QatConfig(to=QatTo[kind], exclude=["layers.1"])
    begin_rounding(trained, qat, ["layers.4", "layers.7"])
    how = quantization_of(TrainConfig(qat=qat), plain, kind)
    assert [name for name, each in plain.named_modules() if isinstance(each, nn.Linear)] == [
        "layers.1",
        "layers.4",
        "layers.7",
    ]
    assert quantize_model(plain, kind, how) == 64 * 64 + 64 * 10, "layers.1 was left out in training"
    inputs = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (plain(inputs) - trained(inputs)).abs().max() < 1e-4 * trained(inputs).abs().max()
