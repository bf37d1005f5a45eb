"""Model of a run as it is used after training: whole, on the CPU, with the weights of one checkpoint.

The model's class builds it, each feature changes it as in training (`Ability.fit_weights`), and the weights are loaded.
Then each feature turns it into the model that is used from then on (`Ability.deployed`): adapters are merged, channels
without weights are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import CheckpointError
from hpc_trainer.training.build import HasShape, build_model
from hpc_trainer.training.hooks import abilities, overridden
from hpc_trainer.training.rng import seed_everything

_MOST_LINES = 3


@dataclass(frozen=True, slots=True)
class DataShape:
    """Shape of the data that a model is built for; None for what the data do not state."""

    input_shape: tuple[int, ...] | None
    num_classes: int | None


def changes_model(config: TrainConfig) -> bool:
    """Return True if the deployed model is more than the checkpoint's weights in the model's class."""
    active = abilities(config)
    return any(overridden(active, hook) for hook in ("fit_weights", "deployed"))


def deployed_model(config: TrainConfig, shape: HasShape, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the model in evaluation mode; none of its weights takes a gradient.

    Args:
        shape: shape of the data that the model was trained on.
        weights: the model's state in a checkpoint, whole tensors.

    Raises:
        ConfigError: the model's class is not trusted, leads nowhere, or refuses its arguments.
        CheckpointError: the weights do not fit the model.
    """
    active = abilities(config)
    seed_everything(config.seed)
    model = build_model(config, shape)
    given = dict(weights)
    for fit_weights in overridden(active, "fit_weights"):
        given = fit_weights(model, given)
    try:
        model.load_state_dict(given)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        more = "" if len(lines) <= _MOST_LINES else f" .. and {len(lines) - _MOST_LINES} more"
        raise CheckpointError(
            f"the checkpoint's weights do not fit {type(model).__name__} as {config.model._target_} builds it now: "
            f"{' '.join(lines[:_MOST_LINES])}{more} Has its code changed since? Take back that of the run "
            "(hpc-trainer show names its frozen code)."
        ) from error
    for make in overridden(active, "deployed"):
        model = make(model)
    return model.eval().requires_grad_(False)
