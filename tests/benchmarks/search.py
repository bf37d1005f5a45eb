"""ASHA against random search on the digits and on a byte-level GPT, and the time of a draw.

    python -m tests.benchmarks.search [--picture docs/pictures/asha.svg]

All configurations are trained once, by a plain loop in this process, and their score is kept at each rung and at the
end: a promoted run has the bits of one that never paused (tests/integration/grids/test_search.py), so these are the
values that ASHA sees. The search's own functions draw and promote. Time is counted in training steps, on four slots.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import heapq
import math
import pydoc_data
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.config.schema.train import Sampler
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.record.states import RunState
from hpc_trainer.search.folder import Search, Trial
from hpc_trainer.search.next_run import promotable
from hpc_trainer.search.samplers import Told, draw, find_packages
from hpc_trainer.search.space import draw_random
from tests.unit.search.searches import LR, SearchOnDisk
from tests.unit.search.test_samplers import OPTUNA

SEEDS, TRIALS, MOST, SLOTS = 5, 64, 192, 4
STEPS, RUNGS, BATCH, HIDDEN = 256, (16, 64), 32, 64
AXES = (
    "optim.lr=tag(log,interval(1e-5,1))", "optim.weight_decay=tag(log,interval(1e-6,1e-1))",
    "params.width=tag(log,int(interval(4,64)))", "params.dropout=interval(0,0.8)",
)  # fmt: skip


def train_all(
    configs: Sequence[Mapping[str, object]], seed: int, data: tuple[torch.Tensor, ...]
) -> list[dict[int, float]]:
    """Train all configurations beside each other; return step -> accuracy on the held-out fifth, for each of them.

    Each is a network with one hidden layer, trained by AdamW on batches of its own.
    """
    inputs, targets, held_inputs, held_targets = data
    generator = torch.Generator().manual_seed(seed)
    lr, decay, keep = (
        torch.tensor([float(str(config[key])) for config in configs]).view(-1, 1, 1)
        for key in ("optim.lr", "optim.weight_decay", "params.dropout")
    )
    width = torch.tensor([int(str(config["params.width"])) for config in configs]).view(-1, 1, 1)
    units = (torch.arange(HIDDEN).view(1, 1, -1) < width).float()
    count, keep = len(configs), 1.0 - keep
    weights = [
        (torch.randn(count, 64, HIDDEN, generator=generator) / 8).requires_grad_(),
        (torch.randn(count, HIDDEN, 10, generator=generator) / width.sqrt()).requires_grad_(),
    ]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    found: list[dict[int, float]] = [{} for _ in configs]
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(inputs), (count, BATCH), generator=generator)
        hidden = torch.relu(torch.bmm(inputs[batch], weights[0])) * units
        hidden = hidden * (torch.rand(hidden.shape, generator=generator) < keep) / keep
        logits = torch.bmm(hidden, weights[1]).view(-1, 10)
        loss = torch.nn.functional.cross_entropy(logits, targets[batch].view(-1), reduction="sum") / BATCH
        with torch.no_grad():
            for weight, gradient, (first, second) in zip(
                weights, torch.autograd.grad(loss, weights), moments, strict=True
            ):
                first.lerp_(gradient, 0.1)
                second.lerp_(gradient.square(), 0.001)
                update = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
                weight.sub_(lr * (update + decay * weight))
            if step in (*RUNGS, STEPS):
                shown = held_inputs.expand(count, -1, -1)
                answers = torch.bmm(torch.relu(torch.bmm(shown, weights[0])) * units, weights[1]).argmax(2)
                for each, accuracy in zip(found, (answers == held_targets).float().mean(1).tolist(), strict=True):
                    each[step] = accuracy
    return found


@functools.cache
def _text() -> torch.Tensor:
    """Return the bytes of the reference text that ships inside Python."""
    return torch.frombuffer(bytearray(Path(pydoc_data.__path__[0], "topics.py").read_bytes()), dtype=torch.uint8).long()


def train_gpt(config: Mapping[str, object], seed: int, rungs: Sequence[int], steps: int) -> dict[int, float]:
    """Train a GPT of one block on bytes; return step -> minus the loss in nats a byte on the last fifth of the text."""
    window, batch = 32, 8
    text, generator = _text(), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Gpt(GptConfig(num_layers=1, num_heads=2, embed_dim=32, dropout=0.0), input_shape=(window,), num_classes=256)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(float(str(config["params.init"])))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=float(str(config["optim.lr"])), weight_decay=float(str(config["optim.weight_decay"]))
    )
    held = len(text) * 4 // 5
    places = torch.arange(held, len(text) - window - 1, (len(text) - held) // 64)[:64]

    def loss(begins: torch.Tensor) -> torch.Tensor:
        windows = text[begins.view(-1, 1) + torch.arange(window + 1)]
        logits = model(windows[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    found: dict[int, float] = {}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(torch.randint(held - window - 1, (batch,), generator=generator)).backward()
        optimizer.step()
        if step in (*rungs, steps):
            with torch.no_grad():
                value = -loss(places).item()
                found[step] = value if math.isfinite(value) else -math.inf
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Training whose best configuration both searches look for."""

    name: str
    score: str
    steps: int
    rungs: tuple[int, ...]
    axes: tuple[str, ...]
    curves: Callable[[Sequence[Mapping[str, Any]], int], Callable[[int], dict[int, float]]]
    """Returns, for configurations and a seed, a function from a number to step -> score; larger is better."""


