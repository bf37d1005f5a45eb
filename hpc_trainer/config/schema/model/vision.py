"""`model=mobilenet_v3_small|mobilenet_v3_large` and `model=vit_tiny|vit_small|vit_base`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from hpc_trainer.config.schema.key import ALWAYS, COUNTS, SCHEDULE, key
from hpc_trainer.config.schema.model.shipped import ModelConfig
from hpc_trainer.config.schema.model.traits import Trait


class MobilenetSize(str, enum.Enum):
    """One of the paper's two networks."""

    small = "small"
    large = "large"


@dataclass(kw_only=True, slots=True)
class MobilenetV3Config(ModelConfig):
    family: ClassVar[str | None] = "mobilenet_v3"
    traits: ClassVar[frozenset[Trait] | None] = frozenset(
        {
            Trait.reads_images,
            Trait.blocks,
            Trait.convolutions,
            Trait.batch_norm,
            Trait.channel_groups,
            Trait.pipeline_parts,
        }
    )
    name: str = "mobilenet_v3_small"
    _target_: str = "hpc_trainer.models.mobilenet_v3.MobilenetV3"
    size: MobilenetSize = key(MobilenetSize.small, ALWAYS, COUNTS)
    """Network by Howard et al. 2019: table 1 (large) or table 2 (small)."""
    dropout: float = key(0.2, ALWAYS, COUNTS, SCHEDULE, limits="[0, 1)")
    """Dropout probability before the last layer."""

    @property
    def num_blocks(self) -> int | None:
        """Number of blocks by Howard et al. 2019, tables 1 and 2."""
        return {MobilenetSize.small: 11, MobilenetSize.large: 15}[self.size]


@dataclass(kw_only=True, slots=True)
class VitConfig(ModelConfig):
    family: ClassVar[str | None] = "vit"
    traits: ClassVar[frozenset[Trait] | None] = frozenset(
        {
            Trait.reads_images,
            Trait.blocks,
            Trait.block_matrices,
            Trait.channel_groups,
            Trait.pipeline_parts,
            Trait.tensor_parallel_plan,
        }
    )
    name: str = "vit_tiny"
    _target_: str = "hpc_trainer.models.vit.Vit"
    patch_size: int = key(16, ALWAYS, COUNTS, limits="≥ 1")
    """Side of a patch in pixels; must divide the image's sides."""
    num_layers: int = key(12, ALWAYS, COUNTS, limits="≥ 1")
    """Transformer blocks."""
    num_heads: int = key(3, ALWAYS, COUNTS, limits="≥ 1")
    """Attention heads; must divide embed_dim."""
    embed_dim: int = key(192, ALWAYS, COUNTS, limits="≥ 1")
    """Width of the residual stream."""
    dropout: float = key(0.0, ALWAYS, COUNTS, SCHEDULE, limits="[0, 1)")
    """Dropout probability."""

    @property
    def num_blocks(self) -> int | None:
        """Number of transformer blocks."""
        return self.num_layers

    def patch_problem(self, height: int, width: int) -> str | None:
        """Return the problem with images of this height and width in pixels; None if there is none."""
        if height % self.patch_size == width % self.patch_size == 0:
            return None
        common = [side for side in range(1, min(height, width) + 1) if height % side == width % side == 0]
        nearest = min(common, key=lambda side: abs(side - self.patch_size))
        return (
            f"model.patch_size={self.patch_size} must divide the images' height and width, {height} x {width} pixels. "
            f"Use model.patch_size={nearest}."
        )
