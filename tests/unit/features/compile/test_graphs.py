"""What is compiled, how often, and what stays as it was. The compiler itself is left out here (`backend="eager"`)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.model import GptConfig, ResnetConfig
from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.config.schema.train import CompileScope, LoopConfig, Recompute
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.compile.graphs import compilations_within, compile_step, graph_counts
from hpc_trainer.features.pipeline.cut import Between, keep, stages_of
from hpc_trainer.features.pipeline.step import run_parts
from hpc_trainer.features.recompute.recompute import recompute_blocks
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.resnet import Resnet
from hpc_trainer.record.ledger import Kind
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.parallel.share import VotingLoss

compile_really = torch.compile
_AT_IMPORT = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's
_BOTH = pytest.mark.parametrize("scope", list(CompileScope))


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(compile_really, backend="eager"))
    yield
    torch._dynamo.reset()


@pytest.fixture
def partitioner(compiler: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Instead of the eager backend one that decides what the backward pass keeps, and makes no kernels."""
    monkeypatch.setattr(torch, "compile", functools.partial(compile_really, backend="aot_eager_decomp_partition"))
    with torch._functorch.config.patch(activation_memory_budget=1.0):  # back at the end
        yield


def _loss(scope: CompileScope | None, recompute: Recompute = Recompute.none) -> tuple[VotingLoss, nn.Module]:
    torch.manual_seed(3)
    model = Gpt(GptConfig(num_layers=3, embed_dim=32, dropout=0.2), input_shape=(16,), num_classes=50)
    loss = VotingLoss(model, CrossEntropy())
    if scope is not None:
        compile_step(loss, LoopConfig(compile=True, compile_scope=scope))
    recompute_blocks(model, recompute)
    return loss, model


def _train(loss: nn.Module, num_steps: int = 3, batch_size: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(num_steps):
        tokens = torch.randint(50, (batch_size, 16), generator=generator)
        value = loss((tokens, tokens))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("scope", "recompute"),
    [
        (CompileScope.model, Recompute.none),
        (CompileScope.blocks, Recompute.none),
        (CompileScope.blocks, Recompute.full),
    ],
)
def test_trains_as_without_and_names_stay(scope: CompileScope, recompute: Recompute) -> None:
    plain, _ = _loss(None)
    torch.manual_seed(9)
    expected = _train(plain)
    loss, _ = _loss(scope, recompute)
    torch.manual_seed(9)
    assert _train(loss) == expected
    assert graph_counts()["graphs"] > 0
    assert graph_counts()["failed"] == 0
    assert loss.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(mine, plain.state_dict()[name]) for name, mine in loss.state_dict().items())


def test_blocks_that_are_alike_are_compiled_once() -> None:
    loss, _ = _loss(CompileScope.blocks)
    _train(loss, num_steps=1)
    assert graph_counts()["graphs"] == 1, "three blocks of one shape"


def test_stages_compile_the_blocks_that_they_keep() -> None:
    """One after the other they give what the whole model gives; those that keep no block compile nothing."""
    whole, precision = _loss(None)[1], PrecisionConfig()
    stages = stages_of(
        whole, 5, inputs=Between((4, 16), torch.int64), precision=precision, device_type="cpu"
    )  # fmt: skip
    losses = [_loss(None)[0] for _ in stages]
    for loss, stage in zip(losses, stages, strict=True):
        keep(loss.model, stage)
        run_parts(loss.model, stage, precision, channels_last=False)
        compile_step(loss, LoopConfig(compile=True, compile_scope=CompileScope.blocks))
    tokens = torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(5))
    torch.manual_seed(9)
    expected = whole(tokens)
    torch.manual_seed(9)
    value, graphs = tokens, []
    for loss in losses:
        value = loss.model(value)
        graphs.append(graph_counts()["graphs"])
    assert torch.equal(value, expected)
    assert graphs == [0, 1, 1, 1, 1]


