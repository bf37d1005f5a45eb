"""Rounding that is right in the mean, by bits that hang on the place alone; and steps of weights that are bf16."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.optim import AdamwConfig, LionConfig, OptimConfig, SgdConfig
from hpc_trainer.config.schema.parallel import Dtype, ParallelConfig, PrecisionConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.memory.estimate import estimate
from hpc_trainer.features.stochastic_rounding import stochastic_rounding as rounding
from hpc_trainer.features.stochastic_rounding.stochastic_rounding import (
    random_bits,
    round_stochastically,
    write_rounded,
)
from hpc_trainer.training.build import make_optimizer
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.optim.build import step_unless
from hpc_trainer.training.state import TrainState
from tests.composed import composed
from tests.seeds import chosen_seed
from tests.unit.training.built_parts import building_of

CPU = torch.device("cpu")
NUM, SIGMAS = 1 << 16, 5.0
KINDS: dict[str, OptimConfig] = {
    "adamw": AdamwConfig(lr=0.01, weight_decay=0.1),
    "sgd": SgdConfig(lr=0.01, weight_decay=0.1),
    "lion": LionConfig(lr=0.01, weight_decay=0.1),
}


def _float(word: int) -> float:
    return torch.tensor(word, dtype=torch.int32).view(torch.float32).item()


def test_bits_are_uniform() -> None:
    """Each of 256 values of either byte, and neighbours, as often as chance would have it; by chi square."""
    seed = chosen_seed()
    bits = random_bits(str(seed), 3, 4 * NUM, CPU)
    assert 0 <= int(bits.min()) <= int(bits.max()) < 1 << 16
    pairs = (bits[1:] >> 12) * 16 + (bits[:-1] >> 12)
    for values in (bits & 255, bits >> 8, pairs):
        counts = torch.bincount(values, minlength=256).double()
        expected = len(values) / 256
        chi = ((counts - expected).square() / expected).sum().item()
        assert abs(chi - 255) < SIGMAS * math.sqrt(2 * 255)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.25, 0.5, 0.9])
def test_the_mean_of_what_is_rounded_is_what_was_rounded(share: float) -> None:
    """Within five standard deviations of a binomial; by the one bit that there is between two bf16 numbers."""
    seed = chosen_seed()
    for low, sign in ((1.0, 1), (1.0, -1), (3.0e-39, 1)):  # the last is subnormal
        word = torch.tensor(low).bfloat16().float().view(torch.int32).item()
        value, below, above = (sign * _float(int(word) + add) for add in (int(share * 65536), 0, 1 << 16))
        values = torch.full((NUM,), value)
        found = round_stochastically(values, random_bits(f"{seed} {low} {sign}", 0, NUM, CPU)).double()
        assert set(found.tolist()) <= {below, above}
        part = (value - below) / (above - below)
        error = (found.mean().item() - value) / (above - below)
        assert abs(error) <= SIGMAS * math.sqrt(part * (1 - part) / NUM)


def test_what_bf16_has_stays_and_what_is_no_number_too() -> None:
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    numbers = words.view(torch.bfloat16)
    finite = numbers[numbers.isfinite()]
    bits = torch.full((len(finite),), 65535, dtype=torch.int32)
    assert torch.equal(round_stochastically(finite.float(), bits).view(torch.int16), finite.view(torch.int16))
    others = torch.tensor([-1, 0x7FFFFFFF, 0x7F800001, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    found = round_stochastically(others, torch.full((5,), 65535, dtype=torch.int32))
    assert found.isnan().tolist() == [True, True, True, False, False]
    assert found[3:].tolist() == [math.inf, -math.inf]


def test_any_part_of_a_stream_is_that_part_of_the_whole() -> None:
    whole = random_bits("a", 0, 101, CPU)
    for start in range(9):
        for count in (0, 1, 2, 5, 60):
            assert torch.equal(random_bits("a", start, count, CPU), whole[start : start + count])
    assert not torch.equal(random_bits("b", 0, 101, CPU), whole)


@pytest.mark.parametrize("shape", [(), (5,), (7, 3), (4, 3, 2, 2)])
def test_a_weight_is_rounded_by_the_places_of_its_elements(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one go or row by row, and however it lies in memory."""
    values = torch.randn(shape)
    expected = torch.empty(shape, dtype=torch.bfloat16)
    write_rounded(expected, values, "key")
    flat = random_bits("key", 0, values.numel(), CPU).view(shape)
    assert torch.equal(expected, round_stochastically(values, flat))
    monkeypatch.setattr(rounding, "_ROUNDED", 4)
    again = torch.empty(shape, dtype=torch.bfloat16)
    write_rounded(again, values, "key")
    assert torch.equal(again, expected)
    if len(shape) == 4:
        laid = torch.empty(shape, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        write_rounded(laid, values.to(memory_format=torch.channels_last), "key")
        assert torch.equal(laid, expected)


def _built(config: OptimConfig, *, seed: int = 1, zero1: bool = False) -> TrainState:
    train = TrainConfig(
        optim=config, seed=seed, precision=PrecisionConfig(compute_dtype=Dtype.bf16_sr),
        parallel=ParallelConfig(zero1=zero1),
    )  # fmt: skip
    building = building_of(train)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.LayerNorm(11), nn.Linear(11, 5))
    for each in building.abilities:
        each.see_whole(model, building)
    for each in building.abilities:
        each.on_device(model, building)
    state = TrainState(
        model=model, optimizer=make_optimizer(building, model), scaler=torch.amp.GradScaler("cpu", enabled=False)
    )
    for each in building.abilities:
        each.on_state(state, model, building)
    return state


