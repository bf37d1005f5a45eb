"""A small convolutional network: two blocks and a linear classifier; learns the digits in seconds on CPU."""

from __future__ import annotations

import math

from torch import Tensor, nn

from hpc_trainer.config.schema.model import CnnConfig
from hpc_trainer.models import check_num_classes, image_shape
from hpc_trainer.models.channels import Channels

SMALLEST_IMAGE = 8
_CHANNELS_PER_GROUP = 8
_GRID = 4  # cells per side that the classifier sees (4 to 7 if the size is not a multiple of 8)


class Cnn(nn.Module):
    """Two blocks of 3x3 convolution, GroupNorm and ReLU; `num_channels`, then twice as many.

    GroupNorm (Wu and He 2018), not BatchNorm: no buffers to keep equal between ranks, and one sample's logits
    do not depend on the rest of its batch. Maps images float32 [batch, C, H, W], 8 pixels or more per side, to
    logits [batch, num_classes]. Raises ConfigError if the input shape is not possible.
    """

    def __init__(self, config: CnnConfig, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check_num_classes(num_classes)
        channels, height, width = image_shape("cnn", input_shape, smallest=SMALLEST_IMAGE)
        first, second = config.num_channels, 2 * config.num_channels
        height, width = height // 2, width // 2
        # Fixed windows, not AdaptiveAvgPool2d: its CUDA backward pass is nondeterministic.
        window = (height // _GRID, width // _GRID)
        cells = (height // window[0]) * (width // window[1])
        self.features = nn.Sequential(
            *_block(channels, first), nn.MaxPool2d(2), *_block(first, second), nn.AvgPool2d(window)
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(config.dropout), nn.Linear(second * cells, num_classes)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images [batch, C, H, W] to logits [batch, num_classes]."""
        logits: Tensor = self.classifier(self.features(inputs))
        return logits

    def channel_groups(self) -> list[Channels]:
        """Return the channels of both blocks; the classifier has the cells of each channel as adjacent inputs."""
        return [
            Channels(made_by=("features.0", "features.1"), read_by=("features.4",)),
            Channels(made_by=("features.4", "features.5"), read_by=("classifier.2",)),
        ]


def _block(num_in: int, num_out: int) -> list[nn.Module]:
    # gcd: GroupNorm needs equal groups, and num_channels may be any number.
    num_groups = num_out // math.gcd(_CHANNELS_PER_GROUP, num_out)
    return [
        nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(num_groups, num_out),
        nn.ReLU(),
    ]
