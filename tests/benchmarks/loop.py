"""What the loop costs over a hand-written one that does the same work, beside Fabric, Accelerate and Lightning.

The same model, data, optimizer, number format and clipping for all, a line of metrics every 50 steps; the rivals as
their own documentation shows it, from the environment of `make bench` (whoever is not installed is left out). Each
gives the seconds of its windows of 50 steps, one line of metrics in each; all in turn, round by round, in one process.

What the shared loop adds is some 1 % of a step, and a busy machine's rounds differ by 10 %. So it and the hand-written
one also run side by side, in two threads that take turns window by window: the two windows of a pair are 0.1 s apart,
and processor time is compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import itertools
import logging
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training import loop as training_loop
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.optim.build import build_optimizer
from tests.benchmarks.by_hand import log_line, train_by_hand

WINDOW, WINDOWS = 50, 12
STEPS = WINDOW * WINDOWS
ROUNDS = 11
PAIRS = 200  # of windows in turn
SAVE_EVERY = 1_000_000  # asked for in each step, never due


def make_config(num_steps: int = STEPS) -> TrainConfig:
    """The same training for all."""
    with Composer() as composer:
        config = composer.compose(
            ["cluster=local", "experiment=digits", "model=mlp", "model.hidden_dim=64", "precision=bf16",
             f"train.num_steps={num_steps}", "train.eval_every_steps=0", f"checkpoint.every_steps={SAVE_EVERY}",
             f"monitor.log_every_steps={WINDOW}"]
        )  # fmt: skip
    validate(config)
    return config


class Stamps:
    """The time at each step of a loop."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def step(self) -> None:
        """Says that a step begins."""
        self._times.append(time.perf_counter())

    def per_step(self) -> float:
        """Seconds a step in the window at the lower quarter: others on the machine only ever add. Without the first."""
        windows = itertools.pairwise(self._times[WINDOW::WINDOW])
        return statistics.quantiles([(end - begin) / WINDOW for begin, end in windows])[0]


class Turns(Stamps):
    """Those of a loop that waits, before each window, until the other loop has done one."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore) -> None:
        super().__init__()
        self._mine, self._other = mine, other
        self._count, self._begin = 0, 0.0
        self.windows: list[float] = []

    def step(self) -> None:
        """Says that a step begins; waits before the first one of a window."""
        if self._count % WINDOW == 0:
            if self._count:
                self.windows.append(time.thread_time() - self._begin)
            self._other.release()
            self._mine.acquire()
            self._begin = time.thread_time()
        self._count += 1


def in_turn(config: TrainConfig) -> list[tuple[float, float]]:
    """Processor seconds a step of the shared loop and of the one by hand, a pair for each window but the first two."""
    # One heap for both threads: glibc gives each its own, and they are not equally fast (mallopt(3): M_ARENA_MAX).
    ctypes.CDLL(None).mallopt(-8, 1)
    first, second = threading.Semaphore(0), threading.Semaphore(1)
    ours, by_hand = Turns(first, second), Turns(second, first)

    def in_turn_with_other() -> None:
        torch.set_num_threads(1)
        shared_loop(config, ours)
        second.release(PAIRS)  # whoever comes last waits for nobody

    thread = threading.Thread(target=in_turn_with_other)
    thread.start()
    _by_hand(config, by_hand)  # in the main thread: it handles a signal
    first.release(PAIRS)
    thread.join()
    pairs = zip(ours.windows, by_hand.windows, strict=True)
    return [(mine / WINDOW, theirs / WINDOW) for mine, theirs in pairs][2:]


def _report_in_turn() -> None:
    pairs = in_turn(make_config(WINDOW * PAIRS))
    added = [1e6 * (mine - theirs) for mine, theirs in pairs]
    low, middle, high = statistics.quantiles(added, n=4)
    # Of a median: 1.25 standard deviations of a mean, and half the middle half is 0.67 of one.
    error = 1.25 * (high - low) / 2 / 0.67 / len(added) ** 0.5
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    print(f"\nin turn, window by window ({WINDOW} steps each, n={len(added)} pairs)")
    print(f"by hand      {1e6 * statistics.median(theirs for _, theirs in pairs):5.0f} µs a step")
    print(
        f"hpc_trainer  ratio {ratio:.3f}, added: median {middle:.0f} µs ± {error:.0f}, middle half {low:.0f} to "
        f"{high:.0f}; budget 20 µs"
    )


def shared_loop(config: TrainConfig, stamps: Stamps) -> None:
    """The shared loop, with everything that it does."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        paths = RunPaths(Path(name) / "run")
        paths.checkpoints.mkdir(parents=True)
        for folder in (paths.folder, paths.checkpoints):
            folder.chmod(0o700)
        group = RankGroup()
        run = RunContext(
            paths=paths, env=read_rank_env({}), group=group, stop=StopFlag(), attempt=0,
            num_steps=config.train.num_steps,
            store=CheckpointStore(paths.checkpoints, group=group, keep_last=1, attempt=0),
        )  # fmt: skip
        scheduled = training_loop.learning_rate

        def stamped(*args: Any) -> float:
            stamps.step()
            return scheduled(*args)

        training_loop.learning_rate = stamped
        try:
            training_loop.train(config, run)
        finally:
            training_loop.learning_rate = scheduled


