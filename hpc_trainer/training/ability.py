"""Hooks of a feature in a run: the only interface between the shared loop and a feature.

The hooks that are called belong to the abilities of the features that are on, found by the names of their folders.
"""

from __future__ import annotations

import contextlib
import graphlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.declarations import features
from hpc_trainer.config.table.feature import Feature
from hpc_trainer.runtime.rank_memory import RankMemory, Shares

if TYPE_CHECKING:
    from hpc_trainer.tasks.protocol import Task
    from hpc_trainer.training.context import RunContext
    from hpc_trainer.training.data.order import BatchSizes
    from hpc_trainer.training.data.protocol import MapDataset, Split
    from hpc_trainer.training.optim.build import Recipe
    from hpc_trainer.training.parallel.mesh import Mesh
    from hpc_trainer.training.parallel.share import VotingLoss
    from hpc_trainer.training.state import TrainState
    from hpc_trainer.training.step import Stepper


@dataclass(slots=True, kw_only=True)
class Building:
    """Arguments of hooks while a run is built."""

    config: TrainConfig
    device: torch.device
    dataset: MapDataset
    """Training samples."""
    task: Task
    abilities: Sequence[Ability] = ()
    """Abilities of all features that are on."""
    eval_set: MapDataset | None = None
    """Held-out samples; None if nothing will be evaluated."""
    mesh: Mesh
    """Mesh of the run. In an estimate it has one rank and no groups, and describes that rank's place in the run."""
    run: RunContext | None = None
    """Context of the run; None in a memory estimate, where nothing will run and tensors have no content."""
    sizes: BatchSizes | None = None
    """Batch sizes; None until they are determined."""
    samples: Any = None
    """Batch of only the first sample of `dataset`; None if it was not read yet."""
    shares: Shares = field(default_factory=Shares)
    """In an estimate, the weights of which this rank would hold a part."""


