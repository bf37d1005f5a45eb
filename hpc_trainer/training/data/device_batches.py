"""Batches on their way to a GPU: copied from pinned memory on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from hpc_trainer.training.data.loader import Batch, BatchIterator


class PinnedCopies:
    """Copies batches to a GPU, on a stream of its own.

    A copy on the stream of the step would wait for the step before it, and pageable memory makes the host wait too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch) -> Batch:
        """Inputs and targets on the GPU; what is launched after it on the current stream finds them there."""
        with torch.cuda.stream(self._stream):
            # torch keeps pinned memory for the next batch, and does not reuse it before the copy is done.
            inputs, targets = (each.pin_memory().to(self._device, non_blocking=True) for each in batch)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for each in (inputs, targets):
            each.record_stream(current)  # its memory is not given away before the step is done with it
        return inputs, targets


def copies_to(device: torch.device) -> Callable[[Batch], Batch]:
    """What brings a batch to `device`; to others than a GPU it is waited for, and on the CPU there is nothing to do."""
    if device.type == "cuda":
        return PinnedCopies(device)
    return lambda batch: (batch[0].to(device), batch[1].to(device))


class DeviceBatches(Iterator[Batch]):
    """The batches of a loader, on the GPU.

    A copy runs while the step before is computed: the host is ahead of the GPU by then, so nothing need be fetched
    earlier than it is asked for, and there is no batch in hand that a checkpoint would have to know.
    """

    def __init__(self, batches: BatchIterator, device: torch.device) -> None:
        self._batches, self._copy = batches, PinnedCopies(device)

    def __next__(self) -> Batch:
        """The next one, as `PinnedCopies` gives it."""
        return self._copy(next(self._batches))

    def targets_ahead(self, num_batches: int) -> list[int]:
        """As the loader's: nothing is copied for it."""
        return self._batches.targets_ahead(num_batches)

    @property
    def wait_s(self) -> float:
        """As the loader's: the host has waited so long for batches."""
        return self._batches.wait_s

    @property
    def example(self) -> Batch | None:
        """As the loader's: a batch's shapes."""
        return self._batches.example

    @property
    def tokens_per_sample(self) -> int | None:
        """As the loader's."""
        return self._batches.tokens_per_sample

    def close(self) -> None:
        """Stops the loader's workers."""
        self._batches.close()


Batches: TypeAlias = "BatchIterator | DeviceBatches"


def on_device(batches: BatchIterator, device: torch.device) -> Batches:
    """`batches` on `device`; on the CPU they are there already, and it is the same object."""
    return DeviceBatches(batches, device) if device.type == "cuda" else batches
