"""Division of runs into arrays of legal size that fit the cluster's limits now, and runs that wait for room."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_trainer.launch.follow import NOTHING, Follows
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.slurm.limits import Limits, SubmitCap
from hpc_trainer.slurm.shape import Shape

# A dependency is one argument of a command (128 KiB on Linux); the newest jobs end last.
_MOST_AWAITED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """Runs of one shape that will be submitted together.

    `parallelism` elements may run at once (`%N`). With `after` the array begins when all those jobs have ended. With
    `behind` it begins when the array that many places earlier in the plan has ended. Both enforce
    `cluster.array_parallelism` across several arrays.
    """

    hardware: str
    shape: Shape
    specs: tuple[RunSpec, ...]
    parallelism: int = 1
    after: tuple[str, ...] = ()
    behind: int | None = None
    choice: int | None = None
    """Item of the runs' list of hardware (`hardware=first:a,b`) on which `specs` are; None for runs without a list."""
    canaries: tuple[str, ...] = ()
    """Runs that must have trained and saved before Slurm may start this array (launch/grids.py)."""
    slots: int = 0
    """Jobs of a pool that work through the runs; 0: each run is an element. `shape` is that of a slot."""
    per_node: int = 0
    """Runs beside each other in a slot of a pool."""
    per_gpu: int = 1
    """Runs of a slot that share one GPU."""
    follows: Follows = NOTHING
    """Jobs of other runs that end before the array begins (`after`)."""

    @property
    def num_elements(self) -> int:
        """Number of jobs: one for each slot of a pool, or one for each run."""
        return self.slots or len(self.specs)

    @property
    def gpu_hours_max(self) -> float:
        """GPU-hours if each of its jobs runs to its time limit once."""
        return self.shape.gpu_hours * self.num_elements

    @property
    def place(self) -> tuple[str, int | None]:
        """Key of the arrays that share `parallelism`. Items of a list do not share it: none may wait for another."""
        return f"{self.hardware}{' (pool)' if self.slots else ''}", self.choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveArray:
    """Array that was submitted before and has not ended, or the successor job of one run."""

    job_id: str
    hardware: str
    parallelism: int
    num_active: int
    choice: int | None = None
    """Item of the runs' list of hardware, as `ArrayPlan.choice`; None for runs without a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Arrays to submit `now`, in this order, runs left `waiting`, and the `binding` limits that caused it."""

    now: tuple[ArrayPlan, ...]
    waiting: tuple[RunSpec, ...] = ()
    binding: tuple[str, ...] = ()
    keeps_room: bool = True
    """False if no room was kept for a top-up job, because no run would fit then."""


def fit(arrays: Sequence[ArrayPlan], limits: Limits, active: Sequence[ActiveArray] = ()) -> Fitted:
    """Cut arrays into chunks of at most `limits.max_elements`, as many as the submit limits have room for.

    If runs have to wait, room for one job is kept for the top-up job that submits them later.

    Args:
        arrays: one for each shape; `parallelism` is the number of elements that all its chunks may run at once.
        active: this sweep's jobs that are in the queue already and count against `parallelism`.
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
        if array.slots:
            slots = min(array.slots, room.of(array.shape), limits.max_elements or array.slots)
            if slots < array.slots:
                binding += room.full(array.shape, slots) if slots < (limits.max_elements or array.slots) else ()
            room.take(array.shape, slots)
            if slots:
                now.append(dataclasses.replace(array, slots=slots, parallelism=slots))
            else:
                waiting += array.specs
            continue
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
    submitted = {spec.run_id for array in now for spec in array.specs}  # a run with a list needs one job only
    shared = {place: _share(place, now, active) for place in dict.fromkeys(array.place for array in now)}
    return Fitted(
        now=tuple(next(shared[array.place]) for array in now),
        waiting=tuple({spec.run_id: spec for spec in waiting if spec.run_id not in submitted}.values()),
        binding=tuple(dict.fromkeys(binding)),
    )


def _chunks(array: ArrayPlan, count: int, size: int | None) -> Iterator[ArrayPlan]:
    for start in range(0, count, size or max(1, count)):
        specs = array.specs[start : min(count, start + (size or count))]
        yield dataclasses.replace(array, specs=specs)


def _share(
    place: tuple[str, int | None], arrays: Sequence[ArrayPlan], at_work: Sequence[ActiveArray]
) -> Iterator[ArrayPlan]:
    """Divide `parallelism` among the arrays of one hardware and its arrays that are at work already."""
    chunks = [array for array in arrays if array.place == place]
    if chunks[0].slots:  # a pool bounds itself
        yield from chunks
        return
    active = [array for array in at_work if (array.hardware, array.choice) == place]
    total = chunks[0].parallelism
    left = total - sum(min(other.parallelism, other.num_active) for other in active)
    after: tuple[str, ...] = ()
    wanted = sum(len(chunk.specs) for chunk in chunks)
    if active and left < min(wanted, total / 2):  # others use most of it: wait until all have ended, then use all
        left, after = total, tuple(other.job_id for other in active[-_MOST_AWAITED:])
    share, extra = divmod(max(left, 0), len(chunks))
    for index, chunk in enumerate(chunks):
        parallelism = min(len(chunk.specs), max(1, share + (index < extra)))
        behind = left if share == 0 and index >= left else None
        yield dataclasses.replace(chunk, parallelism=parallelism, after=after, behind=behind)


class _Room:
    """Jobs that the submit limits still allow, less those that this command submits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: dict[str, int] = {}

    def _caps(self, shape: Shape) -> list[SubmitCap]:
        return self._limits.submit_caps(shape.partition, shape.account, shape.qos)

    def of(self, shape: Shape) -> int:
        """Return the number of jobs of this shape that may still be submitted."""
        left = (cap.room - self._taken.get(cap.name, 0) for cap in self._caps(shape))
        return max(0, min(left, default=2**31))

    def take(self, shape: Shape, count: int) -> None:
        for cap in self._caps(shape):
            self._taken[cap.name] = self._taken.get(cap.name, 0) + count

    def full(self, shape: Shape, count: int) -> Iterator[str]:
        """Yield a description of each cap that allows no more than `count` jobs."""
        for cap in self._caps(shape):
            if cap.room - self._taken.get(cap.name, 0) <= count:
                yield f"{cap.name} is {cap.limit}, {cap.used} in use"
