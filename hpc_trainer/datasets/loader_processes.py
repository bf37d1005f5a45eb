"""Processes that make batches beside the rank: torch's loader, deaf to Slurm's signals, and gone when they are told."""

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

# Slurm signals every process of a step. A worker that died of it would take the last save with it.
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
_KILL_WAIT_S = 5.0


def start_processes(
    dataset: Any, indices: Iterable[list[Any]], num_workers: int
) -> tuple[Iterator[Any], list[BaseProcess]]:
    """(batches of `dataset` in the order of `indices`, the processes that make them). A `Caught` may come for a batch.

    The processes go by `stop_processes` alone.
    """
    source: Any = _Catching(dataset)  # torch's Dataset is nominal; it uses __getitems__ only
    loader: DataLoader[Any] = DataLoader(
        source,
        batch_sampler=indices,
        num_workers=num_workers,
        collate_fn=_identity,
        worker_init_fn=_init_worker,
        # Without one of its own, the loader draws a seed from the global generator, and shifts every dropout mask.
        generator=torch.Generator().manual_seed(0),
        # A forked worker inherits the blocked signals below: there is no instruction at which one could kill it.
        multiprocessing_context="fork",
    )
    before = set(multiprocessing.active_children())
    with _blocked_signals(), warnings.catch_warnings():
        # Python 3.12 warns of any fork beside threads; torch forks its workers by default all the same.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        batches = iter(loader)
    return batches, [child for child in multiprocessing.active_children() if child not in before]


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Holds signals back until the end; none is lost. For this thread and what it forks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    """In place of what a plain generator has not."""


class Caught:
    """An error of ours on its way out of a loader process."""

    def __init__(self, error: HpcTrainerError) -> None:
        self.error = error


class _Catching:
    """A data set whose errors that are raised on purpose come out of loader processes as they are: torch would put its
    own words before theirs, and the first line is what `status` shows.
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
    """Ends them, and empties `batches`; waits at most 10 s for each that hangs."""
    while batches:
        # Private, and the one way: torch stops its workers when the iterator is deleted, but the traceback of an
        # error keeps it alive, and a worker that is killed before raises a second error over the first.
        getattr(batches.pop(), "_shutdown_workers", _nothing)()
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(_KILL_WAIT_S)
