"""A step reads no number from its device: on a GPU the host would wait there, and the GPU for the host after it.

The meta device stands in for a GPU. What is there has a shape and no content, and whoever asks for it gets an error;
and the code takes the ways that it takes on a GPU, where they are chosen by `device.type == "cpu"`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.optim import CustomOptimConfig
from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.averaged_weights.averaged_weights import AveragedWeights
from hpc_trainer.features.custom_optim import custom_optim as put_back
from hpc_trainer.features.custom_optim.custom_optim import PutBack, is_put_back
from hpc_trainer.features.muon.muon import MuonWithAdamw, ShardedMuon
from hpc_trainer.features.spike_guard import GuardConfig, OnSpike
from hpc_trainer.features.spike_guard.spike_guard import SpikeGuard
from hpc_trainer.runtime import devices
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import IGNORED, CrossEntropy
from hpc_trainer.training.data.loader import BatchIterator
from hpc_trainer.training.evaluate import evaluate
from hpc_trainer.training.optim.build import step_unless
from hpc_trainer.training.parallel.share import StopVote, VotingLoss
from hpc_trainer.training.state import StepGuard, TrainState
from hpc_trainer.training.step import Stepper, build_scaler
from tests.unit.training.built_parts import building_of, optimizer_of

META = torch.device("meta")
BATCH = torch.empty(4, 3, 8, 8, device=META), torch.empty(4, dtype=torch.int64, device=META)


class _Fused(torch.optim.SGD):
    """torch's fused optimizers do not know the meta device; this one keeps what the step tells them."""

    _step_supports_amp_scaling = True
    seen: Any = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen, self.found_inf = getattr(self, "found_inf", None), None
        super().step(closure)


def _build(
    guard: StepGuard, max_grad_norm: float | None, accum: int, ema: float | None, optim: CustomOptimConfig | None = None
) -> tuple[TrainState, Stepper]:
    with META:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
        loss = VotingLoss(model, CrossEntropy())
    precision = PrecisionConfig()
    if optim is None:
        optimizer: torch.optim.Optimizer = _Fused(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    else:
        optimizer = optimizer_of(optim, model)
    state = TrainState(model=model, optimizer=optimizer, scaler=build_scaler(precision, "cpu"), guard=guard)
    make: Any = Stepper
    if optim is not None:
        building = building_of(TrainConfig(optim=optim), device=torch.device("cuda"))  # as it is told of a GPU
        for each in building.abilities:
            make = each.stepper(make, state, building)
    stepper: Stepper = make(
        module=loss, vote=StopVote(loss, RankGroup(device=META)), precision=precision, device=META,
        grad_accum_steps=accum, max_grad_norm=max_grad_norm,
        after_update=[] if ema is None else [AveragedWeights(model, ema).update],
        prepare=[lambda inputs: inputs.contiguous(memory_format=torch.channels_last)],
    )  # fmt: skip
    return state, stepper


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("spikes", [None, OnSpike.skip, OnSpike.rollback])
def test_a_step_reads_nothing(
    spikes: OnSpike | None, max_grad_norm: float | None, accum: int, ema: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices._KINDS, "meta", devices.CudaKind())
    guard = StepGuard(10) if spikes is None else SpikeGuard(10, GuardConfig(on_spike=spikes))
    state, stepper = _build(guard, max_grad_norm, accum, ema)
    batches = itertools.repeat(BATCH)
    stepper.step(state, batches, lr=0.1, wish_to_stop=False)
    result = stepper.step(state, batches, lr=0.1, wish_to_stop=False)
    assert state.optimizer.seen.device == META  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="meta"):
        result.loss.item()  # reading would have told
    with pytest.raises(RuntimeError, match="meta"):
        bool(guard._in_a_row)


def test_nor_does_one_that_counts_its_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted while they are on the host, and what is told of them is not read again."""
    monkeypatch.setitem(devices._KINDS, "meta", devices.CudaKind())
    state, stepper = _build(StepGuard(10), 1.0, 2, None)
    stepper.target_groups = []
    made = iter([(torch.zeros(4, 3, 8, 8), torch.tensor([1, IGNORED, 2, 3]))] * 4)
    batches = BatchIterator(made, [])
    for _ in range(2):
        result = stepper.step(state, batches, lr=0.1, wish_to_stop=False)
    assert result.loss.device == META
    with pytest.raises(StopIteration):
        batches.targets_ahead(1, CrossEntropy().num_targets)


_CUSTOM = {
    "torch.optim.SGD": {"momentum": 0.9},
    "torch.optim.RAdam": {},
    "torch.optim.NAdam": {"foreach": False},
    "torch.optim.Adadelta": {"foreach": True},
}


@pytest.mark.parametrize("target", _CUSTOM)
def test_nor_does_one_whose_optimizer_knows_no_bad_steps(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts that they keep on the host are settled a step later, when the answer has been sent."""
    monkeypatch.setitem(devices._KINDS, "meta", devices.CudaKind())
    sent: list[torch.Tensor] = []

    def late(bad: torch.Tensor) -> Callable[[], bool]:
        sent.append(bad)
        return lambda: False

    monkeypatch.setattr(put_back, "read_late", late)
    optim = CustomOptimConfig(_target_=target, kwargs=_CUSTOM[target], weight_decay=0.1)
    state, stepper = _build(StepGuard(10), 1.0, 1, None, optim)
    for _ in range(3):
        stepper.step(state, itertools.repeat(BATCH), lr=0.1, wish_to_stop=False)
    assert len(sent) == (1 if target == "torch.optim.SGD" else 3)
    assert all(each.device == META for each in sent)


