"""What a feature may do to a run: the one way in which the shared loop and a feature know of each other.

A feature of `hpc_trainer/features/NAME` that does anything in a run has a module `ability` with one class derived from
`Ability`, named `ABILITY`. Each method is a hook that the core calls at its place, with what exists by then; whoever
leaves one out changes nothing there. Inside one hook features do not depend on each other, but for `Feature.after`.
"""

from __future__ import annotations

import contextlib
import graphlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_trainer.config.feature import Feature
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table import PACKAGE, features

if TYPE_CHECKING:
    from hpc_trainer.datasets.protocol import MapDataset
    from hpc_trainer.training.context import RunContext
    from hpc_trainer.training.parallel.mesh import Mesh
    from hpc_trainer.training.state import TrainState


@dataclass(slots=True, kw_only=True)
class Building:
    """What hooks are given while a run is built."""

    config: TrainConfig
    device: torch.device
    dataset: MapDataset
    """The training samples."""
    mesh: Mesh | None = None
    """None: an estimate on one rank, of one rank's part."""
    run: RunContext | None = None
    """None: nothing will run; tensors have shapes and no content (the memory estimate)."""


class Ability:
    """A feature at work in one rank. All hooks are called on all ranks, in the order in which they stand here."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def see_whole(self, model: nn.Module, building: Building) -> None:
        """`model` is whole, on the CPU, and has its first weights. Raises ConfigError: it is none for this feature."""

    def on_device(self, model: nn.Module, building: Building) -> None:
        """`model` has come to the device: layers may be replaced or cut up, in place."""

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        """`loss` is the model with its loss, on the device, before ranks share it."""

    def trying(self) -> contextlib.AbstractContextManager[None]:
        """Around passes of other shapes than the run's, whose results nobody keeps."""
        return contextlib.nullcontext()

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        """`state` has model and optimizer, `module` is what ranks share the loss by. Nothing is restored yet.

        What has to be in a checkpoint goes into `state.more`, by a name of the feature's own.
        """

    def after_update(self) -> None:
        """After each update of the weights, skipped ones too. No wait for the device."""

    def after_step(self, step: int) -> None:
        """A step is done, the `step`-th of the run."""

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Around each evaluation."""
        return contextlib.nullcontext()

    def held(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Tensors that it holds, under a name of the memory report; asked when all is built."""
        return {}

    def close(self) -> None:
        """At the run's end, however it ends."""


def abilities(config: TrainConfig) -> list[Ability]:
    """Those of the features that are on; after others where a feature says so."""
    found = {each.name: each for each in features() if each.has_ability and each.is_on(config)}
    order = graphlib.TopologicalSorter({name: set(each.after) & found.keys() for name, each in sorted(found.items())})
    return [_load(found[name])(config) for name in order.static_order()]


def _load(feature: Feature) -> type[Ability]:
    kind: type[Ability] = importlib.import_module(f"{PACKAGE}.{feature.name}.ability").ABILITY
    return kind


def overridden(given: Sequence[Ability], hook: str) -> list[Any]:
    """The bound methods of those that have this hook: one that does nothing is not called in each step."""
    return [getattr(each, hook) for each in given if getattr(type(each), hook) is not getattr(Ability, hook)]
