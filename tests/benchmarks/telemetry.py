"""What sampling beside a training costs: the shared loop with it on and off, window by window in one process.

The windows of a pair follow each other, and every other pair begins with the other one, so that the machine's other
work hits both alike. A window that samples does so as by default, when it begins and each five seconds: twice in six
seconds. Compared are steps by the clock and by the processor time of the whole process, the sampler's thread included.
Besides, the processor time of a sample, in its thread beside the training.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.config.schema.output import MonitorConfig
from hpc_trainer.observe.host_counters import HostCounters
from hpc_trainer.observe.sampler import Sampler
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_env import read_rank_env
from tests.benchmarks import loop

# Ten times as often as by default: then many short pairs tell what few long ones cannot.
WINDOW_S, EVERY_S, PAIRS = 1.0, 0.5, 60
DEFAULT_S = MonitorConfig().telemetry_every_s
_ENOUGH = 10_000_000  # steps; the loop is left before


class Timed(Sampler):
    """Notes the seconds of each of its samples: by the clock, and of the processor."""

    times: list[tuple[float, float]] = []  # noqa: RUF012  (of all windows)

    def sample(self, *args: Any) -> None:
        begin = (time.perf_counter(), time.thread_time())
        super().sample(*args)
        self.times.append((time.perf_counter() - begin[0], time.thread_time() - begin[1]))


class _Over(Exception):  # noqa: N818
    """All windows are there."""


class Switched(loop.Stamps):
    """Turns sampling off, on, on, off, and so on, and notes what a step took in each window."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._count = folder, 0
        self._sampling: contextlib.ExitStack | None = None
        self._begin = (0.0, 0.0)
        self.windows: list[tuple[bool, float, float]] = []
        """Sampled or not, seconds a step by the clock, and of the processor."""

    def step(self) -> None:
        now = (time.perf_counter(), time.process_time())
        if self._count and now[0] - self._begin[0] < WINDOW_S:
            self._count += 1
            return
        if self._count:
            self.windows.append(
                (
                    self._sampling is not None, (now[0] - self._begin[0]) / self._count,
                    (now[1] - self._begin[1]) / self._count,
                )
            )  # fmt: skip
        is_over = len(self.windows) == 2 * PAIRS + 2
        self._switch(is_on=not is_over and len(self.windows) % 4 in (1, 2))
        if is_over:
            raise _Over
        self._begin, self._count = (time.perf_counter(), time.process_time()), 1

    def _switch(self, *, is_on: bool) -> None:
        if self._sampling is not None:
            self._sampling.close()
            self._sampling = None
        if is_on:
            self._sampling = contextlib.ExitStack()
            self._sampling.enter_context(
                Timed(
                    paths=RunPaths(self._folder), env=read_rank_env({}), attempt=0, every_s=EVERY_S, step=lambda: 0,
                    devices=lambda notes: None, host=HostCounters,
                ).sampling()
            )  # fmt: skip


def run() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        (folder / "telemetry").mkdir(parents=True)
        stamps = Switched(folder)
        with contextlib.suppress(_Over):
            loop.shared_loop(loop.make_config(_ENOUGH), stamps)
        lines = len(RunPaths(folder).telemetry_file(0, 0).read_text().splitlines())
    assert lines == len(Timed.times)
    print(f"\ntelemetry: a sample of the host, beside the training, n={len(Timed.times)}:")
    for column, what in ((0, "clock"), (1, "processor time")):
        low, middle, high = (1e3 * each for each in statistics.quantiles((each[column] for each in Timed.times), n=4))
        told = (
            f"{middle:.2f} ms (middle half {low:.2f} to {high:.2f}), {middle / 1e3 / DEFAULT_S:.3%} of {DEFAULT_S:g} s"
        )
        print(f"  {what}: {told}; budget 0.1%")
    found = stamps.windows[2:]  # the first two are of a cold machine
    print(f"on against off, n={PAIRS} pairs of windows of {WINDOW_S:g} s, a sample every {EVERY_S:g} s:")
    for column, what in ((1, "clock"), (2, "processor time of the process")):
        _report(what, [each[column] for each in found if each[0]], [each[column] for each in found if not each[0]])
    print(f"  a step took {1e3 * statistics.median(each[1] for each in found):.2f} ms")


def _report(what: str, on: list[float], off: list[float]) -> None:
    """Both in order: the windows of a pair have the same place."""
    low, middle, high = statistics.quantiles((without / sampled for sampled, without in zip(on, off, strict=True)), n=4)
    error = 1.25 * (high - low) / 2 / 0.67 / len(on) ** 0.5  # of a median, as in loop.py
    told = f"speed ratio {middle:.4f} ± {error:.4f} (middle half {low:.4f} to {high:.4f})"
    print(f"  {what}: {told}; budget 0.99")
