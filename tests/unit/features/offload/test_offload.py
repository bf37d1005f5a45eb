"""A step in pieces is the step: in the backward pass, and with moments that live elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpc_trainer.config.schema.optim import AdamwConfig, LionConfig, OptimConfig, SgdConfig
from hpc_trainer.features.offload import offload as optim_place
from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.checkpoint import objects
from hpc_trainer.training.checkpoint.objects import Names, from_trees, load_optimizer, to_trees
from tests.unit.training.built_parts import optimizer_of, place

KINDS = {
    "adamw": lambda **more: AdamwConfig(lr=0.1, weight_decay=0.1, **more),
    "sgd": lambda **more: SgdConfig(lr=0.1, weight_decay=0.1, **more),
    "lion": lambda **more: LionConfig(lr=0.1, weight_decay=0.1, **more),
    "plain": lambda **more: SgdConfig(lr=0.1, momentum=0.0, nesterov=False, **more),
}


class Tied(nn.Module):
    """A weight that is used twice, and one that is not used in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.rare = nn.Parameter(torch.ones(6))

    def forward(self, inputs: torch.Tensor, *, is_rare: bool) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(inputs)))
        outputs: torch.Tensor = self.last(hidden * self.rare if is_rare else hidden)
        return outputs.square().mean()


def _train(config: OptimConfig, *, first: int = 0, state: Any = None) -> tuple[Tied, torch.optim.Optimizer, Any]:
    """Six steps, or those from `first` on with the state that the first one left: (model, optimizer, state at 3)."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = optimizer_of(config, model)
    if state is not None:
        from_trees({"model": model, "optimizer": optimizer}, *state)
    middle = None
    for step in range(6):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        if step < first:
            continue
        if step == 3:
            shared, own = to_trees({"model": model, "optimizer": optimizer})
            middle = torch.utils._pytree.tree_map(
                lambda each: each.clone() if isinstance(each, torch.Tensor) else each, (shared, own)
            )
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        model(inputs, is_rare=step % 2 == 0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, optimizer, middle


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Path -> leaf; the order of weights in an optimizer's state is that in which they were first updated."""
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return {path: tree}
    return {key: leaf for name, item in items for key, leaf in _leaves(item, f"{path}/{name}").items()}


def _same(left: Any, right: Any) -> bool:
    ours, theirs = _leaves(left), _leaves(right)
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]
        for key, value in ours.items()
    )


