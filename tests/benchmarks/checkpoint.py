"""Saving and loading beside torch.save, safetensors and torch.distributed.checkpoint, and what a save costs training.

`python -m tests.benchmarks.checkpoint [FOLDER] [--small]`: files go to FOLDER (default: here), which should lie on the
disk that counts. All in one run and in turn, because disks are noisy; medians. Everybody waits for the disk: who does
not fsync by himself is followed by an fsync of his file and folder. Loads come from the page cache.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from hpc_trainer.record.files import fsync_folder
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore

Tree = dict[str, dict[str, torch.Tensor]]
# Of one tensor: 16 MiB, a layer of some thousand by thousand.
_TENSOR_BYTES = 1 << 24
_STALL_PAIRS, _DRAINS = 7, 5


def build_state(num_bytes: float) -> Tree:
    """Weights and two moments of each, as AdamW has them; random, so that nothing can be compressed."""
    count = max(1, round(num_bytes / _TENSOR_BYTES / 3))
    return {
        part: {f"layers.{number}.weight": torch.rand(_TENSOR_BYTES // 4) for number in range(count)}
        for part in ("model", "exp_avg", "exp_avg_sq")
    }


def _flat(state: Tree) -> dict[str, torch.Tensor]:
    return {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    fsync_folder(path.parent)


class Ours:
    """As the run does it: copied nowhere, checksums, fsync, rename; and looked through before it is loaded."""

    name = "hpc_trainer"

    def __init__(self, folder: Path) -> None:
        self.store = CheckpointStore(folder / "ours", group=RankGroup(), keep_last=1, attempt=0)
        self.step = 0

    def save(self, state: Tree) -> None:
        self.step += 1
        self.store.save(self.step, replicated=state, per_rank={}, meta={})

    def load(self, state: Tree) -> Any:
        info = self.store.newest_valid()
        assert info is not None
        return self.store.load(info)


class TorchSave:
    name = "torch.save"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.pt"

    def save(self, state: Tree) -> None:
        torch.save(state, self.path)
        _sync(self.path)

    def load(self, state: Tree) -> Any:
        return torch.load(self.path, weights_only=True)


class Safetensors:
    name = "safetensors"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.safetensors"

    def save(self, state: Tree) -> None:
        save_file(_flat(state), self.path)
        _sync(self.path)

    def load(self, state: Tree) -> Any:
        # Its maps are lazy: the bytes are touched, as training will.
        return {name: tensor.clone() for name, tensor in load_file(self.path).items()}


class Dcp:
    """torch.distributed.checkpoint, which syncs its files itself; a fresh folder each time, as it is safe."""

    name = "DCP"

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0

    def save(self, state: Tree) -> None:
        shutil.rmtree(self.folder / f"dcp-{self.step}", ignore_errors=True)
        self.step += 1
        dcp.save(dict(state), checkpoint_id=self.folder / f"dcp-{self.step}", no_dist=True)
        fsync_folder(self.folder)

    def load(self, state: Tree) -> Any:
        into = {part: {name: torch.empty_like(tensor) for name, tensor in each.items()} for part, each in state.items()}
        dcp.load(into, checkpoint_id=self.folder / f"dcp-{self.step}", no_dist=True)
        return into


def _timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def compare(folder: Path, num_bytes: float, rounds: int) -> None:
    """Seconds to save and to load, everybody in turn; ratios to torch.save."""
    state = build_state(num_bytes)
    rivals = [kind(folder) for kind in (Ours, TorchSave, Safetensors, Dcp)]
    figures: dict[str, tuple[list[float], list[float]]] = {rival.name: ([], []) for rival in rivals}
    for number in range(rounds + 1):
        for rival in rivals:
            os.sync()  # nobody pays for what the one before left to write
            saved, loaded = _timed(lambda r=rival: r.save(state)), _timed(lambda r=rival: r.load(state))  # type: ignore[misc]
            if number:  # the first round warms up
                figures[rival.name][0].append(saved)
                figures[rival.name][1].append(loaded)
    base = [statistics.median(column) for column in figures[TorchSave.name]]
    print(f"\n{num_bytes / 1e9:g} GB, n={rounds}: median seconds (range), ratio to torch.save")
    for name, columns in figures.items():
        cells = [
            f"{what} {statistics.median(column):6.3f} ({min(column):.3f}-{max(column):.3f}) "
            f"{statistics.median(column) / reference:5.2f}x"
            for what, column, reference in zip(("save", "load"), columns, base, strict=True)
        ]
        print(f"{name:12} {'   '.join(cells)}")


def stall(folder: Path, num_bytes: float) -> None:
    """How long training stops for a save in the background, and for one that it waits for."""
    state = build_state(num_bytes)
    store = CheckpointStore(folder / "stall", group=RankGroup(), keep_last=1, attempt=0)
    step, pairs = 0, list[tuple[float, float]]()
    for number in range(_STALL_PAIRS + 1):
        os.sync()
        step += 1
        waited = _timed(lambda step=step: store.save(step, replicated=state, per_rank={}, meta={}))  # type: ignore[misc]
        os.sync()
        step += 1
        stood = _timed(
            lambda step=step: store.writer.begin(step, replicated=state, per_rank={}, meta={})  # type: ignore[misc]
        )
        assert store.writer.wait().error is None
        if number:  # the first one gets its host buffer
            pairs.append((stood, waited))
        else:
            print(f"\nstall, {num_bytes / 1e9:g} GB: the first save stands still for {stood:.3f} s: it gets its buffer")
    shares = sorted(stood / waited for stood, waited in pairs)
    stood, waited = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"later ones: {stood:.3f} s, where a save that is waited for takes {waited:.3f} s: median "
        f"{100 * statistics.median(shares):.1f} % ({100 * shares[0]:.1f}-{100 * shares[-1]:.1f}), n={len(pairs)}; "
        "budget 10 %"
    )


def drain(folder: Path, num_bytes: float) -> None:
    """Steps a second of a training in miniature while a save is written, beside those without one."""
    state = build_state(num_bytes)
    store = CheckpointStore(folder / "drain", group=RankGroup(), keep_last=1, attempt=0)
    weight, inputs = torch.rand(512, 512, requires_grad=True), torch.rand(256, 512)

    def step() -> None:
        loss = (inputs @ weight).relu().square().mean()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=1e-3)
            weight.grad = None

    def speed(seconds: float, until: threading.Event | None = None) -> float:
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds and not (until is not None and until.is_set()):
            step()
            count += 1
        return count / (time.perf_counter() - begin)

    most = torch.get_num_threads()
    for num_threads in sorted({1, most}):
        torch.set_num_threads(num_threads)
        speed(1.0)
        lost = []
        for number in range(_DRAINS + 1):
            os.sync()
            before = speed(2.0)
            store.writer.begin(100 * num_threads + number, replicated=state, per_rank={}, meta={})
            writing, is_done = store.writer._thread, threading.Event()
            assert writing is not None

            def watch(writing: Any = writing, is_done: threading.Event = is_done) -> None:
                writing.join()
                is_done.set()

            threading.Thread(target=watch, daemon=True).start()
            during = speed(600.0, is_done)
            assert store.writer.wait().error is None
            os.sync()
            around = (before + speed(2.0)) / 2
            if number:
                lost.append(1 - during / around)
        lost.sort()
        print(
            f"drain, {num_bytes / 1e9:g} GB, training on {num_threads} of {os.cpu_count()} cores: lost "
            f"{100 * statistics.median(lost):.1f} % of its speed meanwhile ({100 * lost[0]:.1f} to "
            f"{100 * lost[-1]:.1f}), n={len(lost)}; budget 2 %"
        )
    torch.set_num_threads(most)


def run(place: Path | None = None, *, is_small: bool = False) -> None:
    """Prints all tables. `is_small`: a tenth of each size, to see whether it works."""
    scale = 0.1 if is_small else 1.0
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    print("\ncheckpoints: everybody in turn, on the disk, in one run")
    with tempfile.TemporaryDirectory(dir=place or Path.cwd(), prefix="bench-checkpoint-") as name:
        for num_bytes, rounds in ((0.5e9, 7), (2e9, 3)):
            with tempfile.TemporaryDirectory(dir=name) as folder:
                compare(Path(folder), scale * num_bytes, rounds)
        stall(Path(name), scale * 1e9)
        drain(Path(name), scale * 1e9)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--small"]
    run(Path(words[0]) if words else None, is_small="--small" in sys.argv)
