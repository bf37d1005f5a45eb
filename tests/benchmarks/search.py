"""ASHA against random search on the digits, and the time of a draw: python -m tests.benchmarks search

Each configuration is trained once, by a plain loop in this process, and its accuracy is kept at each rung and at the
end: a promoted run has the bits of one that never paused (tests/integration/grids/test_search.py), so these are the
values that ASHA sees. The search's own functions draw and promote. Time is counted in training steps, on four slots.
"""

from __future__ import annotations

import heapq
import statistics
import tempfile
import time
from collections.abc import Mapping
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
STEPS, RUNGS, BATCH = 256, (16, 64), 32
AXES = (
    "optim.lr=tag(log,interval(1e-5,1))", "optim.weight_decay=tag(log,interval(1e-6,1e-1))",
    "params.width=tag(log,int(interval(4,256)))", "params.dropout=interval(0,0.8)",
)  # fmt: skip


def curve(params: Mapping[str, object], seed: int, data: tuple[torch.Tensor, ...]) -> dict[int, float]:
    """Train one configuration on the digits; return step -> accuracy on the held-out fifth at rungs and at the end."""
    inputs, targets, held_inputs, held_targets = data
    torch.manual_seed(seed)
    width = int(str(params["params.width"]))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Dropout(float(str(params["params.dropout"]))),
        torch.nn.Linear(width, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=float(str(params["optim.lr"])), weight_decay=float(str(params["optim.weight_decay"]))
    )
    found = {}
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(inputs), (BATCH,))
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        if step in (*RUNGS, STEPS):
            model.eval()
            with torch.no_grad():
                found[step] = float((model(held_inputs).argmax(1) == held_targets).float().mean())
            model.train()
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
        curves = [curve(draw_random(search.space, seed, number), seed, data) for number in range(MOST)]
        target = max(found[STEPS] for found in curves[:TRIALS])
        steps, drawn = time_to(search, curves, target)
        shares.append(steps / (TRIALS * STEPS))
        print(f"{seed:4}  {target:8.4f}  {TRIALS * STEPS:12}  {steps:10}  {shares[-1]:5.2f}  {drawn:11}", flush=True)
    print(f"median share {statistics.median(shares):.2f}, largest {max(shares):.2f} (aim: at most 0.33)")


def draws(count: int = 1000) -> None:
    """Print the time of a draw at `count` known trials, without and with reading their files."""
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
            begin = time.perf_counter()
            disk.next()
            seconds.append(time.perf_counter() - begin)
        print(f"next_run, random, {count} trials: median {1e3 * statistics.median(seconds):.1f} ms in a slot at work")
        begin = time.perf_counter()
        fresh = disk.known()
        print(f"first look of a new slot at {len(fresh)} trials: {1e3 * (time.perf_counter() - begin):.0f} ms")
        told = [Told(params=trial.params, value=trial.value) for trial in fresh]
        for sampler in (Sampler.random, Sampler.quasi_random, Sampler.tpe):
            if find_packages(sampler) is not None:
                print(f"{sampler.value}: {find_packages(sampler)}")
                continue
            seconds = []
            for _ in range(7):
                begin = time.perf_counter()
                draw(disk.search.space, sampler, told, seed=0, is_max=False)
                seconds.append(time.perf_counter() - begin)
            print(f"draw, {sampler.value}: median of 7 {1e3 * statistics.median(seconds):.2f} ms")


def main() -> None:
    """Print both tables."""
    draws()
    compare()


if __name__ == "__main__":
    main()
