"""Every reference model: shapes, gradients, autocast, determinism, and the messages for what cannot be."""

from __future__ import annotations

import pickle

import pytest
import torch

from hpc_trainer.config.schema.model import (
    CnnConfig,
    GptConfig,
    MlpConfig,
    MlpKind,
    MobilenetSize,
    MobilenetV3Config,
    Norm,
    Positions,
    ResnetConfig,
    VitConfig,
)
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.cnn import Cnn
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.mlp import Mlp
from hpc_trainer.models.mobilenet_v3 import MobilenetV3
from hpc_trainer.models.resnet import Resnet
from hpc_trainer.models.vit import Vit

IMAGE = (3, 8, 8)
TOKENS = (12,)
MODELS = {
    "mlp": (Mlp, MlpConfig(hidden_dim=16), IMAGE),
    "cnn": (Cnn, CnnConfig(num_channels=8), IMAGE),
    "resnet18": (Resnet, ResnetConfig(width=8), IMAGE),
    "resnet34": (Resnet, ResnetConfig(depth=34, width=8, zero_init=False), IMAGE),
    "resnet50": (Resnet, ResnetConfig(depth=50, width=8), IMAGE),
    "mobilenet_v3_small": (MobilenetV3, MobilenetV3Config(), (3, 32, 32)),
    "vit": (Vit, VitConfig(patch_size=4, num_layers=2, num_heads=2, embed_dim=16), IMAGE),
    "gpt": (Gpt, GptConfig(num_layers=2, num_heads=2, embed_dim=16), TOKENS),
    "gpt_of_today": (
        Gpt,
        GptConfig(
            num_layers=2,
            num_heads=4,
            embed_dim=16,
            num_kv_heads=2,
            positions=Positions.rope,
            norm=Norm.rmsnorm,
            mlp=MlpKind.swiglu,
        ),
        TOKENS,
    ),
}


def make(name, num_classes=10):
    model_class, config, input_shape = MODELS[name]
    torch.manual_seed(0)
    return model_class(config, input_shape=input_shape, num_classes=num_classes)


def batch_for(input_shape, batch=4):
    generator = torch.Generator().manual_seed(1)
    if len(input_shape) == 1:
        return torch.randint(0, 10, (batch, *input_shape), generator=generator)
    return torch.randn(batch, *input_shape, generator=generator)


@pytest.mark.few(9)
@pytest.mark.parametrize("size", [8, 9, 15, 32, 224])
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Mlp, MlpConfig(hidden_dim=16)),
        (Cnn, CnnConfig(num_channels=8)),
        (Resnet, ResnetConfig(width=8)),
        (Resnet, ResnetConfig(depth=50, width=8)),
        (MobilenetV3, MobilenetV3Config(size=MobilenetSize.large)),
    ],
    ids=["mlp", "cnn", "resnet18", "resnet50", "mobilenet_v3_large"],
)
def test_image_models_take_any_size(model_class, config, size):
    for input_shape in ((1, size, size), (3, size, size + 5)):
        model = model_class(config, input_shape=input_shape, num_classes=7)
        logits = model(batch_for(input_shape, batch=2))
        assert logits.shape == (2, 7)
        assert logits.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_gradient_reaches_every_parameter(name):
    model = make(name)
    with torch.no_grad():
        for parameter in model.parameters():  # gamma = 0 and zero biases would hide a broken path
            parameter.add_(torch.randn_like(parameter) * 0.05)
    inputs = batch_for(MODELS[name][2])
    logits = model(inputs)
    (logits * torch.randn_like(logits)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_forward_and_backward(name, dtype):
    model = make(name).eval()  # eval: the same statistics and no dropout, so that logits can be compared
    inputs = batch_for(MODELS[name][2])
    expected = model(inputs)
    with torch.autocast("cpu", dtype=dtype):
        logits = model(inputs)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), expected, atol=0.05, rtol=0.05)
    model.train()
    with torch.autocast("cpu", dtype=dtype):
        loss = model(inputs).float().logsumexp(-1).mean()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_same_seed_gives_the_same_bits(name):
    first, second = make(name), make(name)
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key]), key
    inputs = batch_for(MODELS[name][2])
    assert torch.equal(first.eval()(inputs), second.eval()(inputs))


@pytest.mark.parametrize("name", MODELS)
def test_state_dict_holds_each_memory_once_and_pickles(name):
    model = make(name)
    tensors = model.state_dict().values()
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", ["mlp", "cnn", "vit", "gpt", "gpt_of_today"])
def test_no_buffers_to_keep_equal_between_ranks(name):
    assert not list(make(name).buffers())


@pytest.mark.parametrize(
    ("model_class", "config", "input_shape", "parts"),
    [
        (Mlp, MlpConfig(), (3, 0), ["model=mlp", "(3, 0)"]),
        (Mlp, MlpConfig(), (), ["model=mlp", "()"]),
        (Cnn, CnnConfig(), (3, 7, 32), ["model=cnn", "(3, 7, 32)", "(3, 8, 32)"]),
        (Cnn, CnnConfig(), TOKENS, ["model=cnn", "(12,)", "model=gpt"]),
        (Resnet, ResnetConfig(), (3, 4, 4), ["model=resnet18", "(3, 4, 4)", "(3, 8, 8)"]),
        (Resnet, ResnetConfig(), TOKENS, ["model=resnet18", "model=gpt"]),
        (Gpt, GptConfig(), IMAGE, ["model=gpt", "(3, 8, 8)", "model=cnn"]),
        (MobilenetV3, MobilenetV3Config(), (3, 7, 9), ["model=mobilenet_v3_small", "(3, 8, 9)"]),
        (Vit, VitConfig(), IMAGE, ["model.patch_size=16 must divide", "8 x 8 pixels", "model.patch_size=8"]),
        (Vit, VitConfig(), TOKENS, ["model=vit_tiny", "model=gpt"]),
    ],
)
def test_what_cannot_be_is_refused(model_class, config, input_shape, parts):
    with pytest.raises(ConfigError) as caught:
        model_class(config, input_shape=input_shape, num_classes=10)
    for part in parts:
        assert part in str(caught.value)


def test_the_perceptron_takes_rows_of_numbers_and_no_tokens():
    model = Mlp(MlpConfig(), input_shape=TOKENS, num_classes=10)
    assert model(torch.zeros(2, *TOKENS)).shape == (2, 10)
    with pytest.raises(ConfigError, match=r"model=mlp reads numbers, .* torch.int64 of shape \(12,\). .*model=gpt"):
        model(torch.zeros(2, *TOKENS, dtype=torch.int64))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_an_output_is_refused(name):
    with pytest.raises(ConfigError, match=r"data\.num_classes=0 must be ≥ 1"):
        make(name, num_classes=0)
