"""`model/`: the model families, one dataclass each; `_target_` names the class that is built.

Built in the worker as `Target(config)` with the dataclass below; `custom` takes any class by name and keyword
arguments, if its prefix is trusted (`config/targets.py`), and `hf` a model of transformers (Hugging Face), by the name
of its class or from a folder, without a download.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_trainer.config.schema.key import ALWAYS, APART, COUNTS, ONCE_SET, SAFE, SCHEDULE, key


class Trait(enum.Enum):
    """Property of a model. `tests/unit/models/test_traits.py` builds each of our models and checks its traits."""

    reads_images = "reads_images"
    """Inputs are [batch, channels, height, width] and nothing else."""
    reads_tokens = "reads_tokens"
    blocks = "blocks"
    """`models/parts.py` finds blocks: FSDP, recomputation and compilation take them one by one."""
    block_matrices = "block_matrices"
    """Blocks have linear layers."""
    convolutions = "convolutions"
    batch_norm = "batch_norm"
    channel_groups = "channel_groups"
    """The model has a method of this name (`models/channels.py`), for channel pruning."""
    pipeline_parts = "pipeline_parts"
    """The model has a method of this name (`models/parts.py`), for pipeline stages."""
    tensor_parallel_plan = "tensor_parallel_plan"
    """The model has a method of this name (docs/parallelism.md)."""


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
    """The embedding and the output layer have as many rows as the vocabulary, rounded up to a multiple of this number.
    Tensor cores are faster with 128 (GPT-2's 50,257 become 50,304). The added rows are never targets, so training soon
    makes them unlikely."""
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


CONFIG_FILE = "config.json"
"""Name of the file in which transformers keeps a model's configuration, beside its weights."""


@dataclass(kw_only=True, slots=True)
class HfConfig(ModelConfig):
    name: str = "hf"
    _target_: str = "hpc_trainer.models.hf.build"
    path: str | None = key(None, ALWAYS, APART, SAFE)
    """Folder with a config.json, as save_pretrained writes it. It is read when the run is planned, and its values are
    in `config` from then on. `init_from=FOLDER` loads the weights."""
    architecture: str | None = key(None, ALWAYS, COUNTS)
    """Name of a class of transformers, such as LlamaForCausalLM; null: the class that the folder's config.json
    names."""
    config: dict[str, Any] = key({}, ALWAYS, COUNTS)
    """Values of the model's own configuration, for example {n_layer: 2}. They take precedence over those of the folder,
    and these over the defaults of transformers."""

    @property
    def has_labels(self) -> bool:
        """True for a classifier; the other models are language models."""
        return "ForSequenceClassification" in str(self.architecture) or self.reads_images

    @property
    def reads_images(self) -> bool:
        """True for a classifier of images; the other models read tokens."""
        return "ForImageClassification" in str(self.architecture)

    def values_for(self, input_shape: tuple[int, ...], num_classes: int) -> dict[str, Any]:
        """Return the values of a planned model's own configuration; values that nobody has set follow from the data."""
        values = {**self.config}
        if not self.has_labels:
            values.setdefault("vocab_size", num_classes)
        elif len(values.get("id2label") or ()) != num_classes:  # labels of other data
            names = {str(label): f"LABEL_{label}" for label in range(num_classes)}
            values |= {"id2label": names, "label2id": {name: int(label) for label, name in names.items()}}
        if self.reads_images and len(input_shape) == 3:
            values = {"image_size": input_shape[1], "num_channels": input_shape[0], **values}
        return values

    def file_for(self, input_shape: tuple[int, ...], num_classes: int) -> dict[str, Any]:
        """Return the config.json beside weights of this model, for `from_pretrained`."""
        return {**self.values_for(input_shape, num_classes), "architectures": [self.architecture], "dtype": "float32"}


class MobilenetSize(str, enum.Enum):
    """Size of a MobileNetV3; the paper has two."""

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
