"""What a feature may do to a run: the one way in which the shared loop and a feature know of each other.

A feature of `hpc_trainer/features/NAME` that does anything in a run has a module `ability` with one class derived from
`Ability`, named `ABILITY`. Each method is a hook that the core calls at its place, with what exists by then; whoever
leaves one out changes nothing there. Inside one hook features do not depend on each other, but for `Feature.after` and
`before`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runtime.rank_memory import RankMemory, Shares

if TYPE_CHECKING:
    from hpc_trainer.datasets.protocol import MapDataset, Split
    from hpc_trainer.tasks.protocol import Task
    from hpc_trainer.training.context import RunContext
    from hpc_trainer.training.data.batch_sizes import BatchSizes
    from hpc_trainer.training.optim.build import Recipe
    from hpc_trainer.training.parallel.mesh import Mesh
    from hpc_trainer.training.parallel.share import VotingLoss
    from hpc_trainer.training.state import TrainState
    from hpc_trainer.training.step import Stepper


@dataclass(slots=True, kw_only=True)
class Building:
    """What hooks are given while a run is built."""

    config: TrainConfig
    device: torch.device
    dataset: MapDataset
    """The training samples."""
    task: Task
    abilities: Sequence[Ability] = ()
    """All that are on."""
    eval_set: MapDataset | None = None
    """None: nothing will be evaluated."""
    mesh: Mesh
    """Of an estimate without groups: it has one rank, and tells what that one's place would be."""
    run: RunContext | None = None
    """None: nothing will run; tensors have shapes and no content (the memory estimate)."""
    sizes: BatchSizes | None = None
    """None: they are not found yet."""
    samples: Any = None
    """A batch of the first of `dataset` alone, where it is read already."""
    shares: Shares = field(default_factory=Shares)
    """Of an estimate: which weights this rank would hold a part of."""


class GoBackError(Exception):
    """Raised by a hook on all ranks at the same step: training goes on from the step that `go_back` takes the run to.

    The loop calls it when the batches are closed. Collective.
    """

    def __init__(self, why: str, go_back: Callable[[], None]) -> None:
        super().__init__(why)
        self.go_back = go_back


class Ability:
    """A feature at work in one rank. All hooks are called on all ranks, in the order in which they stand here."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    # While a run is built.

    def begin(self, mesh: Mesh, run: RunContext | None) -> None:
        """Nothing is built, and no data are read. Without `run` it is an estimate. Collective in a run.

        Raises ConfigError: it cannot be done.
        """

    def samples(self, dataset: MapDataset, split: Split) -> MapDataset:
        """What the samples of `split` are read from: `dataset`, or one around it. Raises ConfigError: it is none for
        this feature.
        """
        return dataset

    def eval_sets(self, task: Task) -> Mapping[str, MapDataset]:
        """Held-out samples of which each evaluation tells beside the run's own, as `eval_NAME_loss`. What features make
        of those (`samples`) they make of these.
        """
        return {}

    def see_whole(self, model: nn.Module, building: Building) -> None:
        """`model` is whole, on the CPU, and has its first weights. Raises ConfigError: it is none for this feature."""

    def cut(self, model: nn.Module, building: Building) -> None:
        """All have seen `model` whole: leaves what this rank runs of it, in place."""

    def on_device(self, model: nn.Module, building: Building) -> None:
        """`model` has come to the device: layers may be replaced, or cut up among ranks, in place. Collective."""

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        """`loss` is the model with its loss, on the device, before ranks share it."""

    def trying(self) -> contextlib.AbstractContextManager[None]:
        """Around passes of other shapes than the run's, whose results nobody keeps."""
        return contextlib.nullcontext()

    def sizes(self, sizes: BatchSizes, loss: VotingLoss, building: Building) -> BatchSizes:
        """How many samples go through `loss` at a time: `sizes`, or others."""
        return sizes

    def share(self, loss: VotingLoss, building: Building) -> nn.Module | None:
        """What ranks share `loss` by; None: as `parallel` says. Of several features the first decides. Collective."""

    def optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        """What the optimizer of `model`, whose weights are as ranks share them, is made by: `recipe`, or another."""
        return recipe

    def around_optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        """All have said what the optimizer is. Where and how it steps: `recipe`, or one around what it makes."""
        return recipe

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        """What makes the step's carrier-out of the fields of `Stepper`: `make`, or another."""
        return make

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        """`state` has model and optimizer, `module` is what ranks share the loss by. Nothing is restored yet.

        What has to be in a checkpoint goes into `state.more`, by a name of the feature's own.
        """

    # While memory is estimated.

    def trial(self, loss: nn.Module, batch: Any, building: Building) -> tuple[nn.Module, Any]:
        """(what a micro-batch goes through on this rank, what goes in): `loss` and `batch`."""
        return loss, batch

    def memory(self, held: RankMemory, building: Building) -> None:
        """Adds to `held` what this feature takes, and takes away what it saves."""

    # While it trains.

    def restored(self) -> None:
        """The state is that of a checkpoint, or the first; once an attempt. Collective."""

    def inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the model is given in training, [batch, ...] on the device; as it takes them. Not called
        where the task takes batches of another form than (inputs, targets).
        """
        return inputs

    def before_clip(self) -> None:
        """Each weight that `backward` leaves a gradient has it, of all ranks together, as the loss scaler scaled it.
        No wait for the device.
        """

    def after_update(self) -> None:
        """After each update of the weights, skipped ones too. No wait for the device."""

    def after_step(self, step: int) -> None:
        """A step is done, the `step`-th of the run."""

    def logged(self, step: int, values: dict[str, float]) -> None:
        """These `values` of the steps up to `step` are about to be logged: more may be added. The host has just waited
        for the device. Collective.
        """

    def check(self, step: int) -> None:
        """So many steps are done and logged, and nothing of them is saved or evaluated yet; and once where steps begin,
        after a start or a GoBackError. Collective. May raise GoBackError, or what ends the run.
        """

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Around each evaluation."""
        return contextlib.nullcontext()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """An evaluation, alike on all ranks; a resumed run may tell of it again. Why the run ends; None: it goes on."""

    def held(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Tensors that it holds, under a name of the memory report; asked when all is built."""
        return {}

    def stand_ins(self) -> Mapping[str, torch.Tensor]:
        """What evaluations use in the place of weights, by their names, placed as they are; asked when all is built."""
        return {}

    def close(self, error: BaseException | None) -> None:
        """At the run's end, also where it could not be built; `error` is what ends it, None if it ends well."""

    # When weights are taken out of a run (`worker/deploy/deployed.py`): no hook above was called, and nobody trains.

    def fit_weights(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `model`, whole and on the CPU as its class builds it, is about to be given: `weights`, its state in a
        checkpoint, or others, with what the checkpoint leaves out. May change the modules of `model` in place, as
        training had them.
        """
        return weights

    def deployed(self, model: nn.Module) -> nn.Module:
        """`model` has its weights: as it is used from now on. The same, or one that computes the same with less."""
        return model