def _of_digits(configs: Sequence[Mapping[str, Any]], seed: int) -> Callable[[int], dict[int, float]]:
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train, held = order[360:], order[:360]
    return train_all(configs, seed, (inputs[train], targets[train], inputs[held], targets[held])).__getitem__


def _of_bytes(configs: Sequence[Mapping[str, Any]], seed: int) -> Callable[[int], dict[int, float]]:
    return functools.cache(lambda number: train_gpt(configs[number], seed * MOST + number, BYTES.rungs, BYTES.steps))


DIGITS = Play(name="digits", score="accuracy", steps=STEPS, rungs=RUNGS, axes=AXES, curves=_of_digits)
BYTES = Play(
    name="byte-gpt", score="minus nats a byte", steps=128, rungs=(8, 32), curves=_of_bytes,
    axes=("optim.lr=tag(log,interval(1e-5,1))", "optim.weight_decay=tag(log,interval(1e-6,1))",
          "params.init=tag(log,interval(0.1,10))"),
)  # fmt: skip


def time_to(
    search: Search, play: Play, curve: Callable[[int], dict[int, float]], target: float
) -> list[tuple[int, float]]:
    """Return (steps of all slots, best score so far) at each complete run of ASHA, up to the target."""
    trials: list[Trial] = []
    at_work: list[tuple[int, int]] = []  # end in steps since the begin, trial
    now = spent = 0
    history: list[tuple[int, float]] = []

    def begin(number: int, until: int) -> int:
        reached = max(trials[number].at_rungs, default=0)
        heapq.heappush(at_work, (now + until - reached, number))
        return until - reached

    while True:
        while len(at_work) < SLOTS:
            chosen = promotable(search, trials)
            if chosen is not None:
                trial, until, _ = chosen
                trials[trial.number] = dataclasses.replace(trial, state=RunState.RUNNING, until=until)
                spent += begin(trial.number, until)
            elif len(trials) < MOST:
                number = len(trials)
                trials.append(Trial(number=number, run_id=str(number), params={}, rungs=play.rungs,
                                    state=RunState.RUNNING, until=play.rungs[0]))  # fmt: skip
                spent += begin(number, play.rungs[0])
            else:
                break
        if not at_work:
            raise AssertionError(f"{MOST} trials never reach {target}")
        now, number = heapq.heappop(at_work)
        trial = trials[number]
        until = trial.until or play.steps
        if until == play.steps:
            value = curve(number)[until]
            trials[number] = dataclasses.replace(trial, state=RunState.COMPLETED, value=value)
            best = max([value, *(score for _, score in history)])
            history.append((spent - sum(end - now for end, _ in at_work), best))
            if best >= target:
                return history
        else:
            at_rungs = {**trial.at_rungs, until: curve(number)[until]}
            trials[number] = dataclasses.replace(trial, state=RunState.PAUSED, at_rungs=at_rungs)


def compare(play: Play) -> list[tuple[list[tuple[int, float]], list[tuple[int, float]]]]:
    """Print for each seed the steps of random search and of ASHA until the same score; return both histories."""
    torch.set_num_threads(1)
    whole = TRIALS * play.steps
    print(f"{play.name}: {TRIALS} full runs of random search ({play.steps} steps), and ASHA on {SLOTS} slots "
          f"(rungs {play.rungs}, eta 4):")  # fmt: skip
    print(f"seed  {play.score}  random steps  ASHA steps  share of {whole}", flush=True)
    shares, histories = [], []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            words = ("search=asha", f"search.rungs={list(play.rungs)}".replace(" ", ""), f"search.seed={seed}",
                     f"train.num_steps={play.steps}", "search.metric=score", "train.main=any.main")  # fmt: skip
            search = SearchOnDisk(Path(folder), *words, axes=play.axes, trust=("any",)).search
        curve = play.curves([draw_random(search.space, seed, number) for number in range(MOST)], seed)
        scores = [curve(number)[play.steps] for number in range(TRIALS)]
        by_random = [(play.steps * (number + 1), max(scores[: number + 1])) for number in range(TRIALS)]
        by_asha = time_to(search, play, curve, max(scores))
        first = next(steps for steps, score in by_random if score >= max(scores))
        shares.append(by_asha[-1][0] / whole)
        histories.append((by_random, by_asha))
        print(f"{seed:4}  {max(scores):8.4f}  {first:12}  {by_asha[-1][0]:10}  {shares[-1]:5.2f}", flush=True)
    print(f"median share {statistics.median(shares):.2f}, largest {max(shares):.2f} (aim: at most 0.33)", flush=True)
    return histories


