"""GPT-2 124M and ResNet-50 on one GPU: a run of ours beside a hand-written twin, and beside what the device could do.

    python -m tests.benchmarks.gpu [--small] [--only gpt|resnet] [--rounds 3] [--steps 250] [KEY=VALUE]...

Each round is a run by the worker, as `hpc-trainer train` starts it, and its twin (`gpu_child.py`): new processes, the
same frozen configuration, weights, samples and kernels, a line of metrics every 50 steps; in the next round the other
one goes first. A window lies between two lines, when the loss has been read from the device; the first two, with
compilation and warm-up, do not count. No checkpoint is written before the end. `--small` is the same with tiny models
on the CPU, to see that it works; it compiles only with `--compile`. Overrides are for both loops; the twin knows model,
data, batch, optimizer, clipping, `train.channels_last` and `train.compile`, and takes no notice of other keys.
`--cache FOLDER` keeps there what was compiled, for later calls: the numbers are the same, and come a minute sooner.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hpc_trainer import __version__
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import append_specs
from tests.benchmarks.resume import work

RATIO_BUDGET = 0.99
_NEVER = 1_000_000  # asked in each step whether to save, and told no
_COLD_LINES = 2
_SAME_LOSS = 0.05  # of the loss: same weights and samples, but compiled as other graphs
_PRODUCT_SIZE, _SMALL_PRODUCT_SIZE = 8192, 512


@dataclass(frozen=True, slots=True)
class Experiment:
    """One of `conf/experiment/`; `budget`: units a second on one H200. `small`: what makes it run on a CPU."""

    name: str
    unit: str
    budget: float
    small: tuple[str, ...]


EXPERIMENTS = {
    "gpt": Experiment(
        "gpt2_124m", "tokens", 480_000,
        ("model.num_layers=2", "model.num_heads=2", "model.embed_dim=32", "data.seq_len=32", "data.vocab_size=250",
         "data.num_eval=8", "train.global_batch_size=8"),
    ),
    "resnet": Experiment(
        "resnet50_synthetic", "images", 4_500,
        ("model.width=8", "data.image_size=32", "data.num_classes=10", "data.num_samples=64", "data.num_eval=8",
         "train.global_batch_size=8"),
    ),
}  # fmt: skip


@dataclass(slots=True)
class Measured:
    """Units a second: the median of each round, and every window; by whom. TFLOP/s of the product, a round each."""

    rounds: dict[str, list[float]] = field(default_factory=lambda: {"hpc_trainer": [], "by hand": []})
    windows: dict[str, list[float]] = field(default_factory=lambda: {"hpc_trainer": [], "by hand": []})
    product: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Share of a window in which ours waited for data."""
    peak_gb: float = 0.0
    losses: tuple[float, float] = (0.0, 0.0)

    @property
    def ratios(self) -> list[float]:
        """Ours over the twin, round by round."""
        return [ours / twin for ours, twin in zip(self.rounds["hpc_trainer"], self.rounds["by hand"], strict=True)]


