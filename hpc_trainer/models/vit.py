"""Vision Transformer: Dosovitskiy et al. 2020, arXiv:2010.11929; Ti and S as in Touvron et al. 2020, arXiv:2012.12877.

Patches through a linear layer, a class token, learned positions, blocks with LayerNorm before each sub-layer and exact
GELU, and a linear layer on the class token. ViT-B/16 at 224 pixels has 86,567,656 weights for 1000 classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpc_trainer.config.schema.model import VitConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.models import check_num_classes, image_shape
from hpc_trainer.models.channels import Channels
from hpc_trainer.models.parts import Part
from hpc_trainer.models.transformer import Block, BlockShape, block_channels, block_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

_INIT_STD = 0.02
_NORM_EPS = 1e-6


class Vit(nn.Module):
    """`num_layers` blocks over the patches of an image and one class token.

    Maps images float32 [batch, C, H, W] of the data's size to logits [batch, num_classes]. Raises ConfigError if the
    input shape is not possible, or an image has another size.
    """

    def __init__(self, config: VitConfig, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check_num_classes(num_classes)
        self.image_shape = channels, height, width = image_shape(config.name, input_shape, smallest=1)
        problem = config.patch_problem(height, width)
        if problem is not None:
            raise ConfigError(problem)
        self.patch_size, dim = config.patch_size, config.embed_dim
        self._shape = BlockShape(
            dim=dim, num_heads=config.num_heads, mlp_dim=4 * dim, dropout=config.dropout, is_causal=False,
            norm_eps=_NORM_EPS, gelu="none",
        )  # fmt: skip
        num_patches = (height // self.patch_size) * (width // self.patch_size)
        # A linear layer over a patch's pixels, as in the paper; a convolution with that stride is equivalent.
        self.patch_embedding = nn.Linear(channels * self.patch_size**2, dim)
        # Embeddings, not parameters of this module: tensor-parallel ranks copy modules.
        self.class_token = nn.Embedding(1, dim)
        self.position_embedding = nn.Embedding(1 + num_patches, dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(self._shape) for _ in range(config.num_layers))
        self.norm = self._shape.norm()
        self.head = nn.Linear(dim, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=_INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images [batch, C, H, W] to logits [batch, num_classes]."""
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.predict(hidden)

    def embed(self, inputs: Tensor) -> Tensor:
        """Map images [batch, C, H, W] to the residual stream [batch, 1 + patches, embed_dim]."""
        if tuple(inputs.shape[1:]) != self.image_shape:
            raise ConfigError(
                f"model=vit was built for images of {self.image_shape} and got {tuple(inputs.shape[1:])}: it has a "
                "position for each patch. Resize the images, or train it on that size."
            )
        batch, channels, height, width = inputs.shape
        side = self.patch_size
        grid = inputs.view(batch, channels, height // side, side, width // side, side)
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [batch, patches, C x side x side]
        places = torch.arange(1 + patches.shape[1], device=inputs.device)
        token = self.class_token(places[:1]).expand(batch, 1, -1)
        tokens = torch.cat((token, self.patch_embedding(patches)), dim=1)
        hidden: Tensor = self.dropout(tokens + self.position_embedding(places))
        return hidden

    def predict(self, hidden: Tensor) -> Tensor:
        """Map the residual stream to logits [batch, num_classes]."""
        logits: Tensor = self.head(self.norm(hidden)[:, 0])
        return logits

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """Return how ranks share the layers: `block_plan`, and copied embeddings and head."""
        return block_plan(self._shape)

    def channel_groups(self) -> list[Channels]:
        """Return heads and perceptron units of each block; the width of the residual stream does not change."""
        return block_channels(self._shape, len(self.blocks))

    def pipeline_parts(self) -> list[Part]:
        """Return the parts for stages, cut before and after each block."""
        blocks = [Part(f"blocks.{index}") for index in range(len(self.blocks))]
        return [
            Part("embed", ("patch_embedding", "class_token", "position_embedding", "dropout")),
            *blocks,
            Part("predict", ("norm", "head")),
        ]
