"""The GPT sees no future, ties its head, and starts as GPT-2 does."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.gpt import Gpt

SEQ_LEN, VOCAB = 16, 256


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = GptConfig(num_layers=2, num_heads=4, embed_dim=64)
    return Gpt(config, input_shape=(SEQ_LEN,), num_classes=VOCAB)


def tokens(batch=2, seq_len=SEQ_LEN):
    return torch.randint(0, VOCAB, (batch, seq_len), generator=torch.Generator().manual_seed(1))


def test_shape(model):
    logits = model(tokens())
    assert logits.shape == (2, SEQ_LEN, VOCAB)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("changed", [0, 1, 7, SEQ_LEN - 1])
def test_a_token_changes_no_logit_before_it(model, changed):
    before = tokens()
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % VOCAB
    with torch.no_grad():
        difference = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert not difference[:changed].any()
    assert (difference[changed:] > 0).all()


def test_a_shorter_window_gives_the_same_logits(model):
    with torch.no_grad():
        torch.testing.assert_close(model(tokens())[:, :5], model(tokens()[:, :5]))


def test_a_longer_window_is_refused(model):
    with pytest.raises(ConfigError, match=r"at most 16 tokens but got 17.*data\.seq_len=17"):
        model(tokens(seq_len=SEQ_LEN + 1))


def test_starts_as_gpt2(model):
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    block = model.blocks[0]
    assert block.mlp_in.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for residual in (block.attention.out, block.mlp_out):
        assert residual.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.05)
        assert not residual.bias.any()
    # So small a start predicts nothing: the loss is that of a uniform guess.
    logits = model(tokens())
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens().roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(VOCAB), abs=0.1)


def test_parameter_count_is_that_of_gpt2_small():
    with torch.device("meta"):
        config = GptConfig(num_layers=12, num_heads=12, embed_dim=768)
        model = Gpt(config, input_shape=(1024,), num_classes=50257)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


@pytest.mark.parametrize(("multiple", "rows"), [(1, 257), (128, 384), (257, 257)])
def test_the_vocabulary_is_rounded_up_and_targets_are_what_they_were(multiple, rows):
    config = GptConfig(num_layers=1, num_heads=2, embed_dim=16, vocab_multiple=multiple)
    model = Gpt(config, input_shape=(SEQ_LEN,), num_classes=257)
    logits = model(tokens())
    assert logits.shape == (2, SEQ_LEN, rows)
    functional.cross_entropy(logits.flatten(0, 1), tokens().flatten()).backward()
    assert model.token_embedding.weight.grad.shape == (rows, 16)


def test_gpt2_small_rounded_up_has_the_rows_of_nanogpt():
    with torch.device("meta"):
        config = GptConfig(num_layers=12, num_heads=12, embed_dim=768, vocab_multiple=128)
        assert Gpt(config, input_shape=(1024,), num_classes=50257).token_embedding.num_embeddings == 50_304


def test_dropout_acts_in_training_only():
    config = GptConfig(num_layers=1, num_heads=2, embed_dim=16, dropout=0.5)
    model = Gpt(config, input_shape=(SEQ_LEN,), num_classes=VOCAB)
    with torch.no_grad():
        assert not torch.equal(model(tokens()), model(tokens()))
        model.eval()
        assert torch.equal(model(tokens()), model(tokens()))


def test_learns_to_repeat_a_pattern(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pattern = torch.arange(SEQ_LEN + 1).remainder(5).expand(4, -1)
    for _ in range(40):
        loss = functional.cross_entropy(model(pattern[:, :-1]).flatten(0, 1), pattern[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
