"""Samples a second of `data=tokens` and `arrays` beside torch's own DataLoader over a plain memory-mapped data set.

Both read the same files, shuffle, and hand out the same batches of tensors; with 0 and 2 loader processes, in turn, in
one process. Then what 10 million samples take from nothing to the first batch, in a process of its own.

    python -m tests.benchmarks.records
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from hpc_trainer.config.schema.task import TaskConfig
from hpc_trainer.data.arrays import ArraysConfig
from hpc_trainer.data.arrays import dataset as arrays
from hpc_trainer.data.tokens import TokensConfig
from hpc_trainer.data.tokens import dataset as tokens
from hpc_trainer.data.tokens.files import write_tokens
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import BatchOrder

ROUNDS, BATCH, NUM_BATCHES = 7, 64, 120
SEQ_LEN, NUM_TOKENS = 256, 20_000_000
ROWS, SHAPE = 60_000, (1, 28, 28)
MANY = 10_000_000


class PlainTokens(Dataset):  # type: ignore[type-arg]
    """A window for each index, as one writes it by hand."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.tokens[index * SEQ_LEN : index * SEQ_LEN + SEQ_LEN + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


class PlainArrays(Dataset):  # type: ignore[type-arg]
    def __init__(self, folder: Path) -> None:
        self.inputs = np.load(folder / "inputs.npy", mmap_mode="r")
        self.targets = np.load(folder / "targets.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.inputs[index].copy()), int(self.targets[index])


def _token_file(folder: Path, count: int) -> Path:
    draws = np.random.default_rng(0)
    documents = (draws.integers(0, 50_000, size=1_000_000, dtype=np.uint16) for _ in range(count // 1_000_000))
    write_tokens(folder, documents, vocab_size=50_257)
    return folder


def _array_files(folder: Path, rows: int, shape: tuple[int, ...]) -> Path:
    folder.mkdir()
    inputs = np.lib.format.open_memmap(folder / "inputs.npy", mode="w+", dtype=np.float32, shape=(rows, *shape))
    for start in range(0, rows, 100_000):
        inputs[start : start + 100_000] = np.random.default_rng(start).random((min(100_000, rows - start), *shape))
    inputs.flush()
    np.save(folder / "targets.npy", np.arange(rows) % 10)
    return folder


def _ours(data: Any, workers: int) -> Iterator[Any]:
    order = BatchOrder(len(data), BATCH, 0)
    with train_batches(
        data, order, first_step=0, num_steps=NUM_BATCHES + 20, rank=0, world_size=1, micro_batch_size=BATCH,
        grad_accum_steps=1, num_workers=workers,
    ) as batches:  # fmt: skip
        yield from batches


def _torchs(data: Any, workers: int) -> Iterator[Any]:
    yield from DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, drop_last=True)


def _rate(batches: Iterator[Any]) -> float:
    """Samples a second after the first batches: the start of loader processes is the same for both."""
    for _ in range(10):
        next(batches)
    begin = time.perf_counter()
    for _ in range(NUM_BATCHES):
        next(batches)
    rate = NUM_BATCHES * BATCH / (time.perf_counter() - begin)
    batches.close()  # type: ignore[attr-defined]
    return rate


def _compare(name: str, ours: Any, plain: Any) -> None:
    for workers in (0, 2):
        ways: dict[str, Callable[[], Iterator[Any]]] = {
            "ours": lambda w=workers: _ours(ours, w),  # type: ignore[misc]
            "torch": lambda w=workers: _torchs(plain, w),  # type: ignore[misc]
        }
        rates: dict[str, list[float]] = {each: [] for each in ways}
        for turn in range(ROUNDS):
            for each in list(ways)[:: 1 if turn % 2 else -1]:
                rates[each].append(_rate(ways[each]()))
        ratios = sorted(one / other for one, other in zip(rates["ours"], rates["torch"], strict=True))
        middle = {each: f"{statistics.median(found):,.0f}" for each, found in rates.items()}
        print(
            f"| {name} | {workers} | {middle['ours']} | {middle['torch']} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {ROUNDS} |"
        )


def _watched(action: Callable[[], Any]) -> tuple[float, float, float, float]:
    """Seconds by the clock and of a core; and what `action` adds at its peak in MiB, without and with mapped files."""
    process, done = psutil.Process(), threading.Event()
    before = process.memory_info()
    peak = [before.rss - before.shared, before.rss]

    def watch() -> None:
        while not done.wait(0.002):
            found = process.memory_info()
            peak[0], peak[1] = max(peak[0], found.rss - found.shared), max(peak[1], found.rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin, begin_core = time.perf_counter(), time.process_time()
    action()
    seconds, core = time.perf_counter() - begin, time.process_time() - begin_core
    done.set()
    watcher.join()
    return seconds, core, (peak[0] - before.rss + before.shared) / 2**20, (peak[1] - before.rss) / 2**20


def _start(kind: str, path: str) -> None:
    """Prints what it takes to open 10 million samples, and to have the first batch of a shuffled epoch."""
    made: list[Any] = []

    def build() -> None:
        if kind == "tokens":
            made.append(tokens.build(TokensConfig(path=path, seq_len=8, eval_fraction=0.001), "train"))
        else:
            made.append(arrays.build(ArraysConfig(path=path), "train", TaskConfig()))

    opened = _watched(build)
    first = _watched(lambda: next(_ours(made[0], 0)))
    print(json.dumps({"samples": len(made[0]), "open": opened, "first": first}))


def run() -> None:
    print("\n## Samples a second from memory-mapped files\n")
    print("| data | loader processes | ours | torch's DataLoader | ratio, median (range) of pairs | n |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = _token_file(folder / "tokens", NUM_TOKENS)
        data = tokens.build(TokensConfig(path=str(path), seq_len=SEQ_LEN), "train")
        _compare(f"tokens, windows of {SEQ_LEN}", data, PlainTokens(path / "tokens.bin"))
        path = _array_files(folder / "arrays", ROWS, SHAPE)
        rows = arrays.build(ArraysConfig(path=str(path)), "train", TaskConfig())
        _compare(f"arrays, float32 {list(SHAPE)}", rows, PlainArrays(path))
        print("\n10 million samples, a new process each; MiB that it adds (in brackets with mapped files):\n")
        print("| data | samples | open | first shuffled batch after that |")
        print("|---|---|---|---|")
        places = (_token_file(folder / "many", MANY * 8), _array_files(folder / "rows", MANY, (4,)))
        for kind, place in zip(("tokens", "arrays"), places, strict=True):
            words = [sys.executable, "-m", "tests.benchmarks.records", kind, str(place)]
            found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
            cells = [
                "{:.2f} s ({:.2f} s of a core), {:.0f} MiB ({:.0f})".format(*found[each]) for each in ("open", "first")
            ]
            print(f"| {kind} | {found['samples']:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _start(sys.argv[1], sys.argv[2])
    else:
        run()
