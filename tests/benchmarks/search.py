"""ASHA against random search on the digits, and the time of a draw: python -m tests.benchmarks search

All configurations are trained once, by a plain loop in this process, and their accuracy is kept at each rung and at the
end: a promoted run has the bits of one that never paused (tests/integration/grids/test_search.py), so these are the
values that ASHA sees. The search's own functions draw and promote. Time is counted in training steps, on four slots.
"""

from __future__ import annotations

import heapq
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from hpc_trainer.config.schema.train import Sampler
from hpc_trainer.record.states import RunState
from hpc_trainer.search.folder import Search, Trial
from hpc_trainer.search.next_run import promotable
from hpc_trainer.search.samplers import Told, draw, find_packages
from hpc_trainer.search.space import draw_random
from tests.unit.search.searches import LR, SearchOnDisk

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


def time_to(search: Search, curves: list[dict[int, float]], target: float) -> tuple[int, int]:
    """Return the steps of all slots until ASHA has a complete run of the target's accuracy, and the trials drawn."""
    trials: list[Trial] = []
    at_work: list[tuple[int, int]] = []  # end in steps since the begin, trial
    now = spent = 0

    def begin(number: int, until: int) -> int:
        reached = max(trials[number].at_rungs, default=0)
        heapq.heappush(at_work, (now + until - reached, number))
        return until - reached

    while True:
        while len(at_work) < SLOTS:
            chosen = promotable(search, trials)
            if chosen is not None:
                trial, until, _ = chosen
                trials[trial.number] = _changed(trial, state=RunState.RUNNING, until=until)
                spent += begin(trial.number, until)
            elif len(trials) < len(curves):
                number = len(trials)
                trials.append(Trial(number=number, run_id=str(number), params={}, rungs=RUNGS, state=RunState.RUNNING,
                                    until=RUNGS[0]))  # fmt: skip
                spent += begin(number, RUNGS[0])
            else:
                break
        if not at_work:
            raise AssertionError(f"{len(curves)} trials never reach {target}")
        now, number = heapq.heappop(at_work)
        trial = trials[number]
        until = trial.until or STEPS
        if until == STEPS:
            trials[number] = _changed(trial, state=RunState.COMPLETED, value=curves[number][STEPS])
            if curves[number][STEPS] >= target:
                left = sum(end - now for end, _ in at_work)
                return spent - left, len(trials)
        else:
            at_rungs = {**trial.at_rungs, until: curves[number][until]}
            trials[number] = _changed(trial, state=RunState.PAUSED, at_rungs=at_rungs)


def _changed(trial: Trial, **values: object) -> Trial:
    import dataclasses

    return dataclasses.replace(trial, **values)  # type: ignore[arg-type]


def compare() -> None:
    """Print for each seed the steps of random search and of ASHA until the same accuracy."""
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train, held = order[360:], order[:360]
    data = inputs[train], targets[train], inputs[held], targets[held]
    torch.set_num_threads(1)
    print(f"{TRIALS} full runs of random search ({STEPS} steps), and ASHA (rungs {RUNGS}, eta 4) on {SLOTS} slots:")
    print("seed  accuracy  random steps  ASHA steps  share  ASHA trials")
    shares = []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            words = ("search=asha", f"search.rungs={list(RUNGS)}".replace(" ", ""), f"train.num_steps={STEPS}",
                     "search.metric=eval_accuracy", f"search.seed={seed}", "train.main=any.main")  # fmt: skip
            search = SearchOnDisk(Path(folder), *words, axes=AXES, trust=("any",)).search
        curves = train_all([draw_random(search.space, seed, number) for number in range(MOST)], seed, data)
        target = max(found[STEPS] for found in curves[:TRIALS])
        steps, drawn = time_to(search, curves, target)
        shares.append(steps / (TRIALS * STEPS))
        print(f"{seed:4}  {target:8.4f}  {TRIALS * STEPS:12}  {steps:10}  {shares[-1]:5.2f}  {drawn:11}", flush=True)
    print(f"median share {statistics.median(shares):.2f}, largest {max(shares):.2f} (aim: at most 0.33)")


def draws(count: int = 1000) -> None:
    """Print the CPU time of a draw at `count` known trials, without and with reading their files."""
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
            begin = time.process_time()
            disk.next()
            seconds.append(time.process_time() - begin)
        print(f"next_run, random, {count} trials: median {1e3 * statistics.median(seconds):.1f} ms in a slot at work")
        begin = time.process_time()
        fresh = disk.known()
        print(f"first look of a new slot at {len(fresh)} trials: {1e3 * (time.process_time() - begin):.0f} ms")
        told = [Told(params=trial.params, value=trial.value) for trial in fresh]
        for sampler in (Sampler.random, Sampler.quasi_random, Sampler.tpe):
            if find_packages(sampler) is not None:
                print(f"{sampler.value}: {find_packages(sampler)}")
                continue
            seconds = []
            for _ in range(7):
                begin = time.process_time()
                draw(disk.search.space, sampler, told, seed=0, is_max=False)
                seconds.append(time.process_time() - begin)
            print(f"draw, {sampler.value}: median of 7 {1e3 * statistics.median(seconds):.2f} ms")


def main() -> None:
    """Print both tables."""
    compare()
    draws()


if __name__ == "__main__":
    main()
