"""`model/`: the reference models, one dataclass each; `_target_` names the class that is built.

Built in the worker as `Target(config)` with the dataclass below; `custom` takes any class by name and keyword
arguments, if its prefix is trusted (`config/targets.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.key import ALWAYS, COUNTS, ONCE_SET, SCHEDULE, key


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """What every model has. Not chosen itself."""

    name: str = key("???", ALWAYS, COUNTS)
    _target_: str = key("???", ALWAYS, COUNTS)


@dataclass(kw_only=True, slots=True)
class MlpConfig(ModelConfig):
    name: str = "mlp"
    _target_: str = "hpc_trainer.models.mlp.Mlp"
    hidden_dim: int = key(256, ALWAYS, COUNTS, limits="≥ 1")
    """Width of each hidden layer."""
    num_layers: int = key(2, ALWAYS, COUNTS, limits="≥ 0")
    """Hidden layers; 0 is a linear model."""
    dropout: float = key(0.1, ALWAYS, COUNTS, SCHEDULE, limits="[0, 1)")
    """Probability."""


@dataclass(kw_only=True, slots=True)
class CnnConfig(ModelConfig):
    name: str = "cnn"
    _target_: str = "hpc_trainer.models.cnn.Cnn"
    num_channels: int = key(32, ALWAYS, COUNTS, limits="≥ 1")
    """Channels of the first block; the second has twice as many."""
    dropout: float = key(0.1, ALWAYS, COUNTS, SCHEDULE, limits="[0, 1)")
    """Probability, before the classifier."""


@dataclass(kw_only=True, slots=True)
class ResnetConfig(ModelConfig):
    name: str = "resnet18"
    _target_: str = "hpc_trainer.models.resnet.Resnet"
    depth: int = key(18, ALWAYS, COUNTS, limits="18 or 50")
    """18 (basic blocks) or 50 (bottlenecks); He et al. 2015, table 1."""
    width: int = key(64, ALWAYS, COUNTS, limits="≥ 1")
    """Channels of the first stage; 64 in the paper."""
    small_input_below: int = key(64, ALWAYS, COUNTS, limits="≥ 0")
    """Images with a side below this (pixels) get the paper's CIFAR stem: 3x3, no pooling."""


@dataclass(kw_only=True, slots=True)
class GptConfig(ModelConfig):
    name: str = "gpt"
    _target_: str = "hpc_trainer.models.gpt.Gpt"
    num_layers: int = key(4, ALWAYS, COUNTS, limits="≥ 1")
    """Transformer blocks."""
    num_heads: int = key(4, ALWAYS, COUNTS, limits="≥ 1")
    """Attention heads; must divide embed_dim."""
    embed_dim: int = key(128, ALWAYS, COUNTS, limits="≥ 1")
    """Width of the residual stream."""
    vocab_multiple: int = key(1, ALWAYS, ONCE_SET, limits="≥ 1")
    """The embedding and the output layer have as many rows as the vocabulary, rounded up to a multiple of this:
    tensor cores like 128 (GPT-2's 50,257 become 50,304). What is added is never a target, and soon unlikely."""
    dropout: float = key(0.0, ALWAYS, COUNTS, SCHEDULE, limits="[0, 1)")
    """Probability."""

    def num_rows(self, vocabulary: int) -> int:
        """Of the embedding and the output layer, for so many tokens."""
        multiple = max(1, self.vocab_multiple)
        return -(-vocabulary // multiple) * multiple


@dataclass(kw_only=True, slots=True)
class CustomModelConfig(ModelConfig):
    name: str = "custom"
    kwargs: dict[str, Any] = key({}, ALWAYS, COUNTS)
    """Keyword arguments of the class named by `_target_`."""