def _overrides(experiment: Experiment, options: argparse.Namespace, folder: Path) -> list[str]:
    every = 10 if options.small else 50
    steps = -(-options.steps // every) * every + _COLD_LINES * every
    words = [
        f"experiment={experiment.name}", "cluster=local", f"paths.runs_dir='{folder}'", "snapshot=off",
        f"train.num_steps={steps}", f"monitor.log_every_steps={every}", f"checkpoint.every_steps={_NEVER}",
        f"schedule.warmup_steps={every}", f"seed={','.join(map(str, range(options.rounds)))}",
        f"train.compile={str(options.compile).lower()}",
    ]  # fmt: skip
    words += ("hardware=cpu_x1", *experiment.small) if options.small else ("hardware=gpu_x1",)
    return [*words, *options.overrides]


def measure(experiment: Experiment, options: argparse.Namespace) -> tuple[Measured, dict[str, Any], dict[str, Any]]:
    """All rounds of one experiment; with the facts of its model, and of the device."""
    found = Measured()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        grid = freeze_grid(_overrides(experiment, options, folder))
        grid.sweep.folder.mkdir(mode=0o700)
        append_specs(grid.sweep, grid.specs)
        per_sample = grid.specs[0].config["data"]["seq_len"] if experiment.unit == "tokens" else 1
        per_step = grid.specs[0].config["train"]["global_batch_size"] * per_sample
        device: dict[str, Any] = {}
        for number, spec in enumerate(grid.specs):
            device = _ask("product", *(("cpu", _SMALL_PRODUCT_SIZE) if options.small else ("cuda", _PRODUCT_SIZE)))
            found.product.append(device["tflops"])
            loops = {"hpc_trainer": _ours, "by hand": _twin}
            lines: dict[str, list[dict[str, float]]] = {}
            for who in reversed(loops) if number % 2 else loops:
                lines[who] = loops[who](grid.sweep, spec.run_id, options.cache)
                windows = rates(lines[who], per_step)
                found.windows[who] += windows
                found.rounds[who].append(statistics.median(windows))
            found.waits += [line["data_wait_share"] for line in lines["hpc_trainer"][_COLD_LINES:] if "loss" in line]
            found.losses = _losses(experiment, lines["hpc_trainer"], lines["by hand"])
            run = grid.sweep.run(spec.run_id)
            found.peak_gb = max(found.peak_gb, json.loads(run.memory.read_text())["peak"] / 1e9)
            shutil.rmtree(run.folder)
        facts = _ask("facts", grid.sweep.folder, grid.specs[0].run_id) | {"per_sample": per_sample}
    return found, facts, device


def rates(lines: Sequence[dict[str, float]], per_step: int) -> list[float]:
    """Units a second of each window between two lines of metrics, without the cold ones.

    Args:
        lines: of a training, each with `step` and `time` (seconds since the epoch); without `loss` they do not count.
        per_step: units of a step.
    """
    warm = [line for line in lines if "loss" in line][_COLD_LINES - 1 :]
    return [
        (end["step"] - begin["step"]) * per_step / (end["time"] - begin["time"])
        for begin, end in itertools.pairwise(warm)
    ]


def _caches(folder: Path) -> dict[str, str]:
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {key: str(folder / name) for key, name in names.items()}


def _ours(sweep: SweepPaths, run_id: str, cache: Path | None) -> list[dict[str, float]]:
    run = sweep.run(run_id)
    try:
        work(sweep.folder, run_id, env={} if cache is None else _caches(cache / "ours"))
    except subprocess.CalledProcessError as error:
        print(error.stderr.decode(), *(path.read_text()[-4000:] for path in run.logs.glob("*.log")), file=sys.stderr)
        raise SystemExit(f"the run failed with exit code {error.returncode}") from error
    return _read(run.metrics)


def _twin(sweep: SweepPaths, run_id: str, cache: Path | None) -> list[dict[str, float]]:
    lines = sweep.folder / "twin.jsonl"
    # A cache of its own, that its later rounds load, as ours has the sweep's.
    folder = sweep.folder / "twin_cache" if cache is None else cache / "twin"
    _child("twin", sweep.folder, run_id, lines, env={**os.environ, **_caches(folder)})
    return _read(lines)


def _read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _losses(
    experiment: Experiment, ours: Sequence[dict[str, float]], twin: Sequence[dict[str, float]]
) -> tuple[float, float]:
    """The last loss of each; whose differ have not trained the same."""
    last = [line["loss"] for line in ours if "loss" in line][-1]
    if abs(last - twin[-1]["loss"]) > _SAME_LOSS * abs(last):
        raise SystemExit(f"{experiment.name}: a loss of {last:g} and of {twin[-1]['loss']:g}: not the same training")
    return last, twin[-1]["loss"]


def _ask(*words: object) -> dict[str, Any]:
    return json.loads(_child(*words).splitlines()[-1])  # type: ignore[no-any-return]


def _child(*words: object, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "tests.benchmarks.gpu_child", *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _table(experiment: Experiment, found: Measured, facts: dict[str, Any], device: dict[str, Any]) -> None:
    product = statistics.median(found.product) * 1e12
    for who, values in found.rounds.items():
        middle = statistics.median(values)
        flops = middle / facts["per_sample"] * facts["flops"]
        of_peak = f"{flops / facts['peak']:.1%}" if facts["peak"] else "-"
        windows, is_ours = found.windows[who], who == "hpc_trainer"
        ratios = found.ratios
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if is_ours else "1"
        budget = f"{experiment.budget:,} {experiment.unit}/s; ratio {RATIO_BUDGET}" if is_ours else ""
        print(
            f"| {experiment.name}, {who} | {_figure(middle)} {experiment.unit}/s ({_figure(min(windows))} to "
            f"{_figure(max(windows))}) | {len(values)} x {len(windows) // len(values)} | {ratio} | "
            f"{of_peak} | {flops / product:.1%} | {budget} |"
        )


def _notes(experiment: Experiment, found: Measured, facts: dict[str, Any]) -> str:
    return (
        f"- {experiment.name}: {facts['num_weights']:,} weights, {facts['flops'] / 1e9:.4g} GFLOP a sample of "
        f"{facts['per_sample']} {experiment.unit}; ours waited for data {statistics.median(found.waits):.1%} of the "
        f"time, its memory peaked at {found.peak_gb:.3g} GB; loss after the last step {found.losses[0]:.4f}, by hand "
        f"{found.losses[1]:.4f}"
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def run(options: argparse.Namespace) -> None:
    """Prints a table in Markdown, with what it takes to measure it again."""
    load = psutil.getloadavg()[0]
    wanted = [EXPERIMENTS[options.only]] if options.only else list(EXPERIMENTS.values())
    all_found = [(each, *measure(each, options)) for each in wanted]
    print("| what | median (range of windows) | n | ratio | MFU, datasheet | of the product | budget on an H200 |")
    print("|---|---|---|---|---|---|---|")
    for experiment, found, facts, device in all_found:
        _table(experiment, found, facts, device)
    products = [tflops for _, found, _, _ in all_found for tflops in found.product]
    size, (_, _, facts, device) = _SMALL_PRODUCT_SIZE if options.small else _PRODUCT_SIZE, all_found[-1]
    sheet = f"; datasheet {facts['peak'] / 1e12:.4g}" if facts["peak"] else ""
    print(f"\n- product {size} x {size} x {size} in bf16: {statistics.median(products):.4g} TFLOP/s "
          f"({min(products):.4g} to {max(products):.4g}), n={len(products)}{sheet}")  # fmt: skip
    print(*(_notes(experiment, found, facts) for experiment, found, facts, _ in all_found), sep="\n")
    print(
        f"- {device['device']}, hpc_trainer {__version__}, torch {device['torch']}, CUDA {device['cuda']}, cuDNN "
        f"{device['cudnn']}, Python {platform.python_version()}, {psutil.cpu_count()} CPUs, load {load:.1f} before; "
        f"compiled: {'yes' if options.compile else 'no'}\n- `python -m tests.benchmarks.gpu {' '.join(sys.argv[1:])}`"
    )


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what is not given is filled in."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="tried instead of what the experiment has")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU: does it work?")
    parser.add_argument("--only", choices=sorted(EXPERIMENTS), help="one of the two")
    parser.add_argument("--rounds", type=int, default=3, help="of each loop, at least 1 (3)")
    parser.add_argument("--steps", type=int, help="measured in each round, at least 1 (250; small: 30)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (small: not)")
    parser.add_argument("--cache", type=lambda path: Path(path).absolute(), help="keep there what was compiled")
    options = parser.parse_args(words)
    options.steps = options.steps if options.steps is not None else 30 if options.small else 250
    options.compile = not options.small if options.compile is None else options.compile
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return options


if __name__ == "__main__":
    run(read_options())
