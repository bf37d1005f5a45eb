"""`hpc-trainer data check` and `data bench`: the process with torch that reads a data set as training does.

`check` reads every sample of both splits in loader processes and reports the problems of each. `bench` measures how
fast batches of training samples arrive, by the number of loader processes. Requests come through
runtime/torch_process.py.
"""

from __future__ import annotations

import cProfile
import dataclasses
import hashlib
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from hpc_trainer.config.load import from_plain
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.data.files import Problem
from hpc_trainer.data.images import pictures
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.runtime.torch_process import answer
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.ability import abilities
from hpc_trainer.training.build import build_dataset, build_task
from hpc_trainer.training.data.batches import tensors_of
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.data.protocol import SPLITS, MapDataset, Split, by_epoch

_ENDLESS = 10**12  # steps
_PROFILED_S = 1.0
_SHARES = {"decode": "decode", "resize_and_crop": "resize"}


def bench(
    config: TrainConfig, *, workers: Sequence[int], seconds: float, tell: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return the answer of `data bench`; see docs/json.md.

    Batches are those of one rank: of the size of its micro-batch, in the order of training, and with the changes of
    features to samples (`augment`, `replay`). Work that `augment.run_on=device` leaves to the device is not included.

    Raises:
        ConfigError: the data are a stream, which is read by the rank itself.
    """
    dataset = build_dataset(config, "train", build_task(config), abilities(config))
    if getattr(dataset, "stream", None) is not None:
        raise ConfigError("data bench draws samples by their number, and these data are a stream. Measure it in a run.")
    size = config.train.given_micro_batch_size or config.train.global_batch_size
    order = BatchOrder(len(dataset), size, config.seed)
    rows = []
    for place, number in enumerate(workers):
        tell(place, len(workers))
        rows.append(_measure(dataset, order, number, seconds))
    return {"batch_size": size, "num_samples": len(dataset), "rows": rows, "shares": _shares(dataset, order, seconds)}


def _measure(dataset: MapDataset, order: BatchOrder, num_workers: int, seconds: float) -> dict[str, Any]:
    began = time.perf_counter()
    size = order.global_batch_size
    with train_batches(
        dataset, order, first_step=0, num_steps=_ENDLESS, rank=0, world_size=1, micro_batch_size=size,
        grad_accum_steps=1, num_workers=num_workers,
    ) as batches:  # fmt: skip
        num_bytes = sum(tensor.nbytes for tensor in tensors_of(next(batches)))
        first = time.perf_counter() - began
        # Batches that loader processes made while the first one was waited for are not counted.
        for _ in range(2 * num_workers):
            next(batches)
        began, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds or not count:
            next(batches)
            count += 1
    return {
        "num_workers": num_workers, "samples_per_s": count * size / passed, "batch_ms": 1000 * passed / count,
        "mb_per_s": count * num_bytes / passed / 1e6, "first_batch_s": first, "num_batches": count,
    }  # fmt: skip


def _shares(dataset: MapDataset, order: BatchOrder, seconds: float) -> dict[str, float]:
    """Return the shares of decoding and resizing in the time that a sample takes; {} if the data are not pictures."""
    profile = cProfile.Profile()
    began = time.perf_counter()
    for step in range(_ENDLESS):
        rows = order.global_indices(step).tolist()
        profile.enable()
        dataset.__getitems__(rows)
        profile.disable()
        if time.perf_counter() - began > min(seconds, _PROFILED_S):
            break
    stats: Any = pstats.Stats(profile)
    total = stats.total_tt
    cumulative = {name: entry[3] for (file, _, name), entry in stats.stats.items() if file == pictures.__file__}
    return {_SHARES[name]: spent / total for name, spent in cumulative.items() if name in _SHARES and total}


_BATCH = 32
_KEPT = 1000  # problems that are reported one by one
_DUPLICATES_SHOWN = 5
_PADDING = -100


def check(
    config: TrainConfig, *, sample: int | None, num_workers: int, tell: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return the answer of `data check`; see docs/json.md.

    Args:
        sample: number of samples of each split, drawn at random and without checksums; None for all samples.
        num_workers: loader processes.
        tell: called with (done, of how many) samples.
    """
    config = _refusing(config)
    task = build_task(config)
    problems, splits, digests = _Problems(), {}, {}
    sets: dict[Split, MapDataset] = {}
    for split in SPLITS:
        try:
            sets[split] = build_dataset(config, split, task)
            _read_as_run(config, split, task)
        except (HpcTrainerError, OSError) as error:  # noqa: PERF203
            problems.add(split, Problem(f"data={config.data.name}", str(error)))
    total = sum(len(_rows(dataset, sample)) for dataset in sets.values())
    done = 0
    for split, dataset in sets.items():
        if sample is None:
            for problem in _of_files(dataset):
                problems.add(split, problem)
        rows, seen = _rows(dataset, sample), _Looked(dataset, split, task.takes_pairs, task.needs_classes)
        of_split = []
        for looked in _load(seen, rows, num_workers):
            for problem in looked.problems:
                problems.add(split, problem)
            of_split.append(looked.digests)
            done += looked.count
            tell(done, total)
        digests[split] = np.concatenate(of_split) if of_split else np.empty((0, 2), dtype=np.uint64)
        splits[split] = {"samples": None if _is_stream(dataset) else len(dataset), "read": len(rows)}
    return {"splits": splits, **problems.to_json(), "duplicates": _duplicates(digests)}


def _read_as_run(config: TrainConfig, split: Split, task: Task) -> None:
    """Read a batch as the run does, with the changes of features to samples. Errors of samples are reported elsewhere.

    Raises:
        HpcTrainerError: a feature cannot take these data.
    """
    dataset = build_dataset(config, split, task, abilities(config))
    changing = by_epoch(dataset) if split == "train" and not _is_stream(dataset) else None
    if changing is not None:
        try:
            changing.training_batch([(0, row) for row in range(min(_BATCH, len(dataset)))], config.seed)
        except ConfigError:
            raise
        except Exception:  # an error of one sample: the check of each sample finds it
            return


def _refusing(config: TrainConfig) -> TrainConfig:
    """Return the configuration with `data.on_broken=refuse`: a broken sample that is replaced would not be noticed."""
    kinds = {field.name: type(getattr(config.data, field.name)) for field in dataclasses.fields(config.data)}
    if "on_broken" not in kinds:
        return config
    data = dataclasses.replace(config.data, on_broken=kinds["on_broken"]("refuse"))  # type: ignore[call-arg]
    return dataclasses.replace(config, data=data)


def _of_files(dataset: MapDataset) -> Iterator[Problem]:
    problems = getattr(dataset, "problems", None)
    return iter(problems()) if callable(problems) else iter(())


def _is_stream(dataset: MapDataset) -> bool:
    return getattr(dataset, "stream", None) is not None


def _rows(dataset: MapDataset, sample: int | None) -> Sequence[int]:
    """Return the indices of the samples to read; none for a stream, which has no indices."""
    if _is_stream(dataset):
        return ()
    if sample is None or sample >= len(dataset):
        return range(len(dataset))
    return sorted(np.random.default_rng(0).choice(len(dataset), sample, replace=False).tolist())


class _Problems:
    """First 1,000 problems, and the number of all problems."""

    def __init__(self) -> None:
        self._kept: list[dict[str, Any]] = []
        self._count = 0

    def add(self, split: str, problem: Problem) -> None:
        self._count += 1
        if len(self._kept) < _KEPT:
            self._kept.append({"split": split, **dataclasses.asdict(problem)})

    def to_json(self) -> dict[str, Any]:
        return {"num_problems": self._count, "problems": self._kept}


@dataclasses.dataclass(slots=True, kw_only=True)
class _Batch:
    """Findings on some samples. `digests`: uint64 [.., 2], (index, hash of inputs) of the samples that were read."""

    count: int
    problems: list[Problem]
    digests: NDArray[np.uint64]


class _Looked:
    """Data set for torch's DataLoader that returns the problems of samples instead of the samples."""

    def __init__(self, dataset: MapDataset, split: str, takes_pairs: bool, needs_classes: bool) -> None:
        self._dataset, self._split = dataset, split
        self._takes_pairs, self._needs_classes = takes_pairs, needs_classes

    def __getitems__(self, rows: Sequence[int]) -> _Batch:
        problems: list[Problem] = []
        digests: list[tuple[int, int]] = []
        try:
            batches = [(list(rows), self._dataset.__getitems__(rows))]
        except Exception:  # an error of one sample: reading one by one finds it
            batches = []
            for row in rows:
                try:
                    batches.append(([row], self._dataset.__getitems__([row])))
                except Exception as error:  # noqa: PERF203
                    problems.append(self._problem(row, error if isinstance(error, HpcTrainerError) else _named(error)))
        for numbers, batch in batches:
            if self._takes_pairs:
                problems += self._of_pair(numbers, *batch)
                digests += [(row, _digest(sample)) for row, sample in zip(numbers, batch[0], strict=True)]
        return _Batch(count=len(rows), problems=problems, digests=np.array(digests, dtype=np.uint64).reshape(-1, 2))

    def _problem(self, row: int, cause: object) -> Problem:
        return Problem(f"{self._split} sample {row}", str(cause))

    def _of_pair(self, rows: Sequence[int], inputs: Tensor, targets: Tensor) -> Iterator[Problem]:
        shape = self._dataset.input_shape
        if shape is not None and tuple(inputs.shape[1:]) != tuple(shape):
            yield self._problem(
                rows[0], f"its inputs are {list(inputs.shape[1:])}, and the data set says {list(shape)}"
            )
        for name, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.is_floating_point():
                yield from self._not_finite(rows, name, tensor)
        classes = self._dataset.num_classes
        if self._needs_classes and classes is not None and not targets.is_floating_point():
            wrong = ((targets < 0) & (targets != _PADDING)) | (targets >= classes)
            for place in wrong.reshape(len(rows), -1).any(dim=1).nonzero().flatten().tolist():
                value = targets[place][wrong[place]].flatten()[0].item()
                yield self._problem(rows[place], f"its label {value} must be 0 to {classes - 1}")

    def _not_finite(self, rows: Sequence[int], name: str, values: Tensor) -> Iterator[Problem]:
        wrong = ~torch.isfinite(values.reshape(len(rows), -1))
        for place in wrong.any(dim=1).nonzero().flatten().tolist():
            columns = wrong[place].nonzero().flatten().tolist()
            shown = ", ".join(map(str, columns[:8])) + (" .." if len(columns) > 8 else "")
            where = f"in column {shown}" if values.ndim == 2 else f"{len(columns)} of {wrong.shape[1]}"
            yield self._problem(rows[place], f"its {name} hold NaN or infinity ({where})")


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _digest(inputs: Tensor) -> int:
    data = inputs.contiguous().view(torch.uint8).numpy() if inputs.ndim else inputs.reshape(1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(data.tobytes(), digest_size=8).digest(), "little")


def _load(looked: _Looked, rows: Sequence[int], num_workers: int) -> Iterator[_Batch]:
    cuts = BatchSampler(rows, _BATCH, drop_last=False)
    source: Any = looked
    loader = DataLoader(source, batch_sampler=cuts, num_workers=min(num_workers, len(cuts)), collate_fn=_as_it_is)
    return iter(loader)


def _as_it_is(batch: Any) -> Any:
    return batch


def _duplicates(digests: dict[Split, NDArray[np.uint64]]) -> dict[str, Any]:
    """Return the number of eval samples whose inputs are in train too, bit for bit, and the first few pairs."""
    if len(digests) < len(SPLITS):
        return {"num": 0, "pairs": []}
    train, evaluated = (digests[split] for split in SPLITS)
    both = np.isin(evaluated[:, 1], train[:, 1])
    few = evaluated[both][:_DUPLICATES_SHOWN]
    first = {value: row for row, value in train[np.isin(train[:, 1], few[:, 1])][::-1].tolist()}
    pairs = [[first[value], row] for row, value in few.tolist()]
    return {"num": int(both.sum()), "pairs": pairs}


if __name__ == "__main__":
    answer({
        "check": lambda asked, tell: check(from_plain(asked.pop("config")), tell=tell, **asked),
        "bench": lambda asked, tell: bench(from_plain(asked.pop("config")), tell=tell, **asked),
    })  # fmt: skip