@pytest.mark.few(1)
@_BOTH
def test_evaluations_of_any_size_compile_nothing(scope: CompileScope) -> None:
    loss, model = _loss(scope)
    _train(loss)
    before = graph_counts()
    for batch_size in (4, 256, 3):
        loss.eval()
        with torch.no_grad():
            model(torch.zeros(batch_size, 16, dtype=torch.int64))
            loss((torch.zeros(batch_size, 16, dtype=torch.int64), None), asked=lambda model, batch: model(batch[0]))
        loss.train()
        _train(loss, num_steps=1)
    assert graph_counts() == before
    _train(loss, num_steps=1, batch_size=5)
    assert graph_counts()["graphs"] > before["graphs"], "the counter sees what it should"


@pytest.mark.few(1)
@_BOTH
def test_a_copy_runs_on_its_own_weights(scope: CompileScope) -> None:
    loss, model = _loss(scope)
    other = copy.deepcopy(model)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    for mode in (True, False):
        other.train(mode)
        assert not other(tokens).any(), "a copy that ran the original's blocks would not give zeros"
    assert loss((tokens, tokens)).item() > 0
    assert copy.deepcopy(loss).state_dict().keys() == loss.state_dict().keys()


@pytest.mark.long
def test_a_resnet_of_many_shapes_is_compiled_whole() -> None:
    """Blocks of eight shapes are one piece of code: torch gives up after eight graphs unless it is told otherwise."""
    loss = VotingLoss(Resnet(ResnetConfig(depth=50, width=4), input_shape=(3, 8, 8), num_classes=10), CrossEntropy())
    compile_step(loss, LoopConfig(compile=True, compile_scope=CompileScope.blocks))
    images, targets = torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    loss((images, targets)).backward()
    assert graph_counts()["graphs"] == 8
    assert graph_counts()["failed"] == 0


def _budgeted(budget: float, dropout: float = 0.0) -> tuple[VotingLoss, nn.Module]:
    torch.manual_seed(3)
    model = Gpt(GptConfig(num_layers=2, embed_dim=32, dropout=dropout), input_shape=(16,), num_classes=50)
    loss = VotingLoss(model, CrossEntropy())
    compile_step(loss, LoopConfig(compile=True, recompute=Recompute.budget, recompute_budget=budget))
    recompute_blocks(model, Recompute.budget)
    return loss, model


@pytest.mark.long
@_AT_IMPORT
def test_a_budget_is_kept_and_the_gradient_is_the_same(partitioner: None) -> None:
    tokens = torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(5))
    kept: dict[float, int] = {}
    gradients: dict[float, torch.Tensor] = {}
    for budget in (1.0, 0.5, 0.1):
        loss, model = _budgeted(budget)
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = loss((tokens, tokens))
        value.backward()
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        kept[budget] = sum(size for place, size in seen.items() if place not in weights)
        gradients[budget] = torch.cat([weight.grad.flatten() for weight in model.parameters()])  # type: ignore[union-attr]
        torch._dynamo.reset()
    assert kept[0.5] < 0.6 * kept[1.0], kept
    assert kept[0.1] < 0.2 * kept[1.0], kept
    for budget in (0.5, 0.1):
        torch.testing.assert_close(gradients[budget], gradients[1.0], rtol=1e-5, atol=1e-7)


@pytest.mark.long
@_AT_IMPORT
def test_a_budget_refuses_dropout_in_its_first_pass(partitioner: None) -> None:
    """Whoever draws: gradients were off by a quarter without a word (torch 2.13)."""
    loss, _ = _budgeted(0.5, dropout=0.1)
    tokens = torch.randint(50, (4, 16))
    with pytest.raises(ConfigError, match="draws random numbers"):
        loss((tokens, tokens))


def test_each_compilation_is_a_span_and_later_steps_have_none() -> None:
    spans, (loss, _) = Spans(), _loss(CompileScope.blocks)
    with compilations_within(lambda: spans.within(Kind.compile)):
        with spans.within(Kind.step):
            _train(loss, num_steps=1)
        found = [kind for kind, *_ in spans.recent() if kind is Kind.compile]
        compiled_s = spans.seconds()[Kind.compile]
        assert len(found) >= 1
        assert compiled_s > 0.01
        _train(loss, num_steps=2)
        assert spans.seconds()[Kind.compile] == compiled_s
    torch._dynamo.reset()
    _train(loss, num_steps=1)
    assert spans.seconds()[Kind.compile] == compiled_s, "nobody listens any more"
