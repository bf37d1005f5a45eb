"""What stands for a data set in a process that estimates: the same shapes, and nothing of its size."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_trainer.training.data.batches import StandIn

PAIRS: Any = SimpleNamespace(takes_pairs=True)
ANY: Any = SimpleNamespace(takes_pairs=False)


class Samples:
    """Batches as `make` makes them of so many samples."""

    def __init__(self, make: Any, shape: tuple[int, ...] | None = None) -> None:
        self.make, self.input_shape, self.num_classes = make, shape, 7

    def __len__(self) -> int:
        return 1000

    def __getitems__(self, indices: Any) -> Any:
        return self.make(len(indices))


def _handed_over(dataset: Any, task: Any, size: int) -> StandIn:
    plain = StandIn.of(dataset, task, size).to_plain()
    assert plain is not None
    return StandIn.from_plain(json.loads(json.dumps(plain)))


def test_pairs_have_the_same_shapes_and_formats_there() -> None:
    images = Samples(lambda n: (torch.randn(n, 3, 256, 256), torch.ones(n, dtype=torch.int64)), (3, 256, 256))
    found = _handed_over(images, PAIRS, 64)
    assert (found.input_shape, found.num_classes, len(found)) == ((3, 256, 256), 7, 1000)
    for size in (1, 64):
        inputs, targets = found.__getitems__(range(size))
        assert (inputs.shape, inputs.dtype) == ((size, 3, 256, 256), torch.float32)
        assert (targets.shape, targets.dtype) == ((size,), torch.int64)
    assert inputs.untyped_storage().nbytes() == 4
    with pytest.raises(ValueError, match="batches of 64 samples asked for 3"):
        found.__getitems__(range(3))


def test_batches_of_any_form_come_back_as_they_are() -> None:
    def make(n: int) -> Any:
        return {"x": [torch.zeros(n, 2, dtype=torch.bfloat16), None], 3: ("word", 1.5, True, (n,))}

    found = _handed_over(Samples(make), ANY, 4)
    batch = found.__getitems__([0] * 4)
    assert batch[3] == ("word", 1.5, True, (4,))
    assert (batch["x"][0].shape, batch["x"][0].dtype, batch["x"][1]) == ((4, 2), torch.bfloat16, None)
    assert found.input_shape is None


def test_objects_that_nobody_can_describe_are_not_handed_over() -> None:
    assert StandIn.of(Samples(lambda n: {"graph": object()}), ANY, 4).to_plain() is None
