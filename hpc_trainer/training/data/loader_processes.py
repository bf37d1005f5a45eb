"""Processes that make batches beside the rank: torch's loader, which ignores Slurm's signals and ends on request."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpc_trainer.errors import HpcTrainerError

# Slurm signals every process of a step. A worker that died of the signal would prevent the last save.
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
_KILL_WAIT_S = 5.0


def start_processes(
    dataset: Any, indices: Iterable[list[Any]], num_workers: int
) -> tuple[Iterator[Any], list[BaseProcess]]:
    """Return an iterator over batches of `dataset` in the order of `indices`, and the processes that make them.

    A `Caught` may come instead of a batch. Only `stop_processes` ends the processes.
    """
    source: Any = _Catching(dataset)  # torch's Dataset is nominal; it uses __getitems__ only
    loader: DataLoader[Any] = DataLoader(
        source,
        batch_sampler=indices,
        num_workers=num_workers,
        collate_fn=_identity,
        worker_init_fn=_init_worker,
        # Without its own generator the loader draws a seed from the global one, and shifts every dropout mask.
        generator=torch.Generator().manual_seed(0),
        # A forked worker inherits the blocked signals below, so that no signal can kill it at any instruction.
        multiprocessing_context="fork",
    )
    before = set(multiprocessing.active_children())
    with _blocked_signals(), warnings.catch_warnings():
        # Python 3.12 warns about any fork beside threads; torch still forks its workers by default.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        batches = iter(loader)
    return batches, [child for child in multiprocessing.active_children() if child not in before]


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block signals until the end without losing any, for this thread and the processes that it forks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    """Do nothing, in place of a method that a plain generator lacks."""


class Caught:
    """Error of ours on its way out of a loader process."""

    def __init__(self, error: HpcTrainerError) -> None:
        self.error = error


class _Catching:
    """Data set whose own errors (HpcTrainerError) leave loader processes unchanged.

    torch would put its own text before the message, and `status` shows the first line.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: list[Any]) -> Any:
        try:
            return self._dataset.__getitems__(indices)
        except HpcTrainerError as error:
            return Caught(error)


def _identity(batch: Any) -> Any:
    return batch


def _init_worker(worker: int) -> None:
    del worker
    torch.set_num_threads(1)
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)


def stop_processes(batches: list[Iterator[Any]], workers: list[BaseProcess]) -> None:
    """End the workers and empty `batches`; wait at most 10 s for each worker that hangs."""
    while batches:
        # This private method is the only way. torch stops its workers when the iterator is deleted, but the traceback
        # of an error keeps the iterator alive, and a worker that is killed before raises a second error over the first.
        getattr(batches.pop(), "_shutdown_workers", _nothing)()
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(_KILL_WAIT_S)