@pytest.fixture(params=["in_backward", "offload"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(optim_place, "PIECE", 100)  # bytes: more than one piece a group
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_whole_step(kind: str, way: str) -> None:
    plain, placed = _train(KINDS[kind]()), _train(KINDS[kind](**{way: True}))
    trees = [to_trees({"model": model, "optimizer": optimizer})[0] for model, optimizer, _ in (plain, placed)]
    assert _same(*trees)


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_a_checkpoint_of_either(kind: str, way: str) -> None:
    whole = _train(KINDS[kind]())
    placed = _train(KINDS[kind](**{way: True}))
    expected = to_trees({"model": whole[0], "optimizer": whole[1]})[0]
    for config, state in ((KINDS[kind](**{way: True}), whole[2]), (KINDS[kind](), placed[2])):
        model, optimizer, _ = _train(config, first=3, state=state)
        assert _same(to_trees({"model": model, "optimizer": optimizer})[0], expected)


def test_a_gradient_is_freed_before_the_next_is_made() -> None:
    config = KINDS["adamw"](in_backward=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer_of(config, model)
    most = 0

    def count(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(weight.grad is not None for weight in model.parameters()))

    for weight in model.parameters():
        weight.register_hook(count)
    before = [weight.detach().clone() for weight in model.parameters()]
    model(torch.ones(2, 4)).sum().backward()
    assert most <= 1
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_moments_are_other_memory_in_a_step_than_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = KINDS["adamw"](offload=True)
    model = nn.Linear(4, 4)
    optimizer = optimizer_of(KINDS["adamw"](), model)
    seen: list[int] = []
    inner = optimizer.step

    def look() -> Any:
        seen.extend(each["exp_avg"].data_ptr() for each in optimizer.state.values() if "exp_avg" in each)
        return inner()

    monkeypatch.setattr(optimizer, "step", look)
    place(optimizer, config)
    homes = []
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        homes.append([each["exp_avg"].data_ptr() for each in optimizer.state.values()])
    assert homes[0] == homes[1] == homes[2], "the same place in host memory"
    assert model.weight.grad is not None
    assert set(seen) - set(homes[0]), "a step works on copies"


def test_a_gpus_moments_are_not_brought_to_it_by_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's load_state_dict copies all of them to where the weights are: it is given none."""
    config = KINDS["adamw"](offload=True)
    model, optimizer, _ = _train(config)
    shared, own = to_trees({"model": model, "optimizer": optimizer})
    other = Tied()
    loaded = optimizer_of(config, other)
    seen: list[Any] = []
    load = type(loaded).load_state_dict

    def spy(self: Any, state: Any) -> None:
        seen.extend(value for each in state["state"].values() for value in each.values())
        load(self, state)

    monkeypatch.setattr(type(loaded), "load_state_dict", spy)
    from_trees({"model": other, "optimizer": loaded}, shared, own)
    assert seen
    assert all(not value.ndim for value in seen)
    assert _same(to_trees({"model": other, "optimizer": loaded})[0], shared)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two GPUs that are not there, seen from the first: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cuda", (2,))
        with FakeTensorMode():
            yield mesh
    finally:
        dist.destroy_process_group()


def _on_gpus(mesh: DeviceMesh, sharing: str) -> nn.Module:
    """Tensors with a device and no content: nothing is computed, and copies are seen by where they end."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    for part in model:
        for name, weight in list(part.named_parameters()):
            shape, is_cut = list(weight.shape), sharing == "fsdp"
            rows = (shape[0] + 1) // 2 if is_cut else shape[0]  # of five rows the first rank has three
            here: torch.Tensor = torch.empty([rows, *shape[1:]], device="cuda")
            if is_cut:
                here = DTensor.from_local(
                    here, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride()
                )
            setattr(part, name, nn.Parameter(here))
    return model


def _moments_at(optimizer: Any) -> dict[str, list[str]]:
    """Kind of state -> the devices of this rank's memory for it, also of a DTensor's part."""
    found: dict[str, list[str]] = {}
    for values in getattr(optimizer, "optim", optimizer).state.values():
        for key, value in values.items():
            assert value.device == local_tensor(value).device
            found.setdefault(key, []).append(value.device.type)
    return found


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, behind ZeRO
@pytest.mark.parametrize("sharing", ["none", "fsdp", "zero1"])
def test_on_a_gpu_moments_are_in_host_memory_but_in_their_piece_of_a_step(
    mesh: DeviceMesh, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place for them there is pinned, and they are those of the rank's own parts."""
    monkeypatch.setattr(optim_place, "PIECE", 1)  # a weight at a time
    config, model = KINDS["adamw"](offload=True), _on_gpus(mesh, sharing)
    optimizer = optimizer_of(KINDS["adamw"](), model, zero1=sharing == "zero1")
    own: Any = getattr(optimizer, "optim", optimizer)
    in_step, kernels = list[int](), own.step

    def look() -> Any:
        result = kernels()
        in_step.append(sum(where == "cuda" for key, at in _moments_at(own).items() for where in at if key != "step"))
        return result

    pinned, make = list[Any](), torch.empty_like

    def see(*args: Any, **more: Any) -> torch.Tensor:
        pinned.append(more.get("pin_memory"))
        return make(*args, **more)

    monkeypatch.setattr(dist, "broadcast", Mock())  # of ZeRO's weights; it asks the GPU what it is
    monkeypatch.setattr(own, "step", look)
    monkeypatch.setattr(torch, "empty_like", see)
    place(own, config)
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        count = 2 if sharing == "zero1" else 4
        assert _moments_at(optimizer) == {
            "step": ["cuda"] * count, "exp_avg": ["cpu"] * count, "exp_avg_sq": ["cpu"] * count
        }  # fmt: skip
    assert in_step == [2] * 2 * count, "both moments of one weight"
    assert pinned
    assert all(pinned)
    is_whole = [each["exp_avg"].shape == local_tensor(each["exp_avg"]).shape for each in own.state.values()]
    assert is_whole == [sharing != "fsdp"] * count


@pytest.mark.parametrize("sharing", ["none", "fsdp"])
def test_on_a_gpu_what_is_loaded_stays_in_host_memory(
    mesh: DeviceMesh, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(objects, "fill", lambda goal, saved: None)  # a DTensor's place is counted by numbers
    config, model = KINDS["adamw"](offload=True), _on_gpus(mesh, sharing)
    optimizer = optimizer_of(config, model)
    whole = {
        name: {key: torch.zeros(weight.shape) for key in ("exp_avg", "exp_avg_sq")} | {"step": torch.ones(())}
        for name, weight in model.named_parameters()
    }
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = [
        {**group, "params": [names[id(weight)] for weight in group["params"]]} for group in optimizer.param_groups
    ]
    load_optimizer("optimizer", optimizer, {"state": whole, "param_groups": groups}, Names(names))
    assert _moments_at(optimizer) == {"step": ["cuda"] * 4, "exp_avg": ["cpu"] * 4, "exp_avg_sq": ["cpu"] * 4}
    stream.synchronize.assert_called_once_with()  # what was sent to host memory is there before the state is read
