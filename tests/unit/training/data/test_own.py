"""A person's own data: what torch's DataLoader takes works, and what cannot be is said in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from hpc_trainer.errors import ConfigError
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.data.own import as_map_dataset
from hpc_trainer.training.data.protocol import AugmentedDataset, MapDataset

INPUTS, TARGETS = torch.arange(24.0).view(6, 4), torch.arange(6) % 3


class Samples(Dataset[Any]):
    """The least that torch asks for."""

    num_classes = 3

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], int(TARGETS[index])


class Named(Samples):
    def __getitem__(self, index: int) -> Any:
        return {"input": INPUTS[index].numpy(), "target": np.int32(TARGETS[index]), "path": f"{index}.png"}


class NamedBatches(Samples):
    def __getitems__(self, indices: Sequence[int]) -> Any:
        return {"inputs": INPUTS[list(indices)], "targets": TARGETS[list(indices)].int()}


class Torchvision(Samples):
    num_classes = None  # type: ignore[assignment]
    classes = ("ant", "bee", "cat")


class Ours(Samples):
    input_shape = (4,)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return INPUTS[list(indices)], TARGETS[list(indices)]


class Shaking(Named):
    def augment(self, inputs: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        return inputs + 1

    def fingerprint(self) -> str:
        return "abc"


class Two(Samples):
    """Each batch of two is a list of two samples, and no pair of tensors."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return [self[index] for index in indices]


@pytest.mark.parametrize("source", [Samples(), Named(), NamedBatches(), Torchvision(), Two(), Ours(), Shaking()])
def test_what_a_dataloader_takes_works(source: Any) -> None:
    data = as_map_dataset(source, "my.build", "train", CrossEntropy())
    assert isinstance(data, MapDataset)
    assert (len(data), tuple(data.input_shape), data.num_classes) == (6, (4,), 3)
    inputs, targets = data.__getitems__([4, 1])
    assert torch.equal(inputs, INPUTS[[4, 1]])
    assert torch.equal(targets, TARGETS[[4, 1]])
    assert targets.dtype is torch.int64


def test_one_that_speaks_our_protocol_is_handed_on_as_it_is() -> None:
    source = Ours()
    assert as_map_dataset(source, "my.build", "train", CrossEntropy()) is source


def test_a_part_of_one_and_its_augmentation_work_too() -> None:
    part = Subset(Samples(), [5, 3, 1])
    part.num_classes = 3  # type: ignore[attr-defined]
    assert (
        as_map_dataset(part, "my.build", "train", CrossEntropy()).__getitems__([0, 2])[1].tolist()
        == TARGETS[[5, 1]].tolist()
    )
    data = as_map_dataset(Shaking(), "my.build", "train", CrossEntropy())
    assert isinstance(data, AugmentedDataset)
    assert data.fingerprint() == "abc"  # type: ignore[attr-defined]
    assert not isinstance(as_map_dataset(Samples(), "my.build", "train", CrossEntropy()), AugmentedDataset)


class Stream(IterableDataset[Any]):
    num_classes = 3

    def __iter__(self) -> Iterator[Any]:
        return zip(INPUTS, TARGETS, strict=True)


class Endless:
    num_classes = 3

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index % 6], 0


class Other(Samples):
    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __getitem__(self, index: int) -> Any:
        return self.sample


class Nothing(Samples):
    def __len__(self) -> int:
        return 0


class Countless(Samples):
    num_classes = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Stream(), r"built a Stream for split='eval', which has no length or no sample by its number .* __getitem__"),
        (Endless(), "which has no length or no sample by its number"),
        (None, "built a NoneType"),
        (Nothing(), "which is empty"),
        (Countless(), "Give it an attribute num_classes"),
        (Other({"pixel_values": 1, "label": 2}), r"the keys \['label', 'pixel_values'\]. A sample is a pair"),
        (Other((1.0, 2, 3)), "whose samples hold 3 things"),
        (Other(INPUTS), "whose samples hold a Tensor"),
        (Other(({"ids": INPUTS[0]}, 1)), "whose inputs are a dict"),
        (Other((INPUTS[0], "cat")), "whose targets are a"),
    ],
)
def test_what_cannot_be_is_said_with_the_way_out(source: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        as_map_dataset(source, "my.build", "eval", CrossEntropy())
    assert "data._target_=my.build" in str(raised.value)
