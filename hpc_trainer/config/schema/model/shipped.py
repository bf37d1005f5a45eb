"""`model/`: the reference models, one dataclass each; `_target_` names the class that is built.

Built in the worker as `Target(config)` with the dataclass below; `custom` takes any class by name and keyword
arguments, if its prefix is trusted (`config/targets.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_trainer.config.schema.key import ALWAYS, COUNTS, ONCE_SET, SCHEDULE, key
from hpc_trainer.config.schema.model.traits import Trait


class Positions(str, enum.Enum):
    """Encoding of a token's position in a transformer."""

    learned = "learned"
    rope = "rope"


class Norm(str, enum.Enum):
    """Norm before each sub-layer."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class MlpKind(str, enum.Enum):
    """Operation between the layers of a block's perceptron."""

    gelu = "gelu"
    swiglu = "swiglu"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Base class of every model; not a choice itself."""

    family: ClassVar[str | None] = None
    """Name of the schema in files of `conf/model/` if there are several names, such as resnet18 and resnet50."""
    traits: ClassVar[frozenset[Trait] | None] = None
    """Traits of the model; None if only its own code knows them."""
    name: str = key("???", ALWAYS, COUNTS)
    _target_: str = key("???", ALWAYS, COUNTS)

    @property
    def num_blocks(self) -> int | None:
        """Number of layers between which stages and FSDP cut; None if there are none or the model's code decides."""
        return None


@dataclass(kw_only=True, slots=True)
class MlpConfig(ModelConfig):
    traits: ClassVar[frozenset[Trait] | None] = frozenset({Trait.channel_groups})
    name: str = "mlp"
    _target_: str = "hpc_trainer.models.mlp.Mlp"
    hidden_dim: int = key(256, ALWAYS, COUNTS, limits="≥ 1")
    """Width of each hidden layer."""
    num_layers: int = key(2, ALWAYS, COUNTS, limits="≥ 0")
    """Hidden layers; 0 is a linear model."""
    dropout: float = key(0.1, ALWAYS, COUNTS, SCHEDULE, limits="[0, 1)")
    """Dropout probability."""


@dataclass(kw_only=True, slots=True)
class CnnConfig(ModelConfig):
    traits: ClassVar[frozenset[Trait] | None] = frozenset(
        {
            Trait.reads_images,
            Trait.convolutions,
            Trait.channel_groups,
        }
    )
    name: str = "cnn"
    _target_: str = "hpc_trainer.models.cnn.Cnn"
    num_channels: int = key(32, ALWAYS, COUNTS, limits="≥ 1")
    """Channels of the first block; the second has twice as many."""
    dropout: float = key(0.1, ALWAYS, COUNTS, SCHEDULE, limits="[0, 1)")
    """Dropout probability before the classifier."""


@dataclass(kw_only=True, slots=True)
class ResnetConfig(ModelConfig):
    family: ClassVar[str | None] = "resnet"
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
    name: str = "resnet18"
    _target_: str = "hpc_trainer.models.resnet.Resnet"
    depth: int = key(18, ALWAYS, COUNTS, limits="18, 34 or 50")
    """18 and 34 (basic blocks) or 50 (bottlenecks); He et al. 2015, table 1."""
    width: int = key(64, ALWAYS, COUNTS, limits="≥ 1")
    """Channels of the first stage; 64 in the paper."""
    small_input_below: int = key(64, ALWAYS, COUNTS, limits="≥ 0")
    """Images with a side below this (pixels) get the paper's CIFAR stem: 3x3, no pooling."""
    zero_init: bool = key(True, ALWAYS, ONCE_SET)
    """The last norm of each block begins at 0, so that a fresh block is the identity (Goyal et al. 2017)."""

    @property
    def num_blocks(self) -> int | None:
        """Number of blocks by He et al. 2015, table 1."""
        return {18: 8, 34: 16, 50: 16}.get(self.depth)


