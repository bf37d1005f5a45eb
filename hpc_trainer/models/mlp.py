"""A multilayer perceptron over flattened images: the smallest model that learns."""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn

from hpc_trainer.config.schema.model import MlpConfig
from hpc_trainer.models import check_at_least, check_dropout, check_num_classes, image_shape
from hpc_trainer.models.channels import Channels


class Mlp(nn.Module):
    """`num_layers` hidden layers of `hidden_dim` with ReLU and dropout, then a linear classifier.

    Images float32 [batch, C, H, W], any size, to logits [batch, num_classes].
    Raises ConfigError where a value or the input shape cannot be.
    """

    def __init__(self, config: MlpConfig, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check_at_least("model.hidden_dim", config.hidden_dim, 1)
        check_at_least("model.num_layers", config.num_layers, 0)
        check_dropout(config.dropout)
        check_num_classes(num_classes)
        dim = math.prod(image_shape("mlp", input_shape, smallest=1))
        layers: list[nn.Module] = [nn.Flatten()]
        for _ in range(config.num_layers):
            layers += [nn.Linear(dim, config.hidden_dim), nn.ReLU(), nn.Dropout(config.dropout)]
            dim = config.hidden_dim
        self.layers = nn.Sequential(*layers, nn.Linear(dim, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Images [batch, C, H, W] to logits [batch, num_classes]."""
        logits: Tensor = self.layers(inputs)
        return logits

    def channel_groups(self) -> list[Channels]:
        """The units of each hidden layer, which the next linear layer reads."""
        linear = [f"layers.{index}" for index, each in enumerate(self.layers) if isinstance(each, nn.Linear)]
        return [Channels(made_by=(made,), read_by=(read,)) for made, read in itertools.pairwise(linear)]
