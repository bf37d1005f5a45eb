"""Batches of any form."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.tasks.own import OwnTask
from hpc_trainer.training.data.batches import map_tensors, of_size, tensors_of, without_content


class _Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class _Record:
    ids: torch.Tensor
    name: str


def test_tensors_are_changed_and_all_else_stays() -> None:
    one = torch.ones(2)
    batch = (one, [one, "text"], {"a": _Pair(one, None)}, OrderedDict(b=_Record(one, "x")), 3)
    changed = map_tensors(batch, lambda each: each + 1)
    assert [each.tolist() for each in tensors_of(changed)] == [[2.0, 2.0]] * 4
    assert [type(each) for each in changed] == [torch.Tensor, list, dict, dict, int]
    assert changed[1][1] == "text"
    assert isinstance(changed[2]["a"], _Pair)
    assert changed[3]["b"].name == "x"
    assert one.tolist() == [1.0, 1.0]
    assert map_tensors(one, torch.neg).tolist() == [-1.0, -1.0]


def test_a_trial_s_batch_is_copies_of_the_first_sample() -> None:
    class Data:
        asked: Any = None

        def __getitems__(self, indices: Any) -> Any:
            self.asked = list(indices)
            return {"x": torch.ones(len(self.asked), 2)}

    data: Any = Data()
    own: Any = OwnTask(object(), "it")
    assert of_size(data, own, None, 3)["x"].shape == (3, 2)
    assert data.asked == [0, 0, 0]
    pair = of_size(data, CrossEntropy(), (torch.ones(1, 4), torch.zeros(1, dtype=torch.int64)), 5)
    assert [tuple(each.shape) for each in without_content(pair)] == [(5, 4), (5,)]
    assert [each.dtype for each in without_content(pair)] == [torch.float32, torch.int64]
