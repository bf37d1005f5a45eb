"""Batches on their way to a GPU: copied from pinned memory on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpc_trainer.datasets.batch_trees import map_tensors, tensors_of
from hpc_trainer.training.data.loader import Batch, BatchIterator


class PinnedCopies:
    """Copies batches to a GPU, on a stream of its own.

    A copy on the stream of the step would wait for the step before it, and pageable memory makes the host wait too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch) -> Batch:
        """The batch on the GPU; what is launched after it on the current stream finds them there."""
        with torch.cuda.stream(self._stream):
            # torch keeps pinned memory for the next batch, and does not reuse it before the copy is done.
            copied = map_tensors(batch, lambda each: each.pin_memory().to(self._device, non_blocking=True))
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for each in tensors_of(copied):
            each.record_stream(current)  # its memory is not given away before the step is done with it
        return copied


def copies_to(device: torch.device) -> Callable[[Batch], Batch]:
    """What brings a batch to `device`; to others than a GPU it is waited for, and on the CPU there is nothing to do."""
    if device.type == "cuda":
        return PinnedCopies(device)
    return lambda batch: map_tensors(batch, lambda each: each.to(device))


def on_device(batches: BatchIterator, device: torch.device) -> BatchIterator:
    """The same; to a GPU each batch is copied when it is asked for.

    The copy runs while the step before is computed: the host is ahead of the GPU by then, so nothing need be fetched
    earlier than it is asked for, and there is no batch in hand that a checkpoint would have to know.
    """
    if device.type == "cuda":
        batches.copy = PinnedCopies(device)
    return batches