def _cpu() -> float:
    """Return the CPU seconds of this process and of its children that have ended: Optuna draws in a child."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def draws(count: int = 1000) -> None:
    """Print the CPU time of a draw at `count` known trials, without and with reading their files."""
    if OPTUNA.is_dir():
        sys.path.insert(0, str(OPTUNA))
    with tempfile.TemporaryDirectory() as folder:
        disk = SearchOnDisk(
            Path(folder), "search=random", f"search.trials={count + 8}", axes=(LR, "seed=interval(0,9)")
        )
        for number in range(count):
            chosen = disk.next()
            assert chosen is not None
            disk.completes(chosen.spec.run_id, abs(number - 500.0))
        disk.next()
        seconds = []
        for _ in range(7):
            begin = _cpu()
            disk.next()
            seconds.append(_cpu() - begin)
        print(f"next_run, random, {count} trials: median {1e3 * statistics.median(seconds):.1f} ms in a slot at work")
        begin = _cpu()
        fresh = disk.known()
        print(f"first look of a new slot at {len(fresh)} trials: {1e3 * (_cpu() - begin):.0f} ms")
        told = [Told(params=trial.params, value=trial.value) for trial in fresh]
        for sampler in (Sampler.random, Sampler.quasi_random, Sampler.tpe, Sampler.cma_es):
            if find_packages(sampler) is not None:
                print(f"{sampler.value}: {find_packages(sampler)}")
                continue
            seconds = []
            for _ in range(7):
                begin = _cpu()
                draw(disk.search.space, sampler, told, seed=0, is_max=False)
                seconds.append(_cpu() - begin)
            print(f"draw, {sampler.value}: median of 7 {1e3 * statistics.median(seconds):.2f} ms")


_WIDTH, _HEIGHT, _LEFT, _BELOW = 360, 220, 52, 40
_COLOURS = ("#8a8a8a", "#0a5fb4")


def picture(plays: Sequence[tuple[Play, Sequence[tuple[Any, Any]]]]) -> str:
    """Return an SVG: the best complete run so far over steps computed, of random search and ASHA, one line a seed."""
    parts = []
    for place, (play, histories) in enumerate(plays):
        scores = [score for pair in histories for history in pair for _, score in history[3:] if score > -math.inf]
        low, high = min(scores), max(scores)
        most = TRIALS * play.steps
        left = place * _WIDTH + _LEFT

        def x(steps: float, left: int = left, most: int = most) -> float:
            return left + steps / most * (_WIDTH - _LEFT - 12)

        def y(score: float, low: float = low, high: float = high) -> float:
            return 24 + (high - max(score, low)) / (high - low) * (_HEIGHT - 24 - _BELOW)

        parts.append(f'<text x="{left}" y="14">{play.name}: best {play.score}</text>')
        parts += [
            f'<text x="{left - 4}" y="{y(score) + 4:.0f}" text-anchor="end">{score:.2f}</text>' for score in (low, high)
        ]
        for share in (0, 1 / 3, 1):
            at = x(share * most)
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="24" y2="{_HEIGHT - _BELOW}" stroke="#ddd"/>')
            label = {0: "0", 1: f"{most:,} steps"}.get(share, "1/3")
            anchor = "end" if share == 1 else "middle"
            parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BELOW + 16}" text-anchor="{anchor}">{label}</text>')
        for pair in histories:
            for colour, history in zip(_COLOURS, pair, strict=True):
                points = " ".join(
                    f"{x(steps):.1f},{y(score):.1f}" + (f" {x(later):.1f},{y(score):.1f}" if later else "")
                    for (steps, score), (later, _) in zip(history, [*history[1:], (0, 0)], strict=True)
                )
                parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-opacity="0.7"/>')
                steps, score = history[-1]
                parts.append(f'<circle cx="{x(steps):.1f}" cy="{y(score):.1f}" r="2.5" fill="{colour}"/>')
    for place, name in enumerate(("random search", "ASHA")):
        at = _LEFT + place * 160
        parts.append(f'<rect x="{at}" y="{_HEIGHT - 14}" width="10" height="10" fill="{_COLOURS[place]}"/>')
        parts.append(f'<text x="{at + 15}" y="{_HEIGHT - 5}">{name}, {SEEDS} seeds</text>')
    width = _WIDTH * len(plays)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def run() -> None:
    """Print the CPU time of draws, for `make bench`."""
    print("\nA draw of a search, CPU time of the slot and its children\n")
    draws()


def main() -> None:
    """Print all tables, and draw the picture if a file is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--only", choices=[DIGITS.name, BYTES.name, "draws"])
    given = parser.parse_args()
    plays = [play for play in (DIGITS, BYTES) if given.only in (None, play.name)]
    made = [(play, compare(play)) for play in plays]
    if given.picture is not None:
        given.picture.write_text(picture(made))
    if given.only in (None, "draws"):
        draws()


if __name__ == "__main__":
    main()
