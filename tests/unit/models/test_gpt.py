"""The GPT sees no future, ties its head, and starts as GPT-2 does."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from hpc_trainer.config.schema.model import GptConfig, MlpKind, Norm, Positions
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.transformer import Attention, BlockShape, rotate

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


TODAY = {"positions": Positions.rope, "norm": Norm.rmsnorm, "mlp": MlpKind.swiglu, "num_kv_heads": 2}


@pytest.mark.parametrize("kind", [{key: value} for key, value in TODAY.items()] + [TODAY], ids=[*TODAY, "all"])
def test_choices_of_later_models(kind):
    """Causal as before; each has its weights, as many as the configuration says."""
    torch.manual_seed(0)
    config = GptConfig(num_layers=2, num_heads=4, embed_dim=64, **kind)
    model = Gpt(config, input_shape=(SEQ_LEN,), num_classes=VOCAB)
    places = 0 if "positions" in kind else SEQ_LEN
    expected = 2 * config.num_block_weights + (VOCAB + places) * 64 + config.num_norm_weights
    assert sum(weight.numel() for weight in model.parameters()) == expected
    before, after = tokens(), tokens()
    after[:, 7] = (after[:, 7] + 1) % VOCAB
    with torch.no_grad():
        difference = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert not difference[:7].any()
    assert (difference[7:] > 0).all()


def test_rotary_positions_see_how_far_apart_tokens_are_and_not_where():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8)
    scores = rotate(query.expand(1, 1, 12, 8)) @ rotate(key.expand(1, 1, 12, 8)).transpose(-1, -2)
    for offset in range(1, 12):
        along = scores[0, 0].diagonal(offset)
        torch.testing.assert_close(along, along[:1].expand_as(along), atol=1e-5, rtol=1e-5)
    assert scores[0, 0, 0].std() > 0.01
    assert torch.equal(rotate(query), query), "the first place is not turned"


def test_grouped_queries_are_heads_whose_keys_and_values_are_alike():
    """Of 4 heads with 2 of keys: plain attention, where heads 0 and 1 have one key and value, and 2 and 3 another."""
    torch.manual_seed(0)
    grouped = Attention(BlockShape(dim=16, num_heads=4, num_kv_heads=2, mlp_dim=1))
    plain = Attention(BlockShape(dim=16, num_heads=4, mlp_dim=1))
    by_group = grouped.query_key_value.weight.view(2, 4, 4, 16)  # [kv heads, 2 queries + key + value, head_dim, dim]
    biases = grouped.query_key_value.bias.view(2, 4, 4)
    with torch.no_grad():
        plain.out.load_state_dict(grouped.out.state_dict())
        rows = [[0, 2, 3], [1, 2, 3]]
        plain.query_key_value.weight.copy_(by_group[:, rows].reshape(48, 16))
        plain.query_key_value.bias.copy_(biases[:, rows].reshape(48))
        inputs = torch.randn(2, 6, 16)
        torch.testing.assert_close(grouped(inputs), plain(inputs))


def test_swiglu_has_as_many_weights_as_gelu_of_gpt2_small():
    sizes = {kind: GptConfig(num_layers=12, num_heads=12, embed_dim=768, mlp=kind) for kind in MlpKind}
    assert sizes[MlpKind.swiglu].mlp_dim == 2048
    ratio = sizes[MlpKind.swiglu].num_block_weights / sizes[MlpKind.gelu].num_block_weights
    assert ratio == pytest.approx(1, abs=1e-3)


def test_words_of_choices_build_the_same_as_choices():
    """Lines that load exported weights have them as words."""
    words = GptConfig(embed_dim=12, positions="rope", norm="rmsnorm", mlp="swiglu", num_kv_heads=2, num_heads=2)
    choices = GptConfig(embed_dim=12, num_heads=2, **TODAY)
    assert words.mlp_dim == choices.mlp_dim == 32
    shapes = [
        {name: each.shape for name, each in Gpt(config, input_shape=(4,), num_classes=8).state_dict().items()}
        for config in (words, choices)
    ]
    assert shapes[0] == shapes[1]
