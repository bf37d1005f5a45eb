"""Lion: the paper's figures, parts of a weight, steps that must change nothing, and what a checkpoint holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.optim import LionConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.lion import lion
from hpc_trainer.features.lion.lion import Lion
from hpc_trainer.features.memory.estimate import estimate
from hpc_trainer.training.optim.build import set_learning_rate, set_momentum, step_unless
from tests.composed import composed
from tests.unit.features.optimizer_checks import give_gradients, goes_on_from_what_was_saved
from tests.unit.training.built_parts import optimizer_of

RATES = (0.02, 0.01, 0.005, 0.02)


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.LayerNorm(11), nn.Linear(11, 5))


def _built(model: nn.Module, **values: Any) -> Lion:
    optimizer = optimizer_of(LionConfig(**values), model)
    assert isinstance(optimizer, Lion)
    return optimizer


def _by_hand(weight: torch.Tensor, gradients: list[torch.Tensor], decay: float) -> torch.Tensor:
    """Algorithm 2 of the paper, a number after the other in Python's doubles; betas 0.9 and 0.99."""
    found = []
    for index, start in enumerate(weight.flatten().tolist()):
        value, momentum = start, 0.0
        for rate, gradient in zip(RATES, gradients, strict=True):
            slope = gradient.flatten()[index].item()
            mixed = 0.9 * momentum + 0.1 * slope
            value -= rate * ((mixed > 0) - (mixed < 0) + decay * value)
            momentum = 0.99 * momentum + 0.01 * slope
        found.append(value)
    return torch.tensor(found, dtype=torch.float64).reshape(weight.shape)


def test_updates_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lion, "_PIECE", 100)  # bytes: more than one piece a group
    model, fresh = _model(), _model()
    optimizer = _built(model, weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    gradients: list[list[torch.Tensor]] = []
    for step, rate in enumerate(RATES):
        give_gradients(model, step)
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
        set_learning_rate(optimizer, rate)
        optimizer.step()
    for number, (mine, was) in enumerate(zip(model.parameters(), fresh.parameters(), strict=True)):
        expected = _by_hand(was.detach(), [each[number] for each in gradients], 0.3 if was.ndim == 2 else 0.0)
        torch.testing.assert_close(mine.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_a_part_has_the_bits_of_the_whole() -> None:
    """Wherever a weight is cut: kernels take a part's last elements one by one."""
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(1003, generator=generator), torch.randn(3, 1003, generator=generator)
    for cut in (0, 1, 5, 8, 17, 501, 1002):
        whole, left, right = (nn.Parameter(each.clone()) for each in (start, start[:cut], start[cut:]))
        both = [Lion([each], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1) for each in (whole, left, right)]
        for gradient in gradients:
            whole.grad, left.grad, right.grad = gradient, gradient[:cut], gradient[cut:]
            for each in both:
                each.step()
        assert torch.equal(torch.cat([left, right]), whole)
        momenta = [each.state[weight]["exp_avg"] for each, weight in zip(both, (whole, left, right), strict=True)]
        assert torch.equal(torch.cat(momenta[1:]), momenta[0])


@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_the_device_calls_bad_changes_no_bit(first: bool) -> None:
    model, twin = _model(), _model()
    optimizer, plain = _built(model), _built(twin)
    for bad, seed in ((first, 1), (not first, 2), (False, 3)):
        give_gradients(model, seed)
        give_gradients(twin, seed)
        if bad:
            for weight in model.parameters():
                assert weight.grad is not None
                weight.grad[0] = float("nan")
        step_unless(optimizer, torch.tensor(bad))
        if not bad:
            plain.step()
    assert not hasattr(optimizer, "found_inf")
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(optimizer.state[mine]["exp_avg"], plain.state[theirs]["exp_avg"])


def test_a_loss_scaler_may_leave_the_division_to_it() -> None:
    """A scale of a power of two takes no bits, and an overflow is a step that changes nothing."""
    model, twin = _model(), _model()
    optimizer, plain = _built(model), _built(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    inputs = torch.randn(6, 7, generator=torch.Generator().manual_seed(2))
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(inputs * factor).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update(256.0)
        if factor == 1.0:
            twin(inputs).square().mean().backward()
            plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_fresh_one_goes_on_from_what_was_saved() -> None:
    loaded = goes_on_from_what_was_saved(_model, _built)
    assert all(state.keys() == {"exp_avg"} for state in loaded.state.values())


def test_one_cycle_cycles_its_first_beta() -> None:
    optimizer = _built(_model())
    set_momentum(optimizer, 0.85)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.85, 0.99)] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.betas=[0.9]"], r"optim.betas=\[0.9\] must be two numbers. Use \[0.9,0.99\]"),
        (["optim.betas=[0.9,1.0]"], r"optim.betas\[1\]=1 must be in \[0, 1\)"),
        (["optim.lr=0"], r"optim.lr=0 must be .*0.0001"),
        (["optim.weight_decay=-1"], "optim.weight_decay=-1 must be at least 0"),
        (["optim.betas=[0.8,0.99]", "schedule=one_cycle"], r"optim.betas=\[0.8, 0.99\] has no effect"),
    ],
)
def test_what_cannot_be_is_said_before_the_run(words: list[str], said: str) -> None:
    config = composed(["optim=lion", "hardware=cpu_x1", *words])
    with pytest.raises(ConfigError, match=said):
        validate(config)


@pytest.mark.long
def test_the_estimate_knows_of_one_moment() -> None:
    """And that a step that may be bad needs no copies of all weights."""
    words = ["experiment=gpt_bytes", "cluster=slurm", "hardware=gpu_x1"]
    mine, adamws = (estimate(composed([*words, f"optim={name}"])) for name in ("lion", "adamw"))
    assert mine.optimizer == mine.weights
    assert adamws.optimizer > 1.9 * mine.optimizer
    assert (mine.gradients, mine.activations, mine.update) == (adamws.gradients, adamws.activations, 0)
