"""Synthetic tokens depend on seed, split and index alone, lie in the vocabulary, and have something to be learned."""

from __future__ import annotations

import hashlib
import math
import pickle

import pytest
import torch

from hpc_trainer.data.generated import SyntheticTokensConfig
from hpc_trainer.data.generated import dataset as synthetic_tokens
from hpc_trainer.datasets import MapDataset


def build(split="train", **values):
    return synthetic_tokens.build(SyntheticTokensConfig(**{"seq_len": 32, **values}), split)


def test_targets_are_the_tokens_that_follow():
    data = build(vocab_size=1000)
    assert isinstance(data, MapDataset)
    assert (data.input_shape, data.num_classes, len(data)) == ((32,), 1000, 10_000)
    inputs, targets = data.__getitems__([3, 9_999])
    assert (inputs.shape, inputs.dtype, targets.shape, targets.dtype) == ((2, 32), torch.int64, (2, 32), torch.int64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(inputs[0], inputs[1])


def test_a_window_is_the_same_in_any_batch_and_process():
    inputs, targets = build().__getitems__([5, 9_999, 0, 5])
    copy = pickle.loads(pickle.dumps(build()))
    for slot, index in enumerate([5, 9_999, 0, 5]):
        one, following = copy.__getitems__([index])
        assert torch.equal(one[0], inputs[slot])
        assert torch.equal(following[0], targets[slot])


def test_the_tokens_are_the_same_for_ever():
    inputs, _ = build(seq_len=8).__getitems__([0, 1])
    assert hashlib.sha256(inputs.numpy().tobytes()).hexdigest() == (
        "1475f320f1d55c951d1827706db9fe9e498f8330d3698fb115117690b310c429"
    )


def test_seed_split_and_index_each_change_the_tokens():
    first = build().__getitems__([0])[0]
    for other in (build().__getitems__([1]), build("eval").__getitems__([0]), build(data_seed=1).__getitems__([0])):
        assert not torch.equal(first, other[0])


@pytest.mark.parametrize("vocab_size", [2, 50_257, 2**31])
def test_all_of_a_vocabulary_may_come_and_nothing_else(vocab_size):
    tokens, _ = build(seq_len=1024, vocab_size=vocab_size).__getitems__(range(100))
    assert 0 <= tokens.min() < max(1, 1e-3 * vocab_size)
    assert 0.8 * (vocab_size - 1) <= tokens.max() < vocab_size


def test_the_loss_that_can_be_reached_is_what_the_page_says():
    tokens, _ = build(seq_len=1024, vocab_size=64).__getitems__(range(400))
    share = torch.bincount(tokens.flatten(), minlength=64) / tokens.numel()
    entropy = -(share * share.log()).sum().item()
    assert entropy == pytest.approx(math.log(64) - 0.42, abs=0.03)


@pytest.mark.parametrize("index", [-1, 100])
def test_an_index_outside_is_refused(index):
    with pytest.raises(IndexError, match=rf"index {index} must be 0 to 99"):
        build("eval").__getitems__([index])
