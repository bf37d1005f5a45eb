"""Optimizer groups and settings."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, CustomOptimConfig, OptimConfig, SgdConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.context import Restored
from hpc_trainer.training.data.order import BatchSizes
from hpc_trainer.training.optim.build import build_optimizer, chosen_settings, drop_gradients, set_learning_rate
from hpc_trainer.training.state import TrainState
from tests.unit.training.built_parts import building_of, optimizer_of


@pytest.mark.parametrize("config", [SgdConfig(weight_decay=0.3), AdamwConfig(weight_decay=0.3)])
def test_only_matrices_decay(config: OptimConfig) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    model[2].bias.requires_grad_(False)
    decayed, plain = build_optimizer(config, model).param_groups
    assert (decayed["weight_decay"], [weight.ndim for weight in decayed["params"]]) == (0.3, [4, 2])
    assert (plain["weight_decay"], [weight.ndim for weight in plain["params"]]) == (0.0, [1, 1, 1])


class _Own(nn.LayerNorm):
    """A norm of a person's own, with a layer in it."""

    def __init__(self) -> None:
        super().__init__([4, 16])
        self.scale = nn.Linear(2, 16)


def test_norms_and_biases_of_any_shape_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm([4, 16]), _Own(), nn.RMSNorm([4, 16]), nn.GroupNorm(2, 4))
    model.bias = nn.Parameter(torch.zeros(4, 16))
    model.table = nn.Parameter(torch.zeros(4, 16))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decayed, plain = build_optimizer(AdamwConfig(weight_decay=0.3), model).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert [names[id(each)] for each in decayed["params"]] == ["table", "0.weight", "2.scale.weight"]
    assert [names[id(each)] for each in plain["params"]] == [
        "bias", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "2.scale.bias", "3.weight", "4.weight", "4.bias",
    ]  # fmt: skip


def test_a_weight_of_a_norm_does_not_decay_elsewhere_either() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.LayerNorm([4, 16]))
    model[0].weight = model[1].weight
    (group, plain) = build_optimizer(AdamwConfig(weight_decay=0.3), model, decays={True, False}).param_groups
    assert group["params"] == []
    assert [weight.ndim for weight in plain["params"]] == [2, 1, 2]


def test_settings_arrive() -> None:
    model = nn.Linear(2, 2)
    group = build_optimizer(AdamwConfig(lr=0.5, betas=[0.8, 0.9], eps=1e-5), model).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-5)
    group = build_optimizer(SgdConfig(lr=0.5, momentum=0.7, nesterov=False), model).param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.7, False)


def test_what_cannot_be_built_is_a_configuration_error() -> None:
    model = nn.Linear(2, 2)
    for config in (SgdConfig(momentum=0.0, nesterov=True), AdamwConfig(betas=[0.9]), OptimConfig(name="none")):
        with pytest.raises(ConfigError):
            build_optimizer(config, model)
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(SgdConfig(), nn.ReLU())


def test_all_groups_get_the_rate() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))]}])
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_gradients_are_dropped_and_a_class_may_have_its_own_way() -> None:
    class Counting(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += set_to_none
            super().zero_grad(set_to_none)

    for kind in (torch.optim.SGD, Counting):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        optimizer = kind([{"params": list(layer.parameters())} for layer in model], lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        drop_gradients(optimizer)
        assert all(weight.grad is None for weight in model.parameters())
        assert getattr(optimizer, "calls", 1) == 1


@pytest.mark.parametrize(
    ("was", "now", "changed"),
    [
        (AdamwConfig(weight_decay=0.3), AdamwConfig(weight_decay=0.1, betas=[0.5, 0.6]), {"betas": (0.5, 0.6)}),
        (SgdConfig(momentum=0.5), SgdConfig(momentum=0.7, weight_decay=0.1), {"momentum": 0.7}),
        (
            CustomOptimConfig(_target_="torch.optim.RAdam", weight_decay=0.3, kwargs={"eps": 1e-5}),
            CustomOptimConfig(_target_="torch.optim.RAdam", weight_decay=0.1, kwargs={"eps": 1e-6}),
            {"eps": 1e-6},
        ),
    ],
)
def test_a_resumed_run_has_the_settings_of_now(was: OptimConfig, now: OptimConfig, changed: dict[str, object]) -> None:
    """The contract lets them change, and loading the optimizer puts the old ones back."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    before = optimizer_of(was, model)
    before.param_groups[0]["own"] = 7  # state that a class of one's own may keep there
    shared, own = to_trees({"model": model, "optimizer": before})
    after = optimizer_of(now, other)
    state = TrainState(model=other, optimizer=after, scaler=torch.amp.GradScaler("cpu", enabled=False))
    building = building_of(TrainConfig(optim=now), run=None, sizes=BatchSizes.of(1, 1))
    state.settings = chosen_settings(after)
    for each in building.abilities:
        each.on_state(state, other, building)
    after.param_groups[0]["own"] = 0
    from_trees({"model": other, "optimizer": after}, shared, own)
    assert after.param_groups[0]["weight_decay"] == was.weight_decay
    state.resume(Restored(3, {"samples_seen": 0, "best_metric": None}))
    assert [group["weight_decay"] for group in after.param_groups] == [0.1, 0.0]
    assert after.param_groups[0]["own"] == 7
    assert changed.items() <= after.param_groups[0].items()


def test_loaded_moments_lie_in_memory_as_the_weight_does() -> None:
    """Fused kernels go through both side by side, whatever the order: other values, and no error."""
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(AdamwConfig(), model)
    model(torch.randn(2, 4, 8, 8)).sum().backward()
    optimizer.step()
    shared, own = to_trees({"model": model, "optimizer": optimizer})
    saved = copy.deepcopy(shared)
    fresh = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    loaded = build_optimizer(AdamwConfig(), fresh)
    from_trees({"model": fresh, "optimizer": loaded}, saved, own)
    for weight, before in zip(fresh.parameters(), model.parameters(), strict=True):
        assert weight.stride() == before.stride()
        assert loaded.state[weight]["exp_avg"].stride() == weight.stride()
        assert torch.equal(loaded.state[weight]["exp_avg"], optimizer.state[before]["exp_avg"])


def test_moments_of_another_format_than_their_weight_come_back_as_they_were() -> None:
    """torch's load_state_dict would round them to that of the weight."""

    def made() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(3, 2).to(torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    (model, optimizer), (other, loaded) = made(), made()
    for weight in model.parameters():
        optimizer.state[weight]["momentum_buffer"] = torch.randn(weight.shape)
    shared, own = to_trees({"model": model, "optimizer": optimizer})
    from_trees({"model": other, "optimizer": loaded}, copy.deepcopy(shared), own)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["momentum_buffer"], loaded.state[theirs]["momentum_buffer"])
        assert loaded.state[theirs]["momentum_buffer"].dtype is torch.float32


def test_other_optimizers_are_named_alone() -> None:
    with pytest.raises(ConfigError, match=r"\Aoptim=adamw: .*\.\Z"):
        build_optimizer(AdamwConfig(betas=[0.9]), nn.Linear(2, 2))
