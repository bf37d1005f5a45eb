"""MobileNetV3: Howard et al. 2019, "Searching for MobileNetV3", arXiv:1905.02244; a light network for images.

Both networks of the paper, with the parameter counts of torchvision's: 2,542,856 (small) and 5,483,032 (large) for
1000 classes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from hpc_trainer.config.schema.model import MobilenetSize, MobilenetV3Config
from hpc_trainer.models import check_num_classes, image_shape
from hpc_trainer.models.channels import Channels
from hpc_trainer.models.parts import Part

SMALLEST_IMAGE = 8
_STEM_CHANNELS = 16
_SQUEEZE = 4  # the paper, section 5.3: a quarter of the expansion


class _Row(NamedTuple):
    """Row of the paper's tables 1 and 2: one block."""

    kernel_size: int
    expansion: int
    num_out: int
    has_squeeze: bool
    has_hardswish: bool
    stride: int


_LARGE = [
    _Row(3, 16, 16, False, False, 1),
    _Row(3, 64, 24, False, False, 2),
    _Row(3, 72, 24, False, False, 1),
    _Row(5, 72, 40, True, False, 2),
    _Row(5, 120, 40, True, False, 1),
    _Row(5, 120, 40, True, False, 1),
    _Row(3, 240, 80, False, True, 2),
    _Row(3, 200, 80, False, True, 1),
    _Row(3, 184, 80, False, True, 1),
    _Row(3, 184, 80, False, True, 1),
    _Row(3, 480, 112, True, True, 1),
    _Row(3, 672, 112, True, True, 1),
    _Row(5, 672, 160, True, True, 2),
    _Row(5, 960, 160, True, True, 1),
    _Row(5, 960, 160, True, True, 1),
]
_SMALL = [
    _Row(3, 16, 16, True, False, 2),
    _Row(3, 72, 24, False, False, 2),
    _Row(3, 88, 24, False, False, 1),
    _Row(5, 96, 40, True, True, 2),
    _Row(5, 240, 40, True, True, 1),
    _Row(5, 240, 40, True, True, 1),
    _Row(5, 120, 48, True, True, 1),
    _Row(5, 144, 48, True, True, 1),
    _Row(5, 288, 96, True, True, 2),
    _Row(5, 576, 96, True, True, 1),
    _Row(5, 576, 96, True, True, 1),
]
# Blocks, channels of the last convolution, width of the classifier's hidden layer.
_NETWORKS = {MobilenetSize.small: (_SMALL, 576, 1024), MobilenetSize.large: (_LARGE, 960, 1280)}


class SqueezeExcite(nn.Module):
    """Layer that weights channels by their means over the whole image (Hu et al. 2017); keeps [batch, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        num_squeezed = _multiple_of_8(channels // _SQUEEZE)
        self.squeeze = nn.Conv2d(channels, num_squeezed, kernel_size=1)
        self.excite = nn.Conv2d(num_squeezed, channels, kernel_size=1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the weighted channels, [batch, C, H, W]."""
        # A mean, not AdaptiveAvgPool2d: the same numbers, and deterministic on CUDA.
        squeezed = nn.functional.relu(self.squeeze(inputs.mean(dim=(2, 3), keepdim=True)))
        outputs: Tensor = inputs * nn.functional.hardsigmoid(self.excite(squeezed))
        return outputs


