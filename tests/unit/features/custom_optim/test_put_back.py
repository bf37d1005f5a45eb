"""Steps of any optimizer that are put back: as if they had not been, whatever kinds of state there are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from hpc_trainer.features.custom_optim import custom_optim as put_back
from hpc_trainer.features.custom_optim.custom_optim import PutBack

Weights = Iterable[nn.Parameter]
BAD, GOOD = True, False


class Odd(torch.optim.Optimizer):
    """Keeps state in all the ways that a person may think of."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, {"lr": 0.1, "count": 0, "seen": []})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["seen"].append(group["count"])
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("mean", torch.zeros_like(weight)).mul_(0.5).add_(weight.grad)
                state["new"] = weight.grad * group["count"]  # another tensor each time
                state["longer"] = torch.cat([state.get("longer", weight.new_zeros(0)), weight.grad.flatten()[:1]])
                state["on_and_off"] = None if state.get("on_and_off") else f"step {group['count']}"
                state["inner"] = {**state.get("inner", {}), "count": group["count"], "mean": state["mean"].mean()}
                state.setdefault("kept", {}).setdefault("sum", torch.zeros(())).add_(weight.grad.sum())
                if group["count"] % 2:
                    state["odd"] = group["count"]
                else:
                    state.pop("odd", None)
                weight.sub_(state["mean"] + 0.01 * state["new"] + sum(group["seen"]), alpha=group["lr"])


class WithList(torch.optim.Optimizer):
    """Has tensors where nobody copies them."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            old = self.state[weight].setdefault("last", [])
            old.append(weight.grad.clone())
            weight.sub_(torch.stack(old).mean(0), alpha=0.1)


def _radam(weights: Weights) -> torch.optim.Optimizer:
    return torch.optim.RAdam(weights, lr=0.1, weight_decay=0.1)


BUILDS: dict[str, Callable[[Weights], torch.optim.Optimizer]] = {
    "radam": _radam,
    "nadam": torch.optim.NAdam,
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1, amsgrad=True, foreach=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr_decay=0.1),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, centered=True, momentum=0.5),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "adafactor": torch.optim.Adafactor,
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
    "odd": Odd,
    "list": WithList,
}


def _weights() -> list[nn.Parameter]:
    torch.manual_seed(1)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return [nn.Parameter(each) for each in (torch.randn(4, 5), torch.randn(7), image)]


def _give_gradients(weights: Weights, seed: int, *, bad: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.empty_like(weight).copy_(torch.randn(weight.shape, generator=generator))
        if bad:
            weight.grad[(0,) * weight.ndim] = float("nan") if seed % 2 else float("inf")


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(_same(value, theirs[key]) for key, value in mine.items())
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    return bool(mine == theirs)


@pytest.mark.parametrize("bads", [(BAD, GOOD, BAD, BAD, GOOD, GOOD), (GOOD, BAD, GOOD, BAD), (BAD, BAD, GOOD)])
@pytest.mark.parametrize("looks", [True, False], ids=["saved after each", "saved at the end"])
@pytest.mark.parametrize("name", BUILDS)
def test_a_bad_step_is_as_if_it_had_not_been(name: str, bads: tuple[bool, ...], looks: bool) -> None:
    mine, theirs = _weights(), _weights()
    optimizer, plain = BUILDS[name](mine), BUILDS[name](theirs)
    steps = PutBack(optimizer)
    for number, bad in enumerate(bads):
        for weights, each in ((mine, optimizer), (theirs, plain)):
            _give_gradients(weights, number, bad=bad)
            each.param_groups[0]["lr"] = 0.1 / (1 + number)  # as the loop does
        steps.step_unless(torch.tensor(bad))
        if not bad:
            plain.step()
        assert _same(mine, theirs), "weights need not be asked for"
        if looks:
            assert _same(optimizer.state_dict(), plain.state_dict())
    assert _same(optimizer.state_dict(), plain.state_dict())


def test_weights_and_moments_stay_where_they_are_in_memory() -> None:
    weights = _weights()
    optimizer = _radam(weights)
    steps, places = PutBack(optimizer), []
    for bad in (GOOD, BAD, GOOD):
        _give_gradients(weights, 1, bad=bad)
        steps.step_unless(torch.tensor(bad))
        moments = [optimizer.state[weight]["exp_avg"] for weight in weights]
        places.append([(each.data_ptr(), each.stride()) for each in [*weights, *moments]])
    assert places[0] == places[1] == places[2]


def test_what_is_loaded_is_not_put_back() -> None:
    weights = _weights()
    optimizer = _radam(weights)
    steps = PutBack(optimizer)
    for bad in (GOOD, GOOD):
        _give_gradients(weights, 1, bad=bad)
        steps.step_unless(torch.tensor(bad))
    saved = copy.deepcopy(optimizer.state_dict())
    _give_gradients(weights, 2, bad=True)
    steps.step_unless(torch.tensor(BAD))
    optimizer.load_state_dict(saved)
    steps.undo_if_bad()
    assert _same(optimizer.state_dict(), saved)
    assert optimizer.state[weights[0]]["step"].item() == 2


def _ask(monkeypatch: pytest.MonkeyPatch, answers: list[bool]) -> list[torch.device]:
    """What the device says, in order, when it is asked; returns the devices that were asked so far."""
    asked: list[torch.device] = []

    def late(bad: torch.Tensor) -> Callable[[], bool]:
        def read() -> bool:
            asked.append(bad.device)
            return answers.pop(0)

        return read

    monkeypatch.setattr(put_back, "read_late", late)
    return asked


@pytest.mark.parametrize(("name", "expected"), [("odd", [0, 1, 2, 3]), ("sgd", [0, 1, 1, 1])])
def test_the_host_asks_one_step_later_and_only_if_it_keeps_something(
    name: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _ask(monkeypatch, [GOOD] * 4)
    weights = _weights()
    optimizer = BUILDS[name](weights)
    steps, counts = PutBack(optimizer), []
    for _ in range(4):
        _give_gradients(weights, 1, bad=False)
        steps.step_unless(torch.tensor(GOOD))
        counts.append(len(asked))
    assert counts == expected, "SGD makes its momenta in the first step, and has no count"


def test_counts_in_host_memory_are_put_back_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands in for a GPU: torch keeps most counts of steps in tensors on the CPU."""
    meta = torch.device("meta")
    asked = _ask(monkeypatch, [GOOD, BAD, BAD, GOOD])
    weight = nn.Parameter(torch.empty(3, device=meta))
    optimizer = _radam([weight])
    steps, seen = PutBack(optimizer), []
    for _ in range(4):
        weight.grad = torch.empty(3, device=meta)
        steps.step_unless(torch.empty((), dtype=torch.bool, device=meta))
        seen.append(float(optimizer.state[weight]["step"]))
    assert seen == [1, 2, 2, 2], "of steps 2 and 3 it is taken back before the next"
    assert optimizer.state_dict()["state"][0]["step"].item() == 2
    assert asked == [meta] * 4
