"""Saved and loaded into fresh objects, training goes on with the same bits; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, OptimConfig, ScheduleConfig, ScheduleName, SgdConfig
from hpc_trainer.config.schema.parallel import Dtype, PrecisionConfig
from hpc_trainer.errors import CheckpointError
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.checkpoint.trees import pack, unpack
from hpc_trainer.training.context import Restored
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.optim.build import build_optimizer, set_learning_rate
from hpc_trainer.training.optim.schedule import learning_rate
from hpc_trainer.training.rng import rng_state, seed_everything, set_rng_state
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import autocast, build_scaler

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
    state: TrainState, last_step: int, dtype: str, rng: dict[str, Any] | None = None
) -> list[tuple[float, float]]:
    order = BatchOrder(40, BATCH, 1)
    layout = {"rank": 0, "world_size": 1, "micro_batch_size": BATCH // 2, "grad_accum_steps": 2, "num_workers": 0}
    losses = []
    with train_batches(Points(), order, first_step=state.step, num_steps=NUM_STEPS, **layout) as batches:
        if rng is not None:
            set_rng_state(rng)
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
    tensors, structure = pack({"trees": to_trees(state.objects()), "rng": rng_state(), "step": state.step})
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
    resumed_losses, state, rng = [], first, None
    for stop in (0, 1, 5, 9, 10):  # before the first step, mid-epoch, at an edge (3 steps an epoch)
        resumed_losses += advance(state, stop, dtype, rng)
        state.best_metric = 0.5
        shared, own = to_trees(state.objects())
        store.save(stop, replicated=shared, per_rank={"own": own, "rng": rng_state()}, meta={})
        info = store.newest_valid()
        assert info is not None
        shared, per_rank = store.load(info)
        state, rng = fresh(dtype, OPTIMIZERS[optim], seed=99), per_rank["rng"]
        state.resume(Restored(info.step, from_trees(state.objects(), shared, per_rank["own"])))
        assert (state.step, state.samples_seen, state.best_metric) == (stop, stop * BATCH, 0.5)
    resumed_losses += advance(state, NUM_STEPS, dtype, rng)
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
    return to_trees(state.objects())


def load(state: TrainState, shared: dict[str, Any], own: dict[str, Any]) -> None:
    from_trees(state.objects(), shared, own)


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
        (lambda r, _: r["optimizer"]["state"].update({"model.9.bias": {}}), r"weight model\.9\.bias"),
        (lambda r, _: r["optimizer"]["state"]["model.0.weight"].update(exp_avg=torch.ones(2)), "exp_avg"),
        (
            lambda r, _: r["optimizer"]["state"]["model.0.weight"].update(
                exp_avg=torch.ones(8, 6, dtype=torch.float64)
            ),
            "exp_avg",
        ),
        (lambda _, p: p.pop("model"), "model"),
        (lambda _, p: p.update(more=1), "more"),
        (lambda _, p: p["model"].pop("1.running_mean"), "1.running_mean"),
    ],
)
def test_what_is_unread_or_unfilled_is_named(change: Callable[[Any, Any], Any], name: str) -> None:
    shared, own = trees(fresh("fp16"))
    change(shared, own)
    with pytest.raises(CheckpointError, match=name):
        load(fresh("fp16"), shared, own)


def test_moments_of_a_fresh_optimizer_are_filled() -> None:
    """Its state_dict is empty: a loader that fills only what is there would drop them."""
    state = fresh()
    assert state.optimizer.state_dict()["state"] == {}
    load(state, *trees(fresh()))
    assert all(set(each) == {"step", "exp_avg", "exp_avg_sq"} for each in state.optimizer.state.values())
    assert len(state.optimizer.state) == 6


@pytest.mark.parametrize(("saved", "here"), [("fp16", "fp32"), ("fp32", "fp16")])
def test_a_scaler_on_one_side_only_is_refused(saved: str, here: str) -> None:
    with pytest.raises(CheckpointError, match="scale"):
        load(fresh(here), *trees(fresh(saved)))


def test_another_optimizer_or_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="momentum"):
        load(fresh(optim=OPTIMIZERS["sgd"]), *trees(fresh()))
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        load(fresh(width=9), *trees(fresh()))


class Average:
    """A class of a person's own, with the two methods that count."""

    def __init__(self, names: tuple[str, ...] = ("mean",)) -> None:
        self.values = {name: torch.zeros(3) for name in names}
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.values:
            self.values[name] = state["values"][name]
        self.count = state["count"]


