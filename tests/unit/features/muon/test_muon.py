"""Muon and AdamW as one optimizer: which weights go where, torch's own updates, state, and skipped steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.model import GptConfig, MlpConfig
from hpc_trainer.config.schema.optim import MuonConfig, MuonScale
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.muon import muon as sharded_muon
from hpc_trainer.features.muon.muon import MuonWithAdamw, split_weights
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.mlp import Mlp
from hpc_trainer.training.optim.build import set_learning_rate, step_unless
from tests.unit.features.optimizer_checks import give_gradients, goes_on_from_what_was_saved
from tests.unit.training.built_parts import optimizer_of

_HIDDEN = ("attention.query_key_value", "attention.out", "mlp_in", "mlp_out")


def _gpt() -> Gpt:
    torch.manual_seed(3)
    return Gpt(GptConfig(num_layers=2, num_heads=2, embed_dim=16), input_shape=(8,), num_classes=16)


def _mlp() -> Mlp:
    torch.manual_seed(3)
    return Mlp(MlpConfig(hidden_dim=12, dropout=0.0), input_shape=(1, 4, 4), num_classes=5)


def _built(model: nn.Module, **values: object) -> MuonWithAdamw:
    optimizer = optimizer_of(MuonConfig(**values), model)  # type: ignore[arg-type]
    assert isinstance(optimizer, MuonWithAdamw)
    return optimizer


@pytest.mark.parametrize(
    ("build", "patterns", "hidden"),
    [
        (_gpt, [], {f"blocks.{n}.{name}.weight" for n in (0, 1) for name in _HIDDEN}),
        (
            _gpt,
            ["*.mlp_*"],
            {f"blocks.{n}.{name}.weight" for n in (0, 1) for name in _HIDDEN[:2]},
        ),
        (_mlp, [], {"layers.1.weight", "layers.4.weight"}),
    ],
)
def test_hidden_matrices_are_muons(build: Callable[[], nn.Module], patterns: list[str], hidden: set[str]) -> None:
    model = build()
    names = {id(weight): name for name, weight in model.named_parameters()}
    mine, others = split_weights(model, patterns)
    assert {names[id(each)] for each in mine} == hidden
    assert {names[id(each)] for each in [*mine, *others]} == set(names.values())
    groups = _built(model, adamw_weights=patterns, weight_decay=0.3).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [
        (len(hidden), 0.3),
        (sum(each.ndim == 2 for each in others), 0.3),
        (sum(each.ndim == 1 for each in others), 0.0),
    ]


class _Rows(nn.Module):
    """Its norm and its bias have two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm([4, 16]), nn.Linear(64, 3)
        self.bias = nn.Parameter(torch.zeros(4, 16))


def test_gains_and_biases_of_two_dimensions_are_no_matrices() -> None:
    model = _Rows()
    mine, others = split_weights(model, [])
    assert [id(each) for each in mine] == [id(model.rows.weight)]
    assert len(others) == len(list(model.parameters())) - 1
    groups = _built(model, weight_decay=0.3).param_groups
    assert [([tuple(each.shape) for each in group["params"]], group["weight_decay"]) for group in groups] == [
        ([(16, 16)], 0.3),
        ([(3, 64)], 0.3),
        ([(4, 16), (16,), (4, 16), (4, 16), (3,)], 0.0),
    ]


@pytest.mark.parametrize("scale", MuonScale)
def test_updates_are_those_of_torchs_two(scale: MuonScale) -> None:
    model, twin = _gpt(), _gpt()
    optimizer = _built(model, lr=0.02, adamw_lr=0.003, adjust_lr=scale, weight_decay=0.2)
    hidden, others = split_weights(twin, [])
    muon = torch.optim.Muon(hidden, weight_decay=0.2, adjust_lr_fn=scale.value)
    matrices = {"params": [each for each in others if each.ndim == 2], "weight_decay": 0.2}
    vectors = {"params": [each for each in others if each.ndim == 1], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([matrices, vectors], betas=(0.9, 0.95), fused=True)
    for step, share in enumerate((1.0, 0.5, 0.25)):
        give_gradients(model, step)
        give_gradients(twin, step)
        set_learning_rate(optimizer, 0.02 * share)
        set_learning_rate(muon, 0.02 * share)
        set_learning_rate(adamw, 0.02 * share * (0.003 / 0.02))
        for each in (optimizer, muon, adamw):
            each.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_fresh_one_goes_on_from_what_was_saved() -> None:
    loaded = goes_on_from_what_was_saved(_gpt, _built)
    assert loaded.muon.state is loaded.state is loaded.adamw.state


@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_the_device_calls_bad_changes_no_bit(first: bool) -> None:
    """The way of a GPU: `found_inf` is a tensor that nobody reads on the host."""
    model, twin = _gpt(), _gpt()
    optimizer, plain = _built(model), _built(twin)
    for bad, seed in ((first, 1), (not first, 2), (False, 3)):
        give_gradients(model, seed)
        give_gradients(twin, seed)
        if bad:
            for weight in model.parameters():
                assert weight.grad is not None
                weight.grad[0] = float("nan")
        before = [each.detach().clone() for each in model.parameters()]
        step_unless(optimizer, torch.tensor(bad))
        if not bad:
            plain.step()
        else:
            for was, now in zip(before, model.parameters(), strict=True):
                assert torch.equal(was, now)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer.adamw, "found_inf")
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.isfinite(mine).all()


def test_a_loss_scaler_may_leave_the_division_to_it() -> None:
    """Without clipping and guard nobody calls `unscale_` before: the scale is then the optimizer's to take out."""
    model, twin = _mlp(), _mlp()
    optimizer, plain = _built(model), _built(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    inputs = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        scaler.scale(model(inputs).square().mean()).backward()
        twin(inputs).square().mean().backward()
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _gpt()
    with pytest.raises(
        ConfigError, match=r"optim.adamw_weights has 'head.\*', and no weight of \w+ has that name. There are "
    ):
        _built(model, adamw_weights=["head.*"])
    with pytest.raises(ConfigError, match="Linear has none: weights with two dimensions"):
        _built(nn.Linear(3, 3))
    bare = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    bare[1].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="gives embeddings, norms and biases to AdamW"):
        _built(bare)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"optim=muon needs torch 2.9 or newer, and this is .*Use optim=adamw"):
        _built(model)


def test_a_torch_that_keeps_newton_schulz_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_muon, "_zeropower_via_newtonschulz", None)
    with pytest.raises(
        ConfigError, match=r"from torch.optim._muon, which torch 2.9 to 2.13.*Use parallel=ddp, or optim"
    ):
        sharded_muon.ShardedMuon([nn.Parameter(torch.ones(2, 2))], ranks=None)