def _parts(config: TrainConfig) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Model, optimizer and batches for the others."""
    torch.manual_seed(0)
    dataset = build_dataset(config, "train", build_task(config))
    model = build_model(config, dataset)
    order = BatchOrder(len(dataset), config.train.global_batch_size, config.seed)
    batches = (dataset.__getitems__(order.global_indices(step)) for step in range(config.train.num_steps))  # type: ignore[arg-type]
    return model, build_optimizer(config.optim, model), batches


def _by_hand(config: TrainConfig, stamps: Stamps) -> None:
    model, optimizer, batches = _parts(config)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(inputs), targets)

    with tempfile.TemporaryFile("w") as file:
        train_by_hand(config, loss_of, model, optimizer, batches, torch.device("cpu"), file, on_step=stamps.step)


def _fabric(config: TrainConfig, stamps: Stamps) -> None:
    from lightning.fabric import Fabric  # type: ignore[import-not-found, unused-ignore]

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    bare, plain, batches = _parts(config)
    model, optimizer = fabric.setup(bare, plain)
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w") as file:
        for step in range(STEPS):
            stamps.step()
            inputs, targets = next(batches)
            loss = functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % WINDOW == 0:
                begin = log_line(file, step + 1, loss, norm, WINDOW / (time.perf_counter() - begin))


def _accelerate(config: TrainConfig, stamps: Stamps) -> None:
    from accelerate import Accelerator  # type: ignore[import-not-found, unused-ignore]

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    bare, plain, batches = _parts(config)
    model, optimizer = accelerator.prepare(bare, plain)
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w") as file:
        for step in range(STEPS):
            stamps.step()
            inputs, targets = next(batches)
            with accelerator.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % WINDOW == 0:
                begin = log_line(file, step + 1, loss, norm, WINDOW / (time.perf_counter() - begin))


def _lightning(config: TrainConfig, stamps: Stamps) -> None:
    import lightning  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.loggers import CSVLogger  # type: ignore[import-not-found, unused-ignore]

    bare, plain, batches = _parts(config)
    # Lightning refuses to clip beside a fused optimizer, for the sake of a loss scaler, which bf16 has not.
    plain._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = bare

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            stamps.step()
            loss = functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return plain

    with tempfile.TemporaryDirectory() as name:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_steps=STEPS, precision="bf16-mixed", gradient_clip_val=1.0,
            log_every_n_steps=WINDOW, logger=CSVLogger(name), enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Module(), batches)


def run() -> None:
    """Prints microseconds a step of each, and what each adds to the hand-written loop of the same round."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    _report_in_turn()
    config = make_config()
    loops: dict[str, Callable[[TrainConfig, Stamps], None]] = {"by hand": _by_hand, "hpc_trainer": shared_loop}
    rivals = [("Fabric", "lightning", _fabric), ("Accelerate", "accelerate", _accelerate)]
    for name, module, loop in [*rivals, ("Lightning", "lightning", _lightning)]:
        if importlib.util.find_spec(module) is None:
            print(f"\n{name} is not installed here; `make bench` has it")
        else:
            loops[name] = loop
    figures: dict[str, list[float]] = {name: [] for name in loops}
    logging.disable(logging.WARNING)
    for number in range(ROUNDS + 1):
        for name, loop in loops.items():
            stamps = Stamps()
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                loop(config, stamps)
            if number:  # the first round warms up
                figures[name].append(1e6 * stamps.per_step())
    logging.disable(logging.NOTSET)
    print(f"\ntraining loop (mlp 64-64-64-10, batch 64, bf16, AdamW, clipping; {STEPS} steps, n={ROUNDS} rounds)")
    hand = figures.pop("by hand")
    print(f"by hand      {statistics.median(hand):5.0f} µs a step ({min(hand):.0f}-{max(hand):.0f})")
    for name, mine in figures.items():
        low, middle, high = statistics.quantiles([own - base for own, base in zip(mine, hand, strict=True)], n=4)
        ratio = statistics.median(own / base for own, base in zip(mine, hand, strict=True))
        budget = "; budget 20 µs" if name == "hpc_trainer" else ""
        print(
            f"{name:12} {statistics.median(mine):5.0f} µs, ratio {ratio:.3f}, added: median {middle:.0f} µs, middle "
            f"half {low:.0f} to {high:.0f}{budget}"
        )


if __name__ == "__main__":
    run()
