"""Multilayer perceptron over flattened images or rows of numbers: the smallest model that learns."""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn

from hpc_trainer.config.schema.model import MlpConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.models import check_num_classes
from hpc_trainer.models.channels import Channels


class Mlp(nn.Module):
    """`num_layers` hidden layers of `hidden_dim` with ReLU and dropout, then a linear classifier.

    Maps inputs float32 [batch, ...], of any shape, to logits [batch, num_classes].
    Raises ConfigError if the input shape is not possible.
    """

    def __init__(self, config: MlpConfig, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check_num_classes(num_classes)
        if not input_shape or min(input_shape) < 1:
            raise ConfigError(
                f"model=mlp reads numbers, and the data's input_shape is {input_shape}. Use data with at least one "
                "number a sample."
            )
        dim = math.prod(input_shape)
        layers: list[nn.Module] = [nn.Flatten()]
        for _ in range(config.num_layers):
            layers += [nn.Linear(dim, config.hidden_dim), nn.ReLU(), nn.Dropout(config.dropout)]
            dim = config.hidden_dim
        self.layers = nn.Sequential(*layers, nn.Linear(dim, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [batch, ...] to logits [batch, num_classes]. Raises ConfigError if the inputs are tokens."""
        if not inputs.is_floating_point():
            raise ConfigError(
                f"model=mlp reads numbers, and these inputs are {inputs.dtype} of shape {tuple(inputs.shape[1:])}. For "
                "tokens choose model=gpt; make other whole numbers float32."
            )
        logits: Tensor = self.layers(inputs)
        return logits

    def channel_groups(self) -> list[Channels]:
        """Return the units of each hidden layer, which the next linear layer reads."""
        linear = [f"layers.{index}" for index, layer in enumerate(self.layers) if isinstance(layer, nn.Linear)]
        return [Channels(made_by=(made,), read_by=(read,)) for made, read in itertools.pairwise(linear)]
