"""What a model needs to be shared out among tensor-parallel ranks, and what a layer of its own draws there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.tensor_parallel.tensor_parallel import find_plan, share_layers
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.transformer import own_random_stream
from hpc_trainer.training.optim.build import place_gradients


class Theirs(nn.Module):
    """A person's own; `plan` is what it says."""

    def __init__(self, plan: dict[str, Any], *, is_tied: bool = False, has_own: bool = False) -> None:
        super().__init__()
        self.plan = plan
        self.wide, self.narrow, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        if is_tied:
            self.again = nn.Linear(4, 8)
            self.again.weight = self.wide.weight
        if has_own:
            self.gain = nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.norm(self.narrow(torch.relu(self.wide(inputs))))
        return outputs

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return self.plan


def _plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of one rank, as if it were one of several: what is refused is refused before ranks speak."""
    path: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(path), 1), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    devices = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    yield SimpleNamespace(shape=SimpleNamespace(tp=2), dim=lambda name: devices, groups_of_stage=lambda: [None])
    dist.destroy_process_group()


def test_a_model_of_your_own_is_shared_out_by_its_plan(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.manual_seed(1)
    model, inputs = Theirs(_plan()), torch.randn(3, 4)
    expected, names = model(inputs), list(model.state_dict())
    share_layers(model, mesh, find_plan(model, mesh))
    assert torch.equal(model(inputs), expected)
    assert list(model.state_dict()) == names
    placed = {name: weight.placements for name, weight in model.named_parameters() if isinstance(weight, DTensor)}
    assert placed.keys() == set(names)
    assert placed["wide.weight"] == (Shard(0),)
    assert placed["narrow.weight"] == (Shard(1),)
    assert placed["norm.weight"] == (Replicate(),), "what the plan does not name is copied"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2), "Linear has none. Give it a method `tensor_parallel_plan`"),
        (Theirs({}, is_tied=True), "weights that Theirs ties"),
        (Theirs({}, has_own=True), "the model itself holds parameters of its own (gain)"),
    ],
)
def test_what_is_refused(mesh: Any, model: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        share_layers(model, mesh, find_plan(model, mesh))
    assert words in str(caught.value)


def test_a_plan_that_names_what_is_not_there_is_refused(mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel

    with pytest.raises(ConfigError, match="does not fit the model: it has no layer 'wider'"):
        find_plan(Theirs({"wider": ColwiseParallel()}), mesh)
    with pytest.raises(ConfigError, match="does not fit the model"):
        share_layers(Theirs({}), mesh, {"norm": ColwiseParallel()})


def test_the_plan_of_gpt_names_layers_that_it_has() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel

    model = Gpt(GptConfig(num_heads=2, embed_dim=8), input_shape=(4,), num_classes=8)
    plan = model.tensor_parallel_plan()
    names = {name.replace("blocks.0", "blocks.*") for name, _ in model.named_modules()}
    assert plan.keys() <= names
    assert isinstance(plan["blocks.*.attention.query_key_value"], ColwiseParallel)


def test_the_gradient_of_an_embedding_lies_as_its_rows_do(mesh: Any) -> None:
    """torch gives each rank the whole: a norm that adds up what ranks hold would count it as often as there are."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import RowwiseParallel

    model = nn.Sequential(nn.Embedding(8, 4))
    share_layers(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
    model(torch.arange(8)).square().sum().backward()
    (weight,) = model.parameters()
    whole: Any = weight.grad
    assert whole.placements == (Replicate(),), "torch lays it out itself: place_gradients can go"
    place_gradients([weight])
    placed: Any = weight.grad
    assert placed.placements == (Shard(0),)
    assert torch.equal(placed.full_tensor(), whole.full_tensor())


class Dropping(nn.Module):
    dropout = 0.5

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(inputs, self.dropout, self.training)


def _drawn(rank: int, *, is_training: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    layer = Dropping().train(is_training)
    own_random_stream()._apply(layer, SimpleNamespace(get_local_rank=lambda: rank))  # type: ignore[arg-type]
    torch.manual_seed(5)
    layer(torch.ones(8))
    return layer(torch.ones(64)), torch.get_rng_state()


def test_a_layer_of_heads_draws_its_rank_s_own_numbers_and_the_common_stream_goes_on() -> None:
    (first, after), (again, _), (second, after_second) = _drawn(0), _drawn(0), _drawn(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(after, after_second)
    torch.manual_seed(5)
    assert not torch.equal(after, torch.get_rng_state()), "the next layer must not draw the same"


def test_an_evaluation_draws_nothing() -> None:
    _, after = _drawn(1, is_training=False)
    torch.manual_seed(5)
    assert torch.equal(after, torch.get_rng_state())


def test_the_common_stream_comes_back_from_a_layer_that_fails() -> None:
    """Recomputation leaves layers by an exception of its own."""

    class Failing(Dropping):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            super().forward(inputs)
            raise RuntimeError("enough")

    layer = Failing()
    own_random_stream()._apply(layer, SimpleNamespace(get_local_rank=lambda: 3))  # type: ignore[arg-type]
    _, expected = _drawn(0)
    torch.manual_seed(5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="enough"):
            layer(torch.ones(8))
    assert torch.equal(torch.get_rng_state(), expected)
