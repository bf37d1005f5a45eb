"""What is proposed against too little memory is legal, and is worth what it says."""

from __future__ import annotations

import pytest

from hpc_trainer.config.rules.memory import may_be_auto, smaller_batch, ways
from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.schema.train import TrainConfig
from tests.composed import composed

_CASES = (
    ("hardware=gpu_x8", "experiment=gpt_bytes", "train.global_batch_size=64"),
    ("hardware=gpu_x8", "experiment=gpt_bytes", "parallel.zero1=true", "train.micro_batch_size=auto"),
    ("hardware=cpu_x1", "model=mlp", "train.ema_decay=0.9", "train.global_batch_size=45", "train.micro_batch_size=9"),
    ("hardware=cpu_x2", "model=resnet18", "data=synthetic_images", "train.compile=true"),
    ("hardware=cpu_x2", "train.logical_ranks=4"),
    ("hardware=gpu_x8", "experiment=gpt_bytes", "parallel=fsdp", "train.recompute=full", "precision=bf16"),
    ("hardware=gpu_x8", "experiment=gpt_bytes", "parallel=fsdp", "parallel.reshard_after_forward=false"),
    ("hardware=gpu_x8", "parallel=fsdp", "model=resnet18", "data=synthetic_images", "precision=bf16"),
)


def _config(*words: str) -> TrainConfig:
    config = composed(["cluster=slurm", *words])
    validate(config)
    return config


@pytest.mark.few(2)
@pytest.mark.parametrize("words", _CASES, ids=lambda words: " ".join(words)[:60])
def test_each_way_is_legal_as_it_is_typed(words: tuple[str, ...]) -> None:
    for way in ways(_config(*words)):
        accum = ["train.grad_accum_steps=null"] if "micro_batch" in way.text else []
        changed = composed(["cluster=slurm", *words, *way.text.split(), *accum])
        assert list(find_problems(changed)) == [], way.text


def test_a_smaller_batch_is_a_divisor_and_auto_is_offered_where_it_is_legal() -> None:
    gpt, auto, odd, _, logical, sharded, _, _ = (_config(*words) for words in _CASES)
    assert smaller_batch(gpt) == 4
    assert [may_be_auto(each) for each in (gpt, auto, odd, logical)] == [True, False, True, False]
    assert smaller_batch(auto) is None
    assert smaller_batch(odd) == 3, "of 45 samples 4 would leave one over"
    assert not [way.text for way in ways(sharded) if "micro" in way.text]


def test_what_is_saved_is_the_others_share() -> None:
    parts = {"weights": 8.0, "gradients": 8.0, "optimizer": 16.0, "average": 4.0, "activations": 10.0}
    saved = {way.text: way.saves(parts) for way in ways(_config(*_CASES[0]))}
    assert saved["train.micro_batch_size=4"] == 5.0
    assert saved["parallel=fsdp"] == pytest.approx(36 * 7 / 8)
    assert saved["parallel.zero1=true"] == pytest.approx(16 * 7 / 8)


def test_logits_in_parts_where_they_are_most_of_it() -> None:
    """A vocabulary of 50,304 in a model of GPT-2's width; bytes are 256."""
    large = {way.text: way for way in ways(_config("hardware=gpu_x1", "experiment=gpt2_124m"))}
    small = {way.text: way for way in ways(_config("hardware=gpu_x1", "experiment=gpt_bytes", "data.seq_len=1024"))}
    key = "train.loss_chunk_size=8192"
    assert large[key].share["activations"] > 0.4 > 0.2 > small[key].share["activations"]
    chunked = _config("hardware=gpu_x1", "experiment=gpt2_124m", key)
    assert key not in {way.text for way in ways(chunked)}


_FSDP = ("hardware=gpu_x8", "experiment=gpt_bytes", "parallel=fsdp", "train.recompute=full", "model.num_layers=8")


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (("precision=bf16",), ["parallel.param_dtype=bf16"]),
        (("precision=fp16",), ["parallel.param_dtype=fp16"]),
        (("precision=bf16", "parallel.param_dtype=bf16"), []),
        (("precision=fp32",), []),  # autocast's format first
        (("precision=fp32", "parallel.reshard_after_forward=false"), ["parallel.reshard_after_forward=true"]),
        (
            ("precision=bf16", "parallel=fsdp_tp", "parallel.reshard_after_forward=false"),
            ["parallel.reshard_after_forward=true", "parallel.param_dtype=bf16"],
        ),
        (("precision=fp32", "parallel.reshard_after_forward=false", "model.num_layers=2"), []),
        (
            ("precision=fp32", "parallel.reshard_after_forward=false", "parallel.pipeline_parallel=2",
             "train.grad_accum_steps=2"),
            [],
        ),
        (("precision=bf16", "parallel=ddp"), []),
        (("precision=bf16", "model=resnet18", "data=synthetic_images"), []),  # its batch norm takes fp32 alone
        (("precision=bf16", "model=custom", "model._target_=mine.Net", "trust=[mine]"), []),  # may have one
    ],
)  # fmt: skip
def test_what_fsdp_gathers_is_proposed_where_it_is_less(more: tuple[str, ...], found: list[str]) -> None:
    named = ("parallel.param_dtype", "parallel.reshard_after_forward")
    words = _FSDP if "model=resnet18" not in more and "model=custom" not in more else _FSDP[:-1]
    assert [way.text for way in ways(_config(*words, *more)) if way.text.startswith(named)] == found


def test_what_gathering_less_saves() -> None:
    """Two of eight blocks are whole; half the bytes of them."""
    config = _config(*_FSDP, "precision=bf16", "parallel.reshard_after_forward=false")
    saved = {way.text: way.saves({"gathered": 8.0, "activations": 10.0}) for way in ways(config)}
    assert saved["parallel.reshard_after_forward=true"] == 6.0
    assert saved["parallel.param_dtype=bf16"] == 4.0 + 3.0
    assert saved["optim.offload=true"] == 0.0
