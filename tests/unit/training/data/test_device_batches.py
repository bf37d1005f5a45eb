"""Batches reach the GPU in order and whole; on the CPU nothing stands between the loader and the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_trainer.training.data.loader import BatchIterator, PinnedCopies, copies_to, on_device


def _batches() -> BatchIterator:
    return BatchIterator(((torch.full((2, 3), float(index)), torch.tensor([index, 7])) for index in range(4)), [])


def test_on_the_cpu_nothing_is_copied() -> None:
    batches = on_device(_batches(), torch.device("cpu"))
    assert batches.copy is None


def test_a_copy_to_another_device_is_waited_for() -> None:
    batch = next(_batches())
    here, there = copies_to(torch.device("cpu"))(batch), copies_to(torch.device("meta"))(batch)
    assert all(one is other for one, other in zip(here, batch, strict=True)), "nothing to copy"
    assert [each.device.type for each in there] == ["meta", "meta"]


def test_a_copy_to_a_gpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(name="copies"))
    assert isinstance(copies_to(torch.device("cuda", 0)), PinnedCopies)


def test_the_step_waits_for_the_copy_and_memory_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine without a GPU can show: which calls are made, in which order."""
    calls: list[str] = []
    current = SimpleNamespace(wait_stream=lambda stream: calls.append(f"step waits for {stream.name}"))

    @contextlib.contextmanager
    def stream(own: Any) -> Iterator[None]:
        calls.append(f"begin {own.name}")
        yield
        calls.append(f"end {own.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(name="copies"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, used: calls.append("kept"))
    batches = on_device(_batches(), torch.device("cuda", 0))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: self)
    assert calls == []
    inputs, targets = next(batches)
    assert calls == ["begin copies", "pin", "pin", "end copies", "step waits for copies", "kept", "kept"]
    assert (inputs[0, 0].item(), targets.tolist()) == (0.0, [0, 7])
    assert [targets[0].item() for _, targets in batches] == [1, 2, 3]
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_batches_are_whole_and_in_order() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for index, (inputs, targets) in enumerate(on_device(_batches(), device)):
        assert inputs.device == targets.device == device
        assert (inputs.sum().item(), targets.tolist()) == (6.0 * index, [index, 7])