def test_nor_does_muon_over_parts() -> None:
    """A step that the device may call bad. Messages are not of the meta device; they read nothing by themselves."""
    with META:
        hidden = [nn.Parameter(torch.empty(6, 9)), nn.Parameter(torch.empty(8, 4))]
        other = nn.Parameter(torch.empty(3))
    optimizer = MuonWithAdamw(ShardedMuon(hidden, ranks=None), _Fused([other], lr=0.1), adamw_lr_ratio=1.0)
    for weight in (*hidden, other):
        weight.grad = torch.empty_like(weight)
    optimizer.found_inf = torch.empty((), device=META)  # type: ignore[attr-defined]
    for _ in range(2):
        optimizer.step()
    assert all(optimizer.state[each]["momentum_buffer"].device == META for each in hidden)
    assert optimizer.adamw.seen is optimizer.found_inf  # type: ignore[attr-defined]


class _Held:
    """Held-out samples, in host memory."""

    input_shape, num_classes = (3, 8, 8), 5

    def __len__(self) -> int:
        return 7

    def __getitems__(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(indices), *self.input_shape), torch.zeros(len(indices), dtype=torch.int64)


def test_an_evaluation_reads_nothing_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped reads nothing at all; at its end one reads its sums. Nor is a number copied to the device."""
    monkeypatch.setitem(devices._KINDS, "meta", devices.CudaKind())
    _, stepper = _build(StepGuard(), None, 1, None)
    model = stepper.module.model
    assert isinstance(model, nn.Module)
    group, number_of_batches, make = RankGroup(device=META), itertools.count(1), torch.tensor

    def on_host(*values: Any, **options: Any) -> torch.Tensor:
        assert options.get("device") != META, "copied to the device"
        return make(*values, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", on_host)
        stopped = evaluate(
            model, _Held(), task=CrossEntropy(), group=group, batch_size=2, precision=PrecisionConfig(),
            should_stop=lambda: next(number_of_batches) == 4,
        )  # fmt: skip
    assert stopped is None
    assert next(number_of_batches) == 5, "of 4 batches"
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        evaluate(model, _Held(), task=CrossEntropy(), group=group, batch_size=2, precision=PrecisionConfig())


class _OwnState(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"more": 1}


def test_an_optimizer_with_a_state_of_its_own_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what else a step changes: so it is not taken before the device has told."""
    monkeypatch.setitem(devices._KINDS, "meta", devices.CudaKind())
    weight = nn.Parameter(torch.empty(3, device=META))
    weight.grad = torch.empty(3, device=META)
    optimizer = _OwnState([weight], lr=0.1)
    assert not is_put_back(optimizer)
    with pytest.raises(RuntimeError, match="meta"):
        step_unless(optimizer, torch.empty((), dtype=torch.bool, device=META))


def test_the_guard_makes_no_tensor_of_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is a copy from pageable memory, and a synchronisation: in the first step, and after each logged one."""

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("copied to the device")

    guard = StepGuard(10)
    for name in ("as_tensor", "tensor"):
        monkeypatch.setattr(torch, name, refuse)
    for _ in range(2):
        guard._worst = 0  # as `check` leaves it
        bad = guard.see(torch.empty((), device=META))
        assert isinstance(bad, torch.Tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_guard_counts_as_on_a_cpu() -> None:
    norms = [1.0, float("nan"), float("inf"), 2.0, float("nan")]
    here, there = StepGuard(10), StepGuard(10)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for norm in norms:
            here.see(torch.tensor(norm))
            there.see(torch.full((), norm, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert here.state_dict() == there.state_dict() == {"in_a_row": 1, "worst": 2, "total": 3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_weights_are_averaged_and_swapped_without_a_wait() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda()
    ema = AveragedWeights(model, 0.5)
    assert ema is not None
    own = {name: each.clone() for name, each in model.state_dict().items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            ema.update()
            with ema.swapped_in():
                pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, each in model.state_dict().items():
        assert torch.equal(each, own[name])
        assert torch.equal(each, ema.module.state_dict()[name])
    assert ema.n_averaged == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bads", [(True, False, True, False), (False, True, True, False)])
def test_on_a_gpu_steps_are_put_back_without_a_wait(bads: tuple[bool, ...]) -> None:
    weights = [nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2)]
    mine, plain = (torch.optim.RAdam([weight], lr=0.1) for weight in weights)
    put_back = PutBack(mine)
    flags = [torch.full((), bad, device="cuda") for bad in bads]
    for flag, bad in zip(flags, bads, strict=True):
        for weight in weights:
            weight.grad = torch.full_like(weight, float("nan") if bad else 1.0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            put_back.step_unless(flag)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if not bad:
            plain.step()
    assert torch.equal(*weights)
    assert mine.state_dict()["state"][0]["step"].item() == bads.count(False)
