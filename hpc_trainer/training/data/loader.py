"""Batches of training samples in the fixed order, loaded in the rank or by worker processes, and copied to a GPU.

Copies to a GPU come from pinned memory on a stream of their own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.record.ledger import Kind
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.training.data.batches import map_tensors, tensors_of
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.data.protocol import MapDataset, Seeded, by_epoch

# Slurm signals every process of a step. A worker that died of the signal would prevent the last save.
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
_KILL_WAIT_S = 5.0
Batch = Any
"""Inputs and targets, two tensors; tensors in any form (`batches.py`) if the task takes other batches."""


def shares_of(rank: int, world_size: int, num_shares: int) -> range:
    """Return the consecutive shares, of `num_shares` in all, that one rank takes; every rank takes equally many.

    Raises:
        ValueError: `num_shares` is not a multiple of `world_size`.
    """
    per_rank, rest = divmod(num_shares, world_size)
    if rest or per_rank < 1:
        raise ValueError(f"num_shares={num_shares} must be a multiple of world_size={world_size}.")
    return range(rank * per_rank, (rank + 1) * per_rank)


def eval_indices(num_samples: int, rank: int, world_size: int) -> range:
    """Return one rank's share of the evaluation samples: every world_size-th from `rank` on.

    Shares differ in length by at most one and may be empty; together they hold each sample once.
    """
    return range(rank, num_samples, world_size)


class BatchIterator(Iterator[Batch]):
    """Iterator over batches; `close` stops the workers. Also a context manager.

    `example`: shapes and types of a batch, on the meta device; None before the first one. `copy`: copies each batch to
    the device (`device_batches`); None leaves it where it is. `spans`: record the time in which the step waits for a
    batch, or makes it itself.
    """

    def __init__(self, batches: Iterator[Batch], workers: list[BaseProcess]) -> None:
        self._batches = [batches]  # empty once closed
        self._ahead: deque[Batch] = deque()
        self.workers = workers
        self.example: Batch | None = None
        self.copy: Callable[[Batch], Batch] | None = None
        self.spans = Spans()
        # Also runs at interpreter exit: multiprocessing would wait for ever for a worker that ignores SIGTERM.
        self._stop = weakref.finalize(self, stop_processes, self._batches, workers)

    def __next__(self) -> Batch:
        """Return the next batch. Raises StopIteration at the end and after `close`."""
        batch = self._ahead.popleft() if self._ahead and self._batches else self._make()
        if self.example is None:
            self.example = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device="meta"))
        return batch if self.copy is None else self.copy(batch)

    def targets_ahead(self, num_batches: int, count: Callable[[Batch], int]) -> list[int]:
        """Return `count(batch)` for each of the next batches, which stay in the iterator.

        Raises:
            StopIteration: there are fewer batches.
        """
        while len(self._ahead) < num_batches:
            self._ahead.append(self._make())
        return [count(batch) for batch in itertools.islice(self._ahead, num_batches)]

    def _make(self) -> Batch:
        if not self._batches:
            raise StopIteration
        with self.spans.within(Kind.data_wait):
            batch = next(self._batches[0])
        if isinstance(batch, Caught):
            raise batch.error
        return batch

    @property
    def wait_s(self) -> float:
        """Seconds so far in which the step waited for batches: the `data_wait` of `spans`."""
        return self.spans.seconds()[Kind.data_wait]

    @property
    def tokens_per_sample(self) -> int | None:
        """Length of a target sequence if targets are tokens, [batch, seq_len]; None for other data sets."""
        targets = self.example[1] if isinstance(self.example, tuple) and len(self.example) == 2 else None
        if not isinstance(targets, torch.Tensor) or targets.ndim != 2 or targets.is_floating_point():
            return None
        return targets.shape[1]

    def close(self) -> None:
        """Stop the workers and wait for them, at most 10 s for each that hangs. May be called again."""
        self._stop()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def train_batches(
    dataset: MapDataset,
    order: BatchOrder,
    *,
    first_step: int,
    num_steps: int,
    rank: int,
    world_size: int,
    micro_batch_size: int,
    grad_accum_steps: int,
    num_workers: int,
    num_shares: int | None = None,
) -> BatchIterator:
    """Return one rank's micro-batches for the steps first_step to num_steps - 1, `grad_accum_steps` per step.

    With `num_shares`, each step has the micro-batches of this rank's logical ranks, one logical rank after the other. A
    method `augment` or `training_batch` of the data set (`protocol.py`) is called here, in the rank or in its workers
    alike. Draws nothing from the global random state of this process. Not collective.

    Args:
        dataset: its `__getitems__(indices)` makes a whole batch from the indices alone; numbers drawn from a
            worker's global random state would differ after a resume.
        order: the order of the samples.
        first_step: steps done before, ≥ 0.
        num_steps: `train.num_steps`, the end of the whole run, not a number of steps from first_step.
        rank: 0 to world_size - 1.
        world_size: number of ranks.
        micro_batch_size: samples of one forward pass; × grad_accum_steps × world_size must be the global batch.
        grad_accum_steps: forward passes a step, ≥ 1.
        num_workers: number of processes, ≥ 0; with 0 each batch is made when it is requested.
        num_shares: replaces world_size in that product; a multiple of it.

    Raises:
        ValueError: the sizes do not multiply to the global batch.
    """
    num_parts = num_shares or world_size
    if micro_batch_size * grad_accum_steps * num_parts != order.global_batch_size:
        raise ValueError(
            f"global_batch_size={order.global_batch_size} must be micro_batch_size × grad_accum_steps × world_size, "
            f"but {micro_batch_size} × {grad_accum_steps} × {num_parts} = "
            f"{micro_batch_size * grad_accum_steps * num_parts}."
        )
    steps, parts = range(first_step, num_steps), shares_of(rank, world_size, num_parts)
    changing = by_epoch(dataset)
    indices = _Indices(
        order, steps, parts, num_parts, micro_batch_size, grad_accum_steps, with_epoch=changing is not None
    )
    source: Any = dataset if changing is None else Seeded(changing, order.seed)
    if num_workers == 0:
        return BatchIterator((source.__getitems__(batch) for batch in indices), [])
    return BatchIterator(*start_processes(source, indices, num_workers))


def stream_batches(
    dataset: Any, global_batch_size: int, *, num_left_out: int, rank: int, world_size: int, micro_batch_size: int,
    grad_accum_steps: int, num_workers: int, num_shares: int | None = None,
) -> BatchIterator:  # fmt: skip
    """Return batches as `train_batches` does, of a data set with a `stream` (`SampleStream`).

    The stream keeps its own position.

    Raises:
        ConfigError: worker processes are configured; each would have its own position.
    """
    if num_workers:
        raise ConfigError(
            f"data.num_workers={num_workers}: a stream is read by the rank itself, whose checkpoint has its position. "
            "Use data.num_workers=0."
        )
    num_parts = num_shares or world_size
    places = itertools.product(shares_of(rank, world_size, num_parts), range(grad_accum_steps))
    starts = [(accum * num_parts + part) * micro_batch_size for part, accum in places]
    parts = dataset.stream.parts(global_batch_size, starts, micro_batch_size, num_left_out=num_left_out)
    return BatchIterator(map(dataset.of_samples, parts), [])


class _Indices:
    """Indices of each micro-batch, in the order of use, like a batch sampler of DataLoader.

    `with_epoch`: yield (epoch, index) for each sample, as `Seeded` takes them.
    """

    def __init__(
        self, order: BatchOrder, steps: range, parts: range, num_parts: int, micro_batch_size: int, accum: int, *,
        with_epoch: bool,
    ) -> None:  # fmt: skip
        self._order, self._with_epoch = order, with_epoch
        self._steps, self._parts, self._num_parts = steps, parts, num_parts
        self._micro_batch_size, self._grad_accum_steps = micro_batch_size, accum

    def __len__(self) -> int:
        return len(self._steps) * len(self._parts) * self._grad_accum_steps

    def __iter__(self) -> Iterator[list[Any]]:
        size = self._micro_batch_size
        places = list(itertools.product(self._parts, range(self._grad_accum_steps)))
        for step in self._steps:  # itertools.product with the steps would first build a tuple of all steps
            for part, accum in places:
                indices: list[int] = self._order.micro_indices(
                    step, accum=accum, rank=part, world_size=self._num_parts, micro_batch_size=size
                ).tolist()
                epoch = step // self._order.steps_per_epoch
                yield [(epoch, index) for index in indices] if self._with_epoch else indices


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

    The copy runs while the GPU computes the previous step, because the host is ahead of the GPU by then. So no batch is
    fetched in advance, and a checkpoint need not record one.
    """
    if device.type == "cuda":
        batches.copy = PinnedCopies(device)
    return batches


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
    """Error of hpc_trainer that a loader process sends to the training process."""

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