@dataclass(kw_only=True, slots=True)
class GptConfig(ModelConfig):
    traits: ClassVar[frozenset[Trait] | None] = frozenset(
        {
            Trait.reads_tokens,
            Trait.blocks,
            Trait.block_matrices,
            Trait.channel_groups,
            Trait.pipeline_parts,
            Trait.tensor_parallel_plan,
        }
    )
    name: str = "gpt"
    _target_: str = "hpc_trainer.models.gpt.Gpt"
    num_layers: int = key(4, ALWAYS, COUNTS, limits="≥ 1")
    """Transformer blocks."""
    num_heads: int = key(4, ALWAYS, COUNTS, limits="≥ 1")
    """Attention heads; must divide embed_dim."""
    embed_dim: int = key(128, ALWAYS, COUNTS, limits="≥ 1")
    """Width of the residual stream."""
    vocab_multiple: int = key(1, ALWAYS, ONCE_SET, limits="≥ 1")
    """The embedding and the output layer have as many rows as the vocabulary, rounded up to a multiple of this number:
    tensor cores favour 128 (GPT-2's 50,257 become 50,304). The added rows are never targets, and soon unlikely."""
    dropout: float = key(0.0, ALWAYS, COUNTS, SCHEDULE, limits="[0, 1)")
    """Dropout probability."""
    positions: Positions = key(Positions.learned, ALWAYS, ONCE_SET)
    """learned: an embedding for each position. rope: queries and keys are rotated by their position (Su et al.
    2021)."""
    norm: Norm = key(Norm.layernorm, ALWAYS, ONCE_SET)
    """Norm before each sub-layer and at the end."""
    mlp: MlpKind = key(MlpKind.gelu, ALWAYS, ONCE_SET)
    """gelu: 4 x embed_dim wide. swiglu (Shazeer 2020): three matrices, 8/3 x embed_dim wide, rounded up to a multiple
    of 8: as many weights."""
    num_kv_heads: int | None = key(None, ALWAYS, ONCE_SET, limits="≥ 1")
    """Heads of keys and values, each for num_heads / num_kv_heads heads of queries (Ainslie et al. 2023); must divide
    num_heads. null: num_heads."""

    @property
    def num_blocks(self) -> int | None:
        """Number of transformer blocks."""
        return self.num_layers

    @property
    def mlp_dim(self) -> int:
        """Width inside the perceptron."""
        return 4 * self.embed_dim if self.mlp == MlpKind.gelu else 8 * -(-self.embed_dim // 3)

    @property
    def num_block_weights(self) -> int:
        """Number of weights and biases of a block."""
        dim, kv_heads = self.embed_dim, self.num_kv_heads or self.num_heads
        rows = dim + 2 * kv_heads * dim // self.num_heads  # of queries, keys and values
        attention = rows * (dim + 1) + dim * (dim + 1)
        wide = self.mlp_dim * (dim + 1) * (2 if self.mlp == MlpKind.swiglu else 1) + dim * (self.mlp_dim + 1)
        return attention + wide + 2 * self.num_norm_weights

    @property
    def num_norm_weights(self) -> int:
        """Number of weights of one norm."""
        return self.embed_dim * (2 if self.norm == Norm.layernorm else 1)

    def heads_problem(self) -> str | None:
        """Return the problem with numbers of heads that are legal by themselves; None if there is none."""
        kv_heads = self.num_kv_heads
        if kv_heads is not None and self.num_heads % kv_heads:
            divisors = [count for count in range(1, self.num_heads + 1) if self.num_heads % count == 0]
            nearest = min(divisors, key=lambda count: abs(count - kv_heads))
            return (
                f"model.num_kv_heads={kv_heads} must divide model.num_heads={self.num_heads}. Use "
                f"model.num_kv_heads={nearest}."
            )
        if self.positions == Positions.rope and self.embed_dim // self.num_heads % 2:
            return (
                f"model.positions=rope turns the dimensions of a head in pairs, and embed_dim={self.embed_dim} / "
                f"num_heads={self.num_heads} is an odd number of them. Use "
                f"model.embed_dim={self.num_heads * (self.embed_dim // self.num_heads + 1)}."
            )
        return None

    def num_rows(self, vocabulary: int) -> int:
        """Return the rows of the embedding and of the output layer for a vocabulary of this size."""
        multiple = max(1, self.vocab_multiple)
        return -(-vocabulary // multiple) * multiple


@dataclass(kw_only=True, slots=True)
class CustomModelConfig(ModelConfig):
    name: str = "custom"
    kwargs: dict[str, Any] = key({}, ALWAYS, COUNTS)
    """Keyword arguments of the class named by `_target_`."""
