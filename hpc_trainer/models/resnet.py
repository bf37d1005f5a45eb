"""ResNet-18, 34 and 50: He et al. 2015, "Deep residual learning for image recognition", arXiv:1512.03385.

As trained today: the bottleneck's stride is in its 3x3 convolution ("v1.5", as in torchvision, same
parameter count), and by default the last BatchNorm of each block starts at gamma = 0, so that a fresh block is the
identity (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
"""

from __future__ import annotations

import itertools
from typing import ClassVar

from torch import Tensor, nn

from hpc_trainer.config.schema.model import ResnetConfig
from hpc_trainer.models import check_num_classes, image_shape
from hpc_trainer.models.channels import Channels
from hpc_trainer.models.parts import Part

SMALLEST_IMAGE = 8


class _Block(nn.Module):
    """Block of a ResNet: the sum of a residual and a shortcut."""

    expansion: ClassVar[int]
    residual: nn.Sequential
    shortcut: nn.Module
    relu: nn.ReLU

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [batch, C_in, H, W] to [batch, C_out, H / stride, W / stride]."""
        outputs: Tensor = self.relu(self.residual(inputs) + self.shortcut(inputs))
        return outputs


class BasicBlock(_Block):
    """Two 3x3 convolutions and a shortcut; [batch, num_in, H, W] to [batch, width, H/stride, W/stride]."""

    expansion = 1

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv(num_in, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, width, 3, 1),
            nn.BatchNorm2d(width),
        )
        self.shortcut = _shortcut(num_in, width, stride)
        self.relu = nn.ReLU(inplace=True)


class Bottleneck(_Block):
    """1x1, 3x3, 1x1 convolutions and a shortcut; the output has 4 x width channels."""

    expansion = 4

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = width * self.expansion
        self.residual = nn.Sequential(
            _conv(num_in, width, 1, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, num_out, 1, 1),
            nn.BatchNorm2d(num_out),
        )
        self.shortcut = _shortcut(num_in, num_out, stride)
        self.relu = nn.ReLU(inplace=True)


# He et al. 2015, table 1: the block and the number of blocks in each of the four stages.
_STAGES: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


class Resnet(nn.Module):
    """Stem, four stages of residual blocks (1, 2, 4 and 8 x width), mean over the image, linear classifier.

    Maps images float32 [batch, C, H, W], 8 pixels or more per side, to logits [batch, num_classes]. Images with a side
    below `small_input_below` get the paper's CIFAR stem: 3x3, stride 1, no pooling. BatchNorm trains on the
    samples of one rank; the last stage of an 8x8 image is 1x1, so a rank then needs a micro batch of 2 or
    more. Raises ConfigError if the input shape is not possible.
    """

    def __init__(self, config: ResnetConfig, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check_num_classes(num_classes)
        channels, height, width = image_shape(config.name, input_shape, smallest=SMALLEST_IMAGE)
        self.stem = _stem(channels, config.width, is_small=min(height, width) < config.small_input_below)
        block, num_blocks = _STAGES[config.depth]
        num_in = config.width
        stages: list[nn.Module] = []
        for stage, count in enumerate(num_blocks):
            stage_width = config.width * 2**stage
            blocks: list[nn.Module] = []
            for index in range(count):
                stride = 2 if index == 0 and stage > 0 else 1
                blocks.append(block(num_in, stage_width, stride))
                num_in = stage_width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(num_in, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if config.zero_init and isinstance(module, _Block):
                last_norm = module.residual[-1]
                assert isinstance(last_norm, nn.BatchNorm2d)
                nn.init.zeros_(last_norm.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images [batch, C, H, W] to logits [batch, num_classes]."""
        return self.head(self.stages(self.stem(inputs)))

    def head(self, features: Tensor) -> Tensor:
        """Map features [batch, channels, H, W] to logits [batch, num_classes]."""
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits

    def pipeline_parts(self) -> list[Part]:
        """Return the parts for pipeline parallelism, cut before and after each block."""
        blocks = [
            Part(f"stages.{index}.{number}")
            for index, stage in enumerate(self.stages.children())
            for number, _ in enumerate(stage.children())
        ]
        return [Part("stem"), *blocks, Part("head", ("classifier",))]

    def channel_groups(self) -> list[Channels]:
        """Return the channels between two convolutions of a block, and those of each stage.

        All blocks of a stage add to the channels of the stage, and the next stage reads them.
        """
        inside: list[Channels] = []
        added: list[tuple[list[str], list[str]]] = [(["stem.0", "stem.1"], [])]
        for path, block in self.stages.named_modules(prefix="stages"):
            if not isinstance(block, _Block):
                continue
            convs = [index for index, layer in enumerate(block.residual) if isinstance(layer, nn.Conv2d)]
            names = [(f"{path}.residual.{index}", f"{path}.residual.{index + 1}") for index in convs]
            inside += [Channels(made_by=made, read_by=(read,)) for made, (read, _) in itertools.pairwise(names)]
            readers = [names[0][0]]
            if isinstance(block.shortcut, nn.Sequential):  # a new stream of channels: the last one ends here
                added[-1][1].extend([*readers, f"{path}.shortcut.0"])
                added.append(([f"{path}.shortcut.0", f"{path}.shortcut.1", *names[-1]], []))
            else:
                added[-1][1].extend(readers)
                added[-1][0].extend(names[-1])
        added[-1][1].append("classifier")
        return [*inside, *(Channels(made_by=tuple(made), read_by=tuple(read)) for made, read in added)]


def _stem(channels: int, width: int, *, is_small: bool) -> nn.Sequential:
    if is_small:
        return nn.Sequential(_conv(channels, width, 3, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    return nn.Sequential(
        _conv(channels, width, 7, 2),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _conv(num_in: int, num_out: int, kernel_size: int, stride: int) -> nn.Conv2d:
    # No bias: the BatchNorm that follows has one.
    return nn.Conv2d(num_in, num_out, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)


def _shortcut(num_in: int, num_out: int, stride: int) -> nn.Module:
    if num_in == num_out and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(num_in, num_out, 1, stride), nn.BatchNorm2d(num_out))