def _step(state: TrainState, seed: int | None = None, value: float | None = None) -> None:
    generator = torch.Generator().manual_seed(state.step if seed is None else seed)
    for weight in state.model.parameters():
        gradient = torch.randn(weight.shape, generator=generator)
        weight.grad = (gradient if value is None else torch.full_like(gradient, value)).to(weight.dtype)
    step_unless(state.optimizer, torch.tensor(value is not None))
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1


def _weights(state: TrainState) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in state.model.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_fp32_rounded_by_its_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "PIECE", 60)  # bytes: more than one piece a group
    state = _built(KINDS[kind])
    assert {weight.dtype for weight in state.model.parameters()} == {torch.bfloat16}
    twin = copy.deepcopy(state.model).float()
    wide = make_optimizer(building_of(TrainConfig(optim=KINDS[kind])), twin)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for weight in twin.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator).bfloat16().float()
        wide.step()
        _step(state)
        for (name, weight), value in zip(state.model.named_parameters(), twin.parameters(), strict=True):
            expected = torch.empty_like(weight)
            write_rounded(expected, value.detach(), f"1 {step} {name}")
            assert torch.equal(weight, expected), name
            value.data.copy_(expected)  # the next step begins there
            for key, moment in state.optimizer.state[weight].items():
                assert moment.dtype is torch.float32
                assert torch.equal(moment, wide.state[value][key])


def test_updates_below_the_last_bit_count_in_the_mean() -> None:
    """Of each a twentieth of what is between two numbers: rounded to the nearest a weight would never move."""
    seed = chosen_seed()
    state = _built(SgdConfig(lr=1.0, momentum=0.0, nesterov=False), seed=seed)
    weight = state.model[0].weight  # type: ignore[index]
    with torch.no_grad():
        for each in state.model.parameters():
            each.fill_(1.0)
    gap, num_steps = 2.0**-7, 40
    for _ in range(num_steps):
        weight.grad = torch.full_like(weight, -gap / 20)
        state.optimizer.step()
        state.step += 1
    moved = (weight.double() - 1.0).mean().item() / gap
    spread = math.sqrt(num_steps * (1 / 20) * (19 / 20) / weight.numel())
    assert abs(moved - num_steps / 20) < SIGMAS * spread + 0.01
    assert torch.full_like(weight, 1.0).add(gap / 20).eq(1.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_the_device_calls_bad_changes_no_bit(kind: str) -> None:
    state = _built(KINDS[kind])
    for value in (None, float("nan"), None):
        before = _weights(state).clone()
        _step(state, value=value)
        assert torch.equal(_weights(state), before) is (value is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_one_goes_on_from_what_was_saved(kind: str) -> None:
    """With the same bits: there is no generator whose state could lag. And another seed has others."""
    state, other, apart = _built(KINDS[kind]), _built(KINDS[kind]), _built(KINDS[kind], seed=2)
    for _ in range(3):
        _step(state)
        _step(apart)
    assert not torch.equal(_weights(state), _weights(apart))
    _step(other, seed=77)
    shared, own = to_trees({"model": state.model, "optimizer": state.optimizer})
    from_trees({"model": other.model, "optimizer": other.optimizer}, copy.deepcopy(shared), own)
    other.step = state.step
    _step(state)
    _step(other)
    assert torch.equal(_weights(state), _weights(other))


@pytest.mark.parametrize("way", ["in_backward", "offload"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_whole_step(kind: str, way: str) -> None:
    changes: dict[str, Any] = {way: True}
    found = []
    for config in (KINDS[kind], type(KINDS[kind])(lr=0.01, weight_decay=0.1, **changes)):
        state = _built(config)
        for _ in range(3):
            inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(state.step)).bfloat16()
            state.model(inputs).square().mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            state.step += 1
        found.append(_weights(state))
    assert torch.equal(*found)


def test_a_model_with_batch_norm_is_refused() -> None:
    config = TrainConfig(precision=PrecisionConfig(compute_dtype=Dtype.bf16_sr))
    building = building_of(config)
    (mine,) = [each for each in building.abilities if isinstance(each, rounding.StochasticRoundingAbility)]
    with pytest.raises(ConfigError, match=r"and 1 \(BatchNorm1d\) takes its own"):
        mine.see_whole(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), building)


@pytest.mark.parametrize(
    "words",
    [
        ["optim=muon"], ["model=resnet18", "data=synthetic_images"], ["train.ema_decay=0.9"],
        ["parallel=diloco", "hardware=cpu_x2"], ["parallel.comm_hook=bf16", "hardware=cpu_x2"],
        ["parallel=tp", "hardware=cpu_x2", "experiment=gpt_bytes"], ["parallel.param_dtype=bf16", "parallel=fsdp"],
        ["hardware=mps_x1"], ["hardware=gpu_x1", "hardware.gpu_type=v100"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_does_not_go_with_it_is_said_before_the_run(words: list[str]) -> None:
    config = composed(["hardware=cpu_x1", *words, "precision=bf16_sr"])
    with pytest.raises(ConfigError, match=r"precision=bf16_sr.*Use "):
        validate(config)


@pytest.mark.long
def test_the_estimate_knows_of_half_the_bytes() -> None:
    words = ["experiment=gpt_bytes", "cluster=slurm", "hardware=gpu_x8", "parallel=fsdp", "train.ema_decay=null"]
    mine, plain = (estimate(composed([*words, f"precision={name}"])) for name in ("bf16_sr", "bf16"))
    assert 2 * mine.weights == plain.weights
    assert mine.gradients == plain.gradients, "FSDP adds micro-batches up in fp32"
    assert 2 * mine.gathered == plain.gathered
    assert mine.optimizer == plain.optimizer
