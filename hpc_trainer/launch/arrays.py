"""Which runs fit into the cluster's limits now, in arrays of legal size, and which wait for room."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_trainer.runs.spec import RunSpec, Shape
from hpc_trainer.slurm.limits import Limits, SubmitCap

# A dependency is one argument of a command (128 KiB on Linux); the newest end last.
_MOST_AWAITED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """Runs of one shape that will be submitted together.

    `parallelism` elements may run at once (`%N`); with `after`, the array begins when those jobs have all ended, and
    with `behind` when the array so many places before it in the plan has: both keep `cluster.array_parallelism` true
    where one array cannot.
    """

    hardware: str
    shape: Shape
    specs: tuple[RunSpec, ...]
    parallelism: int = 1
    after: tuple[str, ...] = ()
    behind: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveArray:
    """An array that was submitted before and has not ended, or the successor job of one run."""

    job_id: str
    hardware: str
    parallelism: int
    num_active: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """`now` is submitted in this order; `waiting` is left for later. `binding`: the limits that made it so."""

    now: tuple[ArrayPlan, ...]
    waiting: tuple[RunSpec, ...] = ()
    binding: tuple[str, ...] = ()
    keeps_room: bool = True
    """False if no room was kept for a top-up job, because there would be none for a run then."""


def fit(arrays: Sequence[ArrayPlan], limits: Limits, active: Sequence[ActiveArray] = ()) -> Fitted:
    """Cuts arrays into chunks of at most `limits.max_elements`, as many as the submit limits have room for.

    If something has to wait, one job of room is kept for the top-up job that brings it in later.

    Args:
        arrays: one for each shape; `parallelism` is what all its chunks together may run at once.
        active: what of this sweep is in the queue already, and counts against `parallelism`.
    """
    whole = _fit(arrays, limits, active, reserve=None)
    if not whole.waiting:
        return whole
    reserved = _fit(arrays, limits, active, reserve=arrays[0].shape)
    if whole.now and not reserved.now:
        return dataclasses.replace(whole, keeps_room=False)
    return reserved


def _fit(arrays: Sequence[ArrayPlan], limits: Limits, active: Sequence[ActiveArray], reserve: Shape | None) -> Fitted:
    room = _Room(limits)
    if reserve is not None:
        room.take(reserve, 1)
    now, waiting, binding = list[ArrayPlan](), list[RunSpec](), list[str]()
    for array in arrays:
        count = min(len(array.specs), room.of(array.shape))
        if count < len(array.specs):
            waiting += array.specs[count:]
            binding += room.full(array.shape, count)
        room.take(array.shape, count)
        chunks = list(_chunks(array, count, limits.max_elements))
        if len(chunks) > 1:
            name = "MaxArraySize" if limits.max_elements == limits.max_array_size else "max_array_tasks"
            binding.append(
                f"{name} is {limits.max_elements}: {count} runs on {array.hardware} are {len(chunks)} arrays"
            )
        now += chunks
    shared = {name: _share(name, now, active) for name in dict.fromkeys(array.hardware for array in now)}
    return Fitted(
        now=tuple(next(shared[array.hardware]) for array in now),
        waiting=tuple(waiting),
        binding=tuple(dict.fromkeys(binding)),
    )


def _chunks(array: ArrayPlan, count: int, size: int | None) -> Iterator[ArrayPlan]:
    for start in range(0, count, size or max(1, count)):
        specs = array.specs[start : min(count, start + (size or count))]
        yield dataclasses.replace(array, specs=specs)


def _share(hardware: str, arrays: Sequence[ArrayPlan], at_work: Sequence[ActiveArray]) -> Iterator[ArrayPlan]:
    """Divides `parallelism` among the arrays of one hardware and what is at work already."""
    chunks = [array for array in arrays if array.hardware == hardware]
    active = [each for each in at_work if each.hardware == hardware]
    total = chunks[0].parallelism
    left = total - sum(min(each.parallelism, each.num_active) for each in active)
    after: tuple[str, ...] = ()
    wanted = sum(len(chunk.specs) for chunk in chunks)
    if active and left < min(wanted, total / 2):  # others have most of it: all of it when they have all ended
        left, after = total, tuple(each.job_id for each in active[-_MOST_AWAITED:])
    share, extra = divmod(max(left, 0), len(chunks))
    for index, chunk in enumerate(chunks):
        parallelism = min(len(chunk.specs), max(1, share + (index < extra)))
        behind = left if share == 0 and index >= left else None
        yield dataclasses.replace(chunk, parallelism=parallelism, after=after, behind=behind)


class _Room:
    """What the submit limits leave, less what this command takes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: dict[str, int] = {}

    def _caps(self, shape: Shape) -> list[SubmitCap]:
        return self._limits.submit_caps(shape.partition, shape.account, shape.qos)

    def of(self, shape: Shape) -> int:
        """Jobs of this shape that may still be submitted."""
        left = (cap.room - self._taken.get(cap.name, 0) for cap in self._caps(shape))
        return max(0, min(left, default=2**31))

    def take(self, shape: Shape, count: int) -> None:
        for cap in self._caps(shape):
            self._taken[cap.name] = self._taken.get(cap.name, 0) + count

    def full(self, shape: Shape, count: int) -> Iterator[str]:
        """The caps that let no more than `count` in, in words."""
        for cap in self._caps(shape):
            if cap.room - self._taken.get(cap.name, 0) <= count:
                yield f"{cap.name} is {cap.limit}, {cap.used} in use"
