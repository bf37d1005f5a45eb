"""Saved and loaded into fresh objects, training goes on with the same bits; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, OptimConfig, SgdConfig
from hpc_trainer.config.schema.precision import Dtype, PrecisionConfig
from hpc_trainer.config.schema.schedule import ScheduleConfig, ScheduleName
from hpc_trainer.errors import CheckpointError
from hpc_trainer.training.checkpoint.pack import pack
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.loader import train_batches
from hpc_trainer.training.optim import build_optimizer, learning_rate, set_learning_rate
from hpc_trainer.training.order import BatchOrder
from hpc_trainer.training.precision import autocast, build_scaler
from hpc_trainer.training.rng import seed_everything
from hpc_trainer.training.state import TrainState

NUM_STEPS, BATCH = 14, 12
SCHEDULE = ScheduleConfig(name=ScheduleName.cosine, warmup_steps=3)
OPTIMIZERS = {"adamw": AdamwConfig(lr=0.01), "sgd": SgdConfig(lr=0.05, weight_decay=0.01)}


class Points:
    input_shape = (6,)
    num_classes = 3

    def __len__(self) -> int:
        return 40

    def __getitems__(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.arange(40 * 6, dtype=torch.float32).reshape(40, 6).sin()
        return values[torch.tensor(indices)], torch.tensor(indices) % 3


def precision_of(dtype: str) -> PrecisionConfig:
    # Overflows, then doubles after three steps without, and so on: the growth tracker is never idle.
    return PrecisionConfig(compute_dtype=Dtype(dtype), init_scale=2.0**18, growth_interval=3)


def fresh(dtype: str = "fp32", optim: OptimConfig = OPTIMIZERS["adamw"], width: int = 8, seed: int = 0) -> TrainState:
    seed_everything(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3))
    seed_everything(seed, 0)
    return TrainState(
        model=model, optimizer=build_optimizer(optim, model), scaler=build_scaler(precision_of(dtype), "cpu")
    )


def advance(
    state: TrainState, last_step: int, dtype: str, rank_state: dict[str, Any] | None = None
) -> list[tuple[float, float]]:
    order = BatchOrder(40, BATCH, 1)
    layout = {"rank": 0, "world_size": 1, "micro_batch_size": BATCH // 2, "grad_accum_steps": 2, "num_workers": 0}
    losses = []
    with train_batches(Points(), order, first_step=state.step, num_steps=NUM_STEPS, **layout) as batches:
        state.restore_rng(rank_state or {})
        while state.step < last_step:
            set_learning_rate(state.optimizer, learning_rate(SCHEDULE, 0.05, state.step, NUM_STEPS))
            for _ in range(2):
                inputs, targets = next(batches)
                with autocast(precision_of(dtype), "cpu"):
                    loss = nn.functional.cross_entropy(state.model(inputs), targets) / 2
                state.scaler.scale(loss).backward()
                losses.append((loss.item(), state.scaler.get_scale()))
            state.scaler.unscale_(state.optimizer)
            nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.optimizer.zero_grad()
            state.step += 1
            state.samples_seen += BATCH
    return losses


def bits(state: TrainState) -> tuple[dict[str, bytes], Any]:
    tensors, structure = pack({"replicated": state.replicated_state(), "rank": state.rank_state()})
    return {
        name: each.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, each in tensors.items()
    }, (structure)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optim", sorted(OPTIMIZERS))
def test_a_resumed_run_has_the_same_bits(make_store: Callable[..., CheckpointStore], dtype: str, optim: str) -> None:
    whole = fresh(dtype, OPTIMIZERS[optim])
    losses = advance(whole, NUM_STEPS, dtype)

    store = make_store()
    first = fresh(dtype, OPTIMIZERS[optim])
    resumed_losses, state, rank_state = [], first, None
    for stop in (0, 1, 5, 9, 10):  # before the first step, mid-epoch, at an edge (3 steps an epoch)
        resumed_losses += advance(state, stop, dtype, rank_state)
        state.best_metric = 0.5
        store.save(stop, replicated=state.replicated_state(), per_rank=state.rank_state(), meta={})
        info = store.newest_valid()
        assert info is not None
        replicated, rank_state = store.load(info)
        state = fresh(dtype, OPTIMIZERS[optim], seed=99)
        state.load(replicated, rank_state)
        assert (state.step, state.samples_seen, state.best_metric) == (stop, stop * BATCH, 0.5)
    resumed_losses += advance(state, NUM_STEPS, dtype, rank_state)
    state.best_metric = None

    assert resumed_losses == losses
    assert bits(state) == bits(whole)
    if dtype == "fp16":
        assert len({scale for _, scale in losses}) > 1


def test_without_the_random_state_the_bits_differ() -> None:
    """Dropout is at work: the test above would see it if the random state were lost."""
    whole, other = fresh(), fresh()
    advance(whole, 4, "fp32")
    advance(other, 2, "fp32")
    torch.manual_seed(5)
    advance(other, 4, "fp32")
    assert bits(whole) != bits(other)


def trees(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    advance(state, 2, "fp16" if state.scaler.is_enabled() else "fp32")
    return state.replicated_state(), state.rank_state()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda r, _: r.pop("scaler"), "scaler"),
        (lambda r, _: r.update(ema={}), "ema"),
        (lambda r, _: r["model"].pop("0.weight"), "0.weight"),
        (lambda r, _: r["model"].update({"9.weight": torch.ones(1)}), "9.weight"),
        (lambda r, _: r["model"].update({"0.bias": torch.ones(8, dtype=torch.float64)}), "0.bias"),
        (lambda r, _: r["model"].update({"0.bias": torch.ones(9)}), "0.bias"),
        (lambda r, _: r["scaler"].pop("_growth_tracker"), "_growth_tracker"),
        (lambda r, _: r["optimizer"]["param_groups"].pop(), "groups"),
        (lambda r, _: r["optimizer"]["param_groups"][0].pop("eps"), "eps"),
        (lambda r, _: r["optimizer"]["param_groups"][0].update(new=1), "new"),
        (lambda r, _: r["optimizer"]["param_groups"][0]["params"].pop(), "weights"),
        (lambda r, _: r["optimizer"]["state"].update({17: {}}), "weight 17"),
        (lambda r, _: r["optimizer"]["state"][0].update(exp_avg=torch.ones(2)), "exp_avg"),
        (lambda r, _: r["optimizer"]["state"][0].update(exp_avg=torch.ones(8, 6, dtype=torch.float64)), "exp_avg"),
        (lambda _, p: p.pop("rng"), "rng"),
        (lambda _, p: p.update(more=1), "more"),
        (lambda _, p: p["buffers"].pop("1.running_mean"), "1.running_mean"),
    ],
)
def test_what_is_unread_or_unfilled_is_named(change: Callable[[Any, Any], Any], name: str) -> None:
    replicated, per_rank = trees(fresh("fp16"))
    change(replicated, per_rank)
    with pytest.raises(CheckpointError, match=name):
        fresh("fp16").load(replicated, per_rank)


def test_moments_of_a_fresh_optimizer_are_filled() -> None:
    """Its state_dict is empty: a loader that fills only what is there would drop them."""
    state = fresh()
    assert state.optimizer.state_dict()["state"] == {}
    state.load(*trees(fresh()))
    assert all(set(each) == {"step", "exp_avg", "exp_avg_sq"} for each in state.optimizer.state.values())
    assert len(state.optimizer.state) == 6


@pytest.mark.parametrize(("saved", "here"), [("fp16", "fp32"), ("fp32", "fp16")])
def test_a_scaler_on_one_side_only_is_refused(saved: str, here: str) -> None:
    with pytest.raises(CheckpointError, match="scale"):
        fresh(here).load(*trees(fresh(saved)))


def test_another_optimizer_or_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="momentum"):
        fresh(optim=OPTIMIZERS["sgd"]).load(*trees(fresh()))
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        fresh(width=9).load(*trees(fresh()))


def test_a_fresh_start_has_no_random_state_to_restore() -> None:
    state = fresh()
    before = torch.get_rng_state()
    state.restore_rng({})
    assert torch.equal(torch.get_rng_state(), before)
