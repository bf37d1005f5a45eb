"""The loss a few rows at a time: the plain one's value and gradients, and never all logits in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.config.schema.train import LoopConfig, TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.chunked_loss.chunked_loss import ChunkedLossAbility, check_has_head, use_chunks
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.data.order import BatchSizes
from hpc_trainer.training.evaluate import evaluate
from hpc_trainer.training.parallel.share import VotingLoss
from tests.unit.training.built_parts import building_of

CLASSES, ROWS = 61, (5, 12)


def _loss(model: nn.Module, chunk_size: int | None, *, label_smoothing: float = 0.0) -> VotingLoss:
    loss = VotingLoss(model, CrossEntropy(label_smoothing))
    if chunk_size is not None:
        use_chunks(loss, chunk_size)
    return loss


def _gradients(
    chunk_size: int | None, *, smoothing: float = 0.0, bf16: bool = False, targets: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = Gpt(GptConfig(num_layers=1, num_heads=2, embed_dim=16), input_shape=(12,), num_classes=CLASSES)
    for weight in model.parameters():
        weight.data *= 5  # logits that tell classes apart
    inputs = torch.randint(CLASSES, ROWS, generator=torch.Generator().manual_seed(2))
    loss_of = _loss(model, chunk_size, label_smoothing=smoothing)
    with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext():
        loss = loss_of((inputs, inputs.roll(1, 1) if targets is None else targets))
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("chunk_size", [1, 7, 20, 60, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_value_and_gradients_are_the_plain_ones(chunk_size: int, smoothing: float) -> None:
    """Sums in another order: 1e-6 relative in fp32."""
    loss, gradients = _gradients(None, smoothing=smoothing)
    chunked, others = _gradients(chunk_size, smoothing=smoothing)
    torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=0)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()), msg=name)


def test_targets_that_do_not_count() -> None:
    targets = torch.randint(CLASSES, ROWS, generator=torch.Generator().manual_seed(4))
    targets[:, 7:] = -100
    loss, gradients = _gradients(None, targets=targets)
    chunked, others = _gradients(13, targets=targets)
    torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(others["token_embedding.weight"], gradients["token_embedding.weight"])


def test_many_chunks_in_bf16_lose_nothing_of_the_weights_gradient() -> None:
    """Against fp32: each chunk's gradient is made fp32 before it is added, so 60 chunks are as good as one."""
    _, exact = _gradients(None)
    errors = []
    for chunk_size in (None, 1):
        _, gradients = _gradients(chunk_size, bf16=True)
        name = "token_embedding.weight"
        assert gradients[name].dtype == torch.float32
        errors.append(float((gradients[name] - exact[name]).norm() / exact[name].norm()))
    assert errors[1] < 1.2 * errors[0] < 0.05


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of the largest tensor that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.numel() * each.element_size())
        return result


def test_all_logits_are_never_there() -> None:
    """A vocabulary of 50,000 and 4,096 tokens: 819 MB of logits for the plain loss, a chunk's 51 MB for the other."""
    sizes = {}
    for chunk_size in (None, 256):
        with FakeTensorMode():
            model = Gpt(GptConfig(num_layers=1, num_heads=2, embed_dim=64), input_shape=(1024,), num_classes=50_000)
            loss_of = _loss(model, chunk_size)
            inputs = torch.zeros(4, 1024, dtype=torch.int64)
            with _Largest() as largest:
                loss_of((inputs, inputs)).backward()
        sizes[chunk_size] = largest.bytes
    assert sizes == {None: 4096 * 50_000 * 4, 256: 256 * 50_000 * 4}


class _Tokens:
    """Eleven windows of 12 tokens; remembers how many were asked for at a time."""

    input_shape, num_classes = (12,), CLASSES

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 11

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(len(indices))
        rows = [torch.randint(CLASSES, (12,), generator=torch.Generator().manual_seed(index)) for index in indices]
        return torch.stack(rows), torch.stack(rows).roll(1, 1)


def test_an_evaluation_takes_as_few_rows() -> None:
    model = Gpt(GptConfig(num_layers=1, num_heads=2, embed_dim=16), input_shape=(12,), num_classes=CLASSES)
    found = []
    for max_rows, sizes in ((None, [11]), (30, [1, 2, 2, 2, 2, 2, 1]), (5, [1] * 12)):
        tokens, size = _Tokens(), 64
        if max_rows is not None:
            ability = ChunkedLossAbility(TrainConfig(train=LoopConfig(loss_chunk_size=max_rows)))
            given = BatchSizes(micro_batch_size=1, grad_accum_steps=1, eval_batch_size=size)
            building = building_of(ability.config, eval_set=tokens, abilities=())
            size = ability.sizes(given, VotingLoss(model, CrossEntropy()), building).eval_batch_size
        values = evaluate(
            model, tokens, task=CrossEntropy(), group=RankGroup(), batch_size=size, precision=PrecisionConfig()
        )
        assert tokens.asked == sizes
        assert values is not None
        found.append(values)
    for values in found[1:]:
        assert values == pytest.approx(found[0], rel=1e-6)


def test_a_model_must_show_its_head() -> None:
    with pytest.raises(ConfigError, match="runs the output layer separately, which Linear does not support"):
        check_has_head(nn.Linear(3, 3))


class _Own(nn.Module):
    """A model whose head is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, inputs: torch.Tensor, *, with_head: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.body(inputs))
        return self.apply_head(hidden) if with_head else hidden

    def apply_head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits


def test_a_model_of_ones_own() -> None:
    torch.manual_seed(0)
    model = _Own()
    inputs, targets = torch.randn(9, 6), torch.randint(5, (9,))
    torch.testing.assert_close(_loss(model, 4)((inputs, targets)), VotingLoss(model, CrossEntropy())((inputs, targets)))
    found = _loss(model, 4)((inputs, targets), asked=lambda model, batch: model(batch[0]))  # as an evaluation does
    assert torch.equal(found, model(inputs))