class GoBackError(Exception):
    """Request to continue training from an earlier step, raised by a hook on all ranks at the same step.

    The loop closes the batches, then calls `go_back`, which takes the run back to that step. Collective.
    """

    def __init__(self, why: str, go_back: Callable[[], None]) -> None:
        super().__init__(why)
        self.go_back = go_back


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of some linear layers: their names, and the config of `torchao.quantization.quantize_`."""

    layers: frozenset[str]
    config: Any


class Ability:
    """Hooks of one feature in one rank. All hooks are called on all ranks, in the order of the methods below."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    # While a run is built.

    def begin(self, mesh: Mesh, run: RunContext | None) -> None:
        """Prepare before anything is built and before data are read. Collective in a run.

        Args:
            mesh: as `Building.mesh`.
            run: None in a memory estimate.

        Raises:
            ConfigError: the feature cannot work in this run.
        """

    def samples(self, dataset: MapDataset, split: Split) -> MapDataset:
        """Return the data set to read the samples of `split` from: `dataset`, or a wrapper around it.

        Raises:
            ConfigError: the feature cannot use this data set.
        """
        return dataset

    def eval_sets(self, task: Task) -> Mapping[str, MapDataset]:
        """Return further held-out samples by name; each evaluation reports them as `eval_NAME_loss`.

        The hook `samples` of all features applies to these data sets too.
        """
        return {}

    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Check or change `model` while it is whole, on the CPU, with its first weights.

        Raises:
            ConfigError: the feature cannot use this model.
        """

    def cut(self, model: nn.Module, building: Building) -> None:
        """Reduce `model` in place to the part that this rank runs, after all features have seen it whole."""

    def on_device(self, model: nn.Module, building: Building) -> None:
        """Replace or shard layers of `model` in place, after it was moved to the device. Collective."""

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        """Change `loss`, the model with its loss, in place on the device, before ranks share it."""

    def trying(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for trial passes, whose shapes differ from the run's and whose results are discarded."""
        return contextlib.nullcontext()

    def sizes(self, sizes: BatchSizes, loss: VotingLoss, building: Building) -> BatchSizes:
        """Return how many samples go through `loss` at a time: `sizes`, or other sizes."""
        return sizes

    def share(self, loss: VotingLoss, building: Building) -> nn.Module | None:
        """Return the module through which ranks share `loss`; None to let `parallel` choose it. Collective.

        If several features return a module, the first one is used.
        """

    def optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        """Return the recipe of the optimizer: `recipe`, or another. Ranks share the weights of `model` already."""
        return recipe

    def around_optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        """Return `recipe`, or one that wraps its optimizer to change where and how it steps.

        Called after the hook `optimizer` of all features.
        """
        return recipe

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        """Return the factory of the run's stepper, called with the fields of `Stepper`: `make`, or another."""
        return make

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        """Use `state`, which has the model and the optimizer, before anything is restored.

        State that checkpoints must hold goes into `state.more`, under a name of the feature's own.

        Args:
            state: the state of the run.
            module: the module through which ranks share the loss.
            building: the parts of the run.
        """

    # While memory is estimated.

    def trial(self, loss: nn.Module, batch: Any, building: Building) -> tuple[nn.Module, Any]:
        """Return the module that runs a micro-batch on this rank, and its input: `loss` and `batch`, or others."""
        return loss, batch

    def memory(self, held: RankMemory, building: Building) -> None:
        """Add the memory that this feature needs to `held`, and subtract the memory that it saves."""

    # While it trains.

    def restored(self) -> None:
        """Act once per attempt, after the state was restored, or initialised at a fresh start. Collective."""

    def inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs for the model in training, [batch, ...] on the device, in the form that the model takes.

        Not called if the batches of the task have another form than (inputs, targets).
        """
        return inputs

    def before_clip(self) -> None:
        """Use or change the gradients before they are clipped, without waiting for the device.

        They are the gradients of all ranks together, as the loss scaler scaled them, of each weight that `backward`
        reached.
        """

    def after_update(self) -> None:
        """Act after each update of the weights, skipped updates too, without waiting for the device."""

    def after_step(self, step: int) -> None:
        """Act after the `step`-th step of the run."""

    def logged(self, step: int, values: dict[str, float]) -> None:
        """Add to `values`, the metrics of the steps up to `step`, before they are logged. Collective.

        The host has just waited for the device.
        """

    def check(self, step: int) -> None:
        """Check the run when `step` steps are done and logged, before they are saved or evaluated. Collective.

        Also called once where steps begin, after a start or a GoBackError. Any other error than GoBackError ends the
        run.

        Raises:
            GoBackError: training continues from an earlier step.
        """

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for each evaluation."""
        return contextlib.nullcontext()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return the reason why the run ends after this evaluation; None if the run continues.

        The metrics are the same on all ranks. A resumed run may report an evaluation again.
        """

    def held(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Return the tensors that the feature holds, by their name in the memory report; called when all is built."""
        return {}

    def stand_ins(self) -> Mapping[str, torch.Tensor]:
        """Return tensors that replace weights in evaluations, by weight name; called when all is built.

        Each tensor is placed like its weight.
        """
        return {}

    def close(self, error: BaseException | None) -> None:
        """Release what the feature holds at the end of the run, also if the run could not be built.

        Args:
            error: the error that ends the run; None if it ends well.
        """

    # When a model is used outside its run: no hook above was called, and nothing trains.

    def fit_weights(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights to load into `model`: `weights`, or others with those that the checkpoint leaves out.

        The hook may change the modules of `model` in place, to those that it had in training.

        Args:
            model: whole and on the CPU, as its class builds it.
            weights: the state of the model in a checkpoint.
        """
        return weights

    def deployed(self, model: nn.Module) -> nn.Module:
        """Return the model for use outside training: `model` with its weights, or an equivalent one that costs less."""
        return model

    def compressed(self, model: nn.Module) -> nn.Module:
        """Return a copy of `model` that is compressed at once as the feature's section says, without training.

        Raises:
            ConfigError: the feature cannot compress this model.
        """
        return model

    def rounded(self, model: nn.Module, kind: str) -> Quantization | None:
        """Return how training rounded the linear layers of `model` to the quantization `kind`; None if it did not."""
        return None


def abilities(config: TrainConfig) -> list[Ability]:
    """Build the abilities of the features that are on or belong to every run, in the order of `after` and `before`."""
    active = {feature.name: feature for feature in features() if feature.is_in_each_run or feature.is_on(config)}
    earlier = {name: set(feature.after) & active.keys() for name, feature in sorted(active.items())}
    for name, feature in active.items():
        for later in active.keys() & set(feature.before):
            earlier[later].add(name)
    order = graphlib.TopologicalSorter(earlier)
    return [_load(active[name])(config) for name in order.static_order()]


def _load(feature: Feature) -> type[Ability]:
    kind: type[Ability] = importlib.import_module(feature.rank_half).ABILITY
    return kind


def overridden(given: Sequence[Ability], hook: str) -> list[Any]:
    """Return the bound methods of the abilities that override `hook`: a hook that does nothing is not called."""
    return [getattr(ability, hook) for ability in given if getattr(type(ability), hook) is not getattr(Ability, hook)]
