"""fp8: which layers change, that names and tensors stay, that it learns; by emulation, as no such GPU is at hand."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.config.schema.optim import AdamwConfig
from hpc_trainer.config.schema.parallel import Dtype, PrecisionConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.float8.float8 import use_float8
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.optim.build import build_optimizer
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.step import autocast, build_scaler


def _model(embed_dim: int = 32) -> Gpt:
    torch.manual_seed(5)
    return Gpt(GptConfig(num_layers=2, num_heads=2, embed_dim=embed_dim), input_shape=(16,), num_classes=64)


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao.float8", reason="torchao is not installed (the extra `quantize`)")


def _train(model: Gpt, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    loss_of, losses = VotingLoss(model, CrossEntropy()), []
    for step in steps:
        inputs = torch.randint(8, (4, 16), generator=torch.Generator().manual_seed(step))
        with autocast(PrecisionConfig(compute_dtype=Dtype.fp8), "cpu"):
            loss = loss_of((inputs, inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("torchao")
def test_linear_layers_of_blocks_change_and_names_stay() -> None:
    model, plain = _model(), _model()
    before = dict(model.named_parameters())
    assert use_float8(model, emulate=True) == 8
    assert {type(each).__name__ for each in model.blocks.modules()} >= {"Float8Linear", "LayerNorm"}
    assert not any(type(each) is nn.Linear for each in model.modules())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(weight is before[name] for name, weight in model.named_parameters())
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert not build_scaler(PrecisionConfig(compute_dtype=Dtype.fp8), "cpu").is_enabled()


@pytest.mark.long
@pytest.mark.usefixtures("torchao")
def test_it_learns_as_bf16_does() -> None:
    losses = []
    for is_float8 in (False, True):
        model = _model()
        if is_float8:
            use_float8(model, emulate=True)
        losses.append(_train(model, build_optimizer(AdamwConfig(lr=3e-3), model), range(30)))
    assert losses[0] != losses[1], "another rounding"
    assert losses[1][-1] < 0.75 * losses[1][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("torchao")
def test_a_checkpoint_is_that_of_any_precision_and_resumes_with_the_same_bits() -> None:
    model = _model()
    use_float8(model, emulate=True)
    optimizer = build_optimizer(AdamwConfig(lr=3e-3), model)
    _train(model, optimizer, range(4))
    shared, own = to_trees({"model": model, "optimizer": optimizer})
    saved = copy.deepcopy(shared)
    other = _model()
    use_float8(other, emulate=True)
    again = build_optimizer(AdamwConfig(lr=3e-3), other)
    from_trees({"model": other, "optimizer": again}, copy.deepcopy(saved), own)
    assert _train(model, optimizer, range(4, 8)) == _train(other, again, range(4, 8))
    plain = _model()
    from_trees({"model": plain, "optimizer": build_optimizer(AdamwConfig(lr=3e-3), plain)}, saved, own)


@pytest.mark.usefixtures("torchao")
def test_what_has_no_such_layer_is_told() -> None:
    with pytest.raises(ConfigError, match="whose sides 16 divides, and Gpt has none"):
        use_float8(_model(embed_dim=8), emulate=True)
    with pytest.raises(ConfigError, match="and Sequential has none"):
        use_float8(nn.Sequential(nn.Linear(16, 16)), emulate=True)


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"from Ada or Hopper on .*Use precision=bf16"):
        use_float8(_model())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hpc_trainer\[quantize\]', or precision=bf16"):
        use_float8(_model(), emulate=True)


@pytest.mark.long
@pytest.mark.usefixtures("torchao")
def test_torchao_is_imported_under_a_strict_filter_without_its_bytecode(tmp_path: Path) -> None:
    look = (
        "import sys, torch\n"
        "from hpc_trainer.errors import ConfigError\n"
        "from hpc_trainer.features.float8.float8 import use_float8\n"
        f"sys.pycache_prefix = {str(tmp_path)!r}\n"
        "import warnings; warnings.simplefilter('error')\n"
        "try: use_float8(torch.nn.Linear(16, 16), emulate=True)\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert "has none" in done.stdout, done.stderr