def _objects() -> dict[str, Any]:
    return {
        "average": Average(),
        "chance": torch.Generator().manual_seed(1),
        "shuffle": np.random.default_rng(2),
        "old_shuffle": np.random.Generator(np.random.MT19937(3)),
        "tensor": torch.zeros(2, 3, dtype=torch.bfloat16),
        "array": np.zeros((2, 2)),
        "best": 0.5,
        "note": {"words": ["a", None], "counts": (1, 2**70)},
    }


def _draw(objects: dict[str, Any]) -> list[Any]:
    torch_draw = torch.rand(2, generator=objects["chance"]).tolist()
    return [torch_draw, objects["shuffle"].random(), objects["old_shuffle"].integers(1000, size=3).tolist()]


def _through_files(objects: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    shared, own = to_trees(objects)
    packed = [pack(shared), pack(own)]
    copies = [({name: each.clone() for name, each in tensors.items()}, structure) for tensors, structure in packed]
    return unpack(*copies[0]), unpack(*copies[1])


def test_everything_that_a_person_may_save_comes_back() -> None:
    objects = _objects()
    _draw(objects)
    objects["average"].values["mean"] += 1.5
    objects["average"].count = 7
    objects["tensor"] += 2
    objects["array"][0, 1] = np.nextafter(1, 2)
    objects["best"], objects["note"]["words"] = float("-inf"), ["b"]
    trees_of_it = _through_files(objects)
    expected = _draw(objects)

    new = _objects()
    values = from_trees(new, *trees_of_it)
    assert _draw(new) == expected
    assert new["average"].values["mean"].tolist() == [1.5] * 3
    assert (new["average"].count, values["best"]) == (7, float("-inf"))
    assert new["tensor"].tolist() == [[2.0] * 3] * 2, "filled in place"
    assert new["array"][0, 1] == np.nextafter(1, 2), "filled in place"
    assert values["note"] == {"words": ["b"], "counts": (1, 2**70)}
    assert all(values[name] is new[name] for name in ("average", "chance", "tensor", "array"))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"average": Average(("mean", "more"))}, "more"),
        ({"average": Average(())}, "mean"),
        ({"tensor": torch.zeros(3, 2, dtype=torch.bfloat16)}, "tensor"),
        ({"tensor": torch.zeros(2, 3)}, "bfloat16"),
        ({"array": np.zeros((2, 2), dtype=np.float32)}, "array"),
        ({"another": 1}, "another"),
        ({"best": torch.Generator()}, "best"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        from_trees({**_objects(), **change}, *_through_files(_objects()))


def test_a_weight_that_learns_is_filled_in_place() -> None:
    weight = torch.ones(2, requires_grad=True)
    from_trees({"weight": weight}, {"weight": torch.tensor([3.0, 4.0])}, {})
    assert weight.tolist() == [3.0, 4.0]
    assert weight.requires_grad


def test_an_array_that_no_checkpoint_holds_is_named() -> None:
    with pytest.raises(CheckpointError, match="words is an array of <U3"):
        to_trees({"words": np.array(["one", "two"])})


def test_a_read_only_array_can_be_saved() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert to_trees({"array": array})[0]["array"].tolist() == [0, 1, 2]


def test_what_differs_by_rank_is_saved_by_rank_and_needs_as_many() -> None:
    state = fresh()
    for each in (state.model, state.optimizer, state.scaler):
        each.differs_by_rank = True  # type: ignore[union-attr]
    advance(state, 2, "fp32")
    shared, own = to_trees(state.objects())
    assert own["model"].keys() == shared["model"].keys(), "and rank 0's as everybody's"
    assert "optimizer" in own
    assert not {"optimizer", "scaler"} & shared.keys()
    other = fresh(seed=1)
    for each in (other.model, other.optimizer, other.scaler):
        each.differs_by_rank = True  # type: ignore[union-attr]
    shared["model"] = {name: torch.zeros_like(value) for name, value in shared["model"].items()}  # another rank's
    from_trees(other.objects(), shared, own)
    for name, value in state.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value)
    with pytest.raises(CheckpointError, match=r"model, optimizer, scaler differ from rank to rank"):
        from_trees(other.objects(), shared, own, is_same_world=False)
    with pytest.raises(CheckpointError, match="saved but not here"):
        from_trees(fresh().objects(), shared, own)


def test_nothing_is_the_same_on_all_ranks() -> None:
    """On another number of ranks too: a run that has no best metric yet comes back on them."""
    assert from_trees({"best_metric": None}, {"best_metric": None}, {}, is_same_world=False) == {"best_metric": None}