class InvertedResidual(nn.Module):
    """1x1 to `expansion` channels, a depthwise convolution, 1x1 to `num_out`; a shortcut if shapes are equal."""

    def __init__(self, num_in: int, row: _Row) -> None:
        super().__init__()
        activation = nn.Hardswish if row.has_hardswish else nn.ReLU
        expand = _conv(num_in, row.expansion, 1, activation=activation) if row.expansion != num_in else []
        squeeze = [SqueezeExcite(row.expansion)] if row.has_squeeze else []
        self.residual = nn.Sequential(
            *expand,
            *_conv(row.expansion, row.expansion, row.kernel_size, row.stride, row.expansion, activation=activation),
            *squeeze,
            *_conv(row.expansion, row.num_out, 1),
        )
        self.has_shortcut = row.stride == 1 and num_in == row.num_out

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [batch, C_in, H, W] to [batch, C_out, H / stride, W / stride]."""
        outputs: Tensor = self.residual(inputs)
        return outputs + inputs if self.has_shortcut else outputs


class MobilenetV3(nn.Module):
    """Stem, inverted residual blocks, a last convolution, mean over the image, a classifier with one hidden layer.

    Maps images float32 [batch, C, H, W], 8 pixels or more per side, to logits [batch, num_classes]. The last blocks
    have a single position for an image below 64 pixels, so a rank then needs a micro-batch of 2 or more. Raises
    ConfigError if the input shape is not possible.
    """

    def __init__(self, config: MobilenetV3Config, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check_num_classes(num_classes)
        channels, _, _ = image_shape(config.name, input_shape, smallest=SMALLEST_IMAGE)
        rows, num_features, num_hidden = _NETWORKS[config.size]
        self.stem = nn.Sequential(*_conv(channels, _STEM_CHANNELS, 3, 2, activation=nn.Hardswish))
        widths = [_STEM_CHANNELS, *(row.num_out for row in rows)]
        self.blocks = nn.Sequential(*(InvertedResidual(num_in, row) for num_in, row in zip(widths, rows, strict=False)))
        self.last_conv = nn.Sequential(*_conv(widths[-1], num_features, 1, activation=nn.Hardswish))
        self.classifier = nn.Sequential(
            nn.Linear(num_features, num_hidden),
            nn.Hardswish(),
            nn.Dropout(config.dropout),
            nn.Linear(num_hidden, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images [batch, C, H, W] to logits [batch, num_classes]."""
        return self.head(self.blocks(self.stem(inputs)))

    def head(self, features: Tensor) -> Tensor:
        """Map features [batch, channels, H, W] to logits [batch, num_classes]."""
        logits: Tensor = self.classifier(self.last_conv(features).mean(dim=(2, 3)))
        return logits

    def channel_groups(self) -> list[Channels]:
        """Return the channels between convolutions of blocks that expand, those of the squeezes, and the classifier's.

        A zero channel stays zero with any weight of the squeeze.
        """
        groups: list[Channels] = []
        for path, block in self.blocks.named_modules(prefix="blocks"):
            if not isinstance(block, InvertedResidual):
                continue
            parts = [(f"{path}.residual.{index}", layer) for index, layer in enumerate(block.residual)]
            convs = [name for name, layer in parts if isinstance(layer, nn.Conv2d)]
            norms = [name for name, layer in parts if isinstance(layer, nn.BatchNorm2d)]
            squeeze = [name for name, layer in parts if isinstance(layer, SqueezeExcite)]
            if len(convs) == 3:  # else the depthwise convolution reads the block's input itself
                made = (convs[0], norms[0], convs[1], norms[1], *(f"{name}.excite" for name in squeeze))
                groups.append(Channels(made_by=made, read_by=(convs[2], *(f"{name}.squeeze" for name in squeeze))))
            groups += [Channels(made_by=(f"{name}.squeeze",), read_by=(f"{name}.excite",)) for name in squeeze]
        return [
            *groups,
            Channels(made_by=("last_conv.0", "last_conv.1"), read_by=("classifier.0",)),
            Channels(made_by=("classifier.0",), read_by=("classifier.3",)),
        ]

    def pipeline_parts(self) -> list[Part]:
        """Return the parts for pipeline parallelism, cut before and after each block."""
        blocks = [Part(f"blocks.{index}") for index in range(len(self.blocks))]
        return [Part("stem"), *blocks, Part("head", ("last_conv", "classifier"))]


def _conv(
    num_in: int, num_out: int, kernel_size: int, stride: int = 1, groups: int = 1,
    *, activation: type[nn.ReLU] | type[nn.Hardswish] | None = None,
) -> list[nn.Module]:  # fmt: skip
    """Return a convolution, its norm with eps and momentum of the paper's training, and the activation, if any."""
    made: list[nn.Module] = [
        nn.Conv2d(
            num_in, num_out, kernel_size, stride=stride, padding=kernel_size // 2, groups=groups, bias=False
        ),
        nn.BatchNorm2d(num_out, eps=1e-3, momentum=0.01),
    ]  # fmt: skip
    return made if activation is None else [*made, activation(inplace=True)]


def _multiple_of_8(channels: int) -> int:
    """Return the nearest multiple of 8, or the next one if that is more than a tenth below `channels`."""
    rounded = max(8, (channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
