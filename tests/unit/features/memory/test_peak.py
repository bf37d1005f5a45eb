"""The estimate is what torch's own MemTracker counts of the same steps: at their peak, in the backward pass too."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.chunked_loss.chunked_loss import use_chunks
from hpc_trainer.features.memory.estimate import MemoryEstimate, estimate, with_evaluation
from hpc_trainer.features.recompute.recompute import recompute_blocks
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.step import autocast
from tests.composed import composed
from tests.unit.training.built_parts import optimizer_of

_GPT2 = ["experiment=gpt2_124m", "train.compile=false"]
_BYTES = ["experiment=gpt_bytes"]
_RESNET18 = ["experiment=resnet_synthetic", "model=resnet18"]


def _config(words: list[str]) -> TrainConfig:
    config = composed(["cluster=local", *words])
    validate(config)
    return config


def _estimated(found: MemoryEstimate) -> int:
    held = found.weights + found.gradients + found.optimizer + found.average
    return held + found.activations + found.gathered + found.update + found.communication


def _tracked(config: TrainConfig) -> int:
    """The peak of two steps, as MemTracker counts them; the second has the optimizer's state from the start."""
    train = config.train
    assert train.grad_accum_steps is not None
    dataset = build_dataset(config, "train", build_task(config))
    samples = dataset.__getitems__(range(1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(config, dataset)
        loss = VotingLoss(model, CrossEntropy(train.label_smoothing))
        if train.loss_chunk_size is not None:
            use_chunks(loss, train.loss_chunk_size)
        recompute_blocks(model, train.recompute)
        optimizer = optimizer_of(config.optim, model)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                for _ in range(train.grad_accum_steps):
                    tracker.reset_mod_stats()
                    inputs, targets = (
                        torch.empty((train.given_micro_batch_size or 0, *each.shape[1:]), dtype=each.dtype)
                        for each in samples
                    )
                    with autocast(config.precision, "cpu"):
                        value = loss((inputs, targets))
                    value.backward()
                    del inputs, targets, value
                optimizer.step()
                optimizer.zero_grad()
        peak = tracker.get_tracker_snapshot("peak")
    total: int = peak[torch.device("cpu")]["Total"]
    return total


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words",
    [
        [*_BYTES],
        [*_BYTES, "precision=bf16", "train.recompute=selective"],
        [*_BYTES, "train.recompute=full"],
        [*_BYTES, "train.loss_chunk_size=64", "train.grad_accum_steps=2"],
        [*_RESNET18, "precision=bf16"],
        [*_RESNET18, "train.grad_accum_steps=2"],
        ["experiment=digits", "model=mlp"],
        ["experiment=digits", "model=cnn", "precision=bf16", "train.grad_accum_steps=2"],
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (
                [*_GPT2, "train.recompute=full"],
                [*_GPT2, "train.recompute=selective"],
                [*_GPT2, "train.loss_chunk_size=8192"],
                [*_GPT2, "train.loss_chunk_size=8192", "train.recompute=full"],
                [*_GPT2, "precision=fp32", "train.grad_accum_steps=8"],
                [*_GPT2, "train.global_batch_size=1"],
                ["experiment=resnet50_synthetic"],
                ["experiment=resnet50_synthetic", "train.recompute=full", "train.compile=false"],
            )
        ),
    ],
    ids=" ".join,
)
def test_the_estimate_is_the_peak_that_mem_tracker_finds(words: list[str]) -> None:
    config = _config(words)
    assert _estimated(estimate(config)) == pytest.approx(_tracked(config), rel=0.05)


@pytest.mark.long
def test_the_backward_pass_of_the_loss_counts() -> None:
    """65,536 tokens and 50,304 classes, logits of 13.2 GB in fp32: more than a GPU of 48 GB holds."""
    config = _config(_GPT2)
    found = estimate(config)
    assert found.activations == pytest.approx(61.9e9, rel=0.01)
    assert _estimated(found) == pytest.approx(_tracked(config), rel=0.05)


@pytest.mark.long
def test_gradients_that_are_there_before_the_pass_count_in_full() -> None:
    """Of a first and only micro-batch they come while activations go; DDP's buckets and sums of others are there."""
    words = [*_BYTES, "train.micro_batch_size=2", "train.recompute=full"]
    alone = estimate(_config([*words, "train.global_batch_size=2"]))
    added = estimate(_config([*words, "train.global_batch_size=4"]))
    ddp = estimate(_config([*words, "train.global_batch_size=4", "hardware=cpu_x2"]))
    assert alone.gradients == added.gradients == ddp.gradients
    assert alone.activations < added.activations == ddp.activations


@pytest.mark.long
def test_an_evaluation_takes_more_samples_than_a_small_micro_batch() -> None:
    """100 windows at once, as the data set has no more, while a micro-batch has 8; a chunked loss cuts both."""
    words = [*_GPT2, "train.micro_batch_size=8"]
    config, chunked = _config(words), _config([*words, "train.loss_chunk_size=8192"])
    found = with_evaluation(config, estimate(config))
    logits = 100 * 1024 * 50304
    assert _estimated(found) < 10e9
    held = found.weights + found.optimizer + found.gradients + found.activations + found.evaluation
    assert held == pytest.approx(_evaluated(config, 100) + found.optimizer, rel=0.05)
    assert held > logits * (2 + 4 + 4), "logits, their copy in fp32 and its softmax"
    assert with_evaluation(chunked, estimate(chunked)).evaluation == 0


def _evaluated(config: TrainConfig, size: int) -> int:
    """The peak of a batch of an evaluation, as MemTracker counts it."""
    dataset = build_dataset(config, "eval", build_task(config))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(config, dataset).eval()
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker, torch.no_grad(), autocast(config.precision, "cpu"):
            inputs = torch.empty(size, 1024, dtype=torch.int64)
            batch = inputs, torch.empty(size, 1024, dtype=torch.int64)
            CrossEntropy().sums(model, batch, num_samples=size, dtype=torch.float64, metrics={})
        peak = tracker.get_tracker_snapshot("peak")
    total: int = peak[torch.device("cpu")]["Total"]
    return total
