"""A person's own tasks, and what they are trained on: samples of several inputs, ragged ones, padded ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset
from torchmetrics import MeanAbsoluteError, R2Score
from torchmetrics.classification import MulticlassAUROC

from hpc_trainer.tasks.cross_entropy import IGNORED
from tests.unit.training.data.padded_parts import CLASSES

NUM_SAMPLES, NUM_EVALUATED = 64, 13
"""Of 2 and of 4 ranks some evaluate one sample more than others."""


class Pairs:
    """Dicts of two inputs of unlike shapes and a number, by `__getitem__` alone."""

    def __init__(self, num_samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x, self.z = torch.randn(num_samples, 3, generator=generator), torch.randn(num_samples, generator=generator)
        self.lengths = torch.randint(1, 6, (num_samples,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, z = self.x[index], self.z[index]
        return {"x": x, "z": z, "y": x.sum() * z}


class Ragged(Pairs):
    """Rows of unlike lengths."""

    def __getitem__(self, index: int) -> Any:
        rows = self.x[index].repeat(self.lengths[index], 1)
        return rows, self.x[index].sum()


def pairs(split: str) -> Pairs:
    return Pairs(NUM_SAMPLES, 0) if split == "train" else Pairs(NUM_EVALUATED, 1)


def ragged(split: str) -> Ragged:
    return Ragged(NUM_SAMPLES, 0) if split == "train" else Ragged(NUM_EVALUATED, 1)


class Flow(IterableDataset):
    """Epochs of 26 samples, which no global batch divides; random ones, by a generator of its own."""

    def __init__(self) -> None:
        self.position, self.random = 0, torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.position < 26:
            self.position += 1
            x, z = torch.randn(3, generator=self.random), torch.randn((), generator=self.random)
            yield {"x": x, "z": z, "y": x.sum() * z}
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.random.set_state(state["random"])


def flow(split: str) -> Flow | Pairs:
    return Flow() if split == "train" else Pairs(NUM_EVALUATED, 1)


class TwoInputs(nn.Module):
    """Takes no shape of the data."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.x, self.z, self.head = nn.Linear(3, width), nn.Linear(1, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.x(x) + self.z(z[:, None])))
        return found.squeeze(1)


class Fit:
    """With metrics of both kinds."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        found = model(batch["x"], batch["z"]).float()
        off = (found - batch["y"]).abs()
        return off.square().mean(), {"off": off.mean(), "r2": (found, batch["y"]), "mae": (found, batch["y"])}

    def metrics(self) -> dict[str, Any]:
        return {"r2": R2Score(), "mae": MeanAbsoluteError()}


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(rows)
        return found.squeeze(-1)


class OfRows:
    """The loss is a mean over rows, of which samples have unlike numbers."""

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        lengths = [len(rows) for rows, _ in samples]
        return {
            "rows": torch.cat([rows for rows, _ in samples]),
            "wanted": torch.cat([wanted.repeat(length) for (_, wanted), length in zip(samples, lengths, strict=True)]),
            "lengths": lengths,
        }

    def num_targets(self, batch: dict[str, Any]) -> int:
        return sum(batch["lengths"])

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return functional.l1_loss(model(batch["rows"]).float(), batch["wanted"])


class OwnCrossEntropy:
    """What the shipped one does, said by a person."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        logits = model(inputs).float()
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        right = ((logits.argmax(-1) == targets) & (targets != IGNORED)).sum() / (targets != IGNORED).sum()
        return loss, {"accuracy": right.nan_to_num(), "auroc": (logits.flatten(0, -2).softmax(-1), targets.flatten())}

    def num_targets(self, batch: Any) -> int:
        return int((batch[1] != IGNORED).sum())

    def metrics(self) -> dict[str, Any]:
        return {"auroc": MulticlassAUROC(CLASSES, ignore_index=IGNORED)}
