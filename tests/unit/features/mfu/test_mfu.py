"""MFU: operations of a sample, counted and by hand; the peak of a GPU; and what becomes of both in a run."""

from __future__ import annotations

import itertools
import subprocess
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.mfu import flops
from hpc_trainer.features.mfu import mfu as module
from hpc_trainer.features.mfu.flops import flops_per_sample, peak_flops
from hpc_trainer.features.mfu.mfu import FLOPS_FAILED, MfuAbility
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.rng import rng_state
from tests import warm
from tests.unit.training.built_parts import building_of
from tests.unit.training.world_child import compose

IMAGES = torch.zeros(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is a process of its own: it is forked here."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", warm.execute_child)


class Counts:
    """In place of the process that counts."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.found, self.asked, self.is_closed = answer, list[dict[str, Any]](), False

    def send(self, question: dict[str, Any]) -> None:
        self.asked.append(question)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        assert not self.is_closed
        return self.found

    def close(self) -> None:
        self.is_closed = True


def _at_work(
    monkeypatch: pytest.MonkeyPatch, counts: Counts | None = None, *, is_rank_zero: bool = True,
    config: TrainConfig | None = None, **parts: Any,
) -> MfuAbility:  # fmt: skip
    """On one of two GPUs whose peak is 5e10."""
    monkeypatch.setattr(module, "peak_flops", lambda config, device: 5e10)
    if counts is not None:
        monkeypatch.setattr(module, "OwnProcess", lambda module: counts)
    config = config or TrainConfig()
    found = MfuAbility(config)
    run = Mock(is_rank_zero=is_rank_zero, world_size=2)
    images = SimpleNamespace(__getitems__=lambda _: (IMAGES[0][:1], IMAGES[1][:1]), input_shape=None, num_classes=None)
    found.on_state(Mock(), torch.nn.Identity(), building_of(config, run=run, **{"dataset": images, **parts}))
    return found


def test_mfu_is_what_was_done_of_what_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    mfu = _at_work(monkeypatch, counts := Counts({"flops": 1e9}))
    for step in (1, 2):
        mfu.logged(step, values := {"samples_per_s": 20.0})
        assert values["mfu"] == pytest.approx(20 * 1e9 / 1e11)
    assert len(counts.asked) == 1
    assert counts.is_closed
    _at_work(monkeypatch, other := Counts({}), is_rank_zero=False).logged(1, values := {"samples_per_s": 20.0})
    assert "mfu" not in values, "rank 0 logs"
    assert other.asked == []


def test_a_model_that_cannot_be_counted_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mfu = _at_work(monkeypatch, Counts({"error": "ValueError: numbers wanted"}))
    for step in (1, 2):
        mfu.logged(step, values := {"samples_per_s": 20.0})
        assert "mfu" not in values
    output = capsys.readouterr().out
    assert output.count(FLOPS_FAILED) == 1
    assert "numbers wanted" in output


def test_a_run_that_ends_before_its_first_log_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    _at_work(monkeypatch, counts := Counts({"flops": 1e9})).close(None)
    assert counts.is_closed


def test_a_process_of_its_own_counts_as_many_as_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And this one enters no mode of fake tensors: the user's metrics may corrupt the memory there."""
    config, wanted = _counted(["experiment=digits", "model=mlp", "model.hidden_dim=32", "model.num_layers=2"])
    task = build_task(config)
    monkeypatch.setattr(FakeTensorMode, "__enter__", Mock(side_effect=AssertionError("in the rank itself")))
    mfu = _at_work(monkeypatch, config=config, dataset=build_dataset(config, "train", task), task=task)
    mfu.logged(1, values := {"samples_per_s": 20.0})
    assert values["mfu"] == pytest.approx(20 * wanted / 1e11)


def _counted(words: list[str]) -> tuple[TrainConfig, float]:
    config = compose(words, 1)
    task = build_task(config)
    dataset = build_dataset(config, "train", task)
    before = rng_state()
    found = flops_per_sample(lambda: build_model(config, dataset), task, lambda size: dataset.__getitems__(range(size)))
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["python"]["words"], after["python"]["words"])
    return config, found


def test_a_perceptron_by_hand() -> None:
    _, found = _counted(["experiment=digits", "model=mlp", "model.hidden_dim=32", "model.num_layers=2"])
    # Forward, and backward twice as much; nobody wants the gradient of the pixels.
    assert found == 2 * 64 * 32 * 2 + 2 * (32 * 32 + 32 * 10) * 3


def test_a_transformer_by_hand() -> None:
    words = ["experiment=gpt_bytes", "model.num_layers=2", "model.embed_dim=32", "data.seq_len=24",
             "train.recompute=full", "precision=bf16"]  # fmt: skip
    _, found = _counted(words)
    # 6 N + 12 L d T a token (Chowdhery et al. 2022, appendix B), whatever is computed again.
    assert found == 24 * (6 * (12 * 2 * 32 * 32 + 256 * 32) + 12 * 2 * 32 * 24)


def test_a_model_that_draws_until_its_weights_fit_by_hand() -> None:
    _, found = _counted(["experiment=digits", "model=vit_tiny", "model.patch_size=4", "model.num_layers=2"])
    dim, num_tokens, layers = 192, 1 + 4, 2
    of_layer = 12 * 2 * num_tokens * dim * dim + 2 * 2 * num_tokens**2 * dim
    # Forward, and backward twice as much; nobody wants the gradient of the pixels.
    assert found == 3 * (layers * of_layer + 2 * dim * 10) + 2 * 2 * 4 * 16 * dim


class Told(torch.nn.Module):
    """Says itself what it costs."""

    def flops_per_sample(self) -> float:
        return 123.0


def test_a_model_may_tell_its_own_figure() -> None:
    assert flops_per_sample(Told, CrossEntropy(), lambda size: IMAGES) == 123.0


def test_a_peak_is_the_gpus_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["experiment=digits", "precision=bf16"], 1)
    config.hardware.gpu_type = "a100"
    assert peak_flops(config, torch.device("cpu")) is None
    names = itertools.chain(["NVIDIA H100 PCIe"], itertools.repeat("Graphics Device"))
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda device: next(names))
    gpu = torch.device("cuda", 0)
    assert peak_flops(config, gpu) == 756e12
    assert peak_flops(config, gpu) == 312e12  # the profile's, where CUDA's name says nothing
    config.hardware.gpu_type = None
    assert peak_flops(config, gpu) is None


def test_a_gpu_that_nobody_knows_is_told_once_and_has_no_mfu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda device: "Graphics Device")
    monkeypatch.setattr(module, "peak_flops", lambda config, device: None)
    config = compose(["experiment=digits", "precision=bf16"], 1)
    for device, told in (
        ("cuda", "mfu: unknown, config/gpu_types.py has no peak rate of Graphics Device for bf16"),
        ("cpu", ""),
    ):
        found = MfuAbility(config)
        run = Mock(is_rank_zero=True, world_size=1, device=torch.device(device))
        found.on_state(Mock(), torch.nn.Identity(), building_of(config, run=run))
        found.logged(1, values := {"samples_per_s": 20.0})
        assert "mfu" not in values
        assert capsys.readouterr().out.startswith(told)
