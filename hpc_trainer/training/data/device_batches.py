"""Copies of batches to the device; to a GPU from pinned memory, on a separate stream."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpc_trainer.datasets.batch_trees import map_tensors, tensors_of
from hpc_trainer.training.data.loader import Batch, BatchIterator


class PinnedCopies:
    """Function that copies batches to a GPU on its own stream.

    A copy on the stream of the step would wait for the step before it, and pageable memory makes the host wait too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch on the GPU; work launched afterwards on the current stream can use it."""
        with torch.cuda.stream(self._stream):
            # torch keeps pinned memory for the next batch, and does not reuse it before the copy is done.
            copied = map_tensors(batch, lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tensors_of(copied):
            tensor.record_stream(current)  # the memory is not reused before the step is done with it
        return copied


def copies_to(device: torch.device) -> Callable[[Batch], Batch]:
    """Return a function that copies a batch to `device`.

    The host waits for the copy, except for a GPU; on the CPU nothing is copied.
    """
    if device.type == "cuda":
        return PinnedCopies(device)
    return lambda batch: map_tensors(batch, lambda tensor: tensor.to(device))


def on_device(batches: BatchIterator, device: torch.device) -> BatchIterator:
    """Make `batches` copy each batch to a GPU when it is requested, and return it; other devices change nothing.

    The copy runs while the GPU computes the step before, because the host is ahead of the GPU by then. So no batch is
    fetched in advance, and a checkpoint need not record one.
    """
    if device.type == "cuda":
        batches.copy = PinnedCopies(device)
    return batches
