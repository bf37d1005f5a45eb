"""`model/`: the reference models, one dataclass each; `_target_` names the class that is built.

Built in the worker as `Target(config)` with the dataclass below; `custom` takes any class by name and keyword
arguments, if its prefix is trusted (`config/targets.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """What every model has. Not chosen itself."""

    name: str = "???"
    _target_: str = "???"


@dataclass(kw_only=True, slots=True)
class MlpConfig(ModelConfig):
    name: str = "mlp"
    _target_: str = "hpc_trainer.models.mlp.Mlp"
    hidden_dim: int = 256
    """Width of each hidden layer, ≥ 1."""
    num_layers: int = 2
    """Hidden layers, ≥ 0; 0 is a linear model."""
    dropout: float = 0.1
    """Probability in [0, 1)."""


@dataclass(kw_only=True, slots=True)
class CnnConfig(ModelConfig):
    name: str = "cnn"
    _target_: str = "hpc_trainer.models.cnn.Cnn"
    num_channels: int = 32
    """Channels of the first block; the second has twice as many."""
    dropout: float = 0.1
    """Probability in [0, 1), before the classifier."""


@dataclass(kw_only=True, slots=True)
class ResnetConfig(ModelConfig):
    name: str = "resnet18"
    _target_: str = "hpc_trainer.models.resnet.Resnet"
    depth: int = 18
    """18 (basic blocks) or 50 (bottlenecks); He et al. 2015, table 1."""
    width: int = 64
    """Channels of the first stage; 64 in the paper."""
    small_input_below: int = 64
    """Images with a side below this (pixels, ≥ 0) get the paper's CIFAR stem: 3x3, no pooling."""


@dataclass(kw_only=True, slots=True)
class GptConfig(ModelConfig):
    name: str = "gpt"
    _target_: str = "hpc_trainer.models.gpt.Gpt"
    num_layers: int = 4
    """Transformer blocks, ≥ 1."""
    num_heads: int = 4
    """Attention heads; must divide embed_dim."""
    embed_dim: int = 128
    """Width of the residual stream."""
    vocab_multiple: int = 1
    """The embedding and the output layer have as many rows as the vocabulary, rounded up to a multiple of this, ≥ 1:
    tensor cores like 128 (GPT-2's 50,257 become 50,304). What is added is never a target, and soon unlikely."""
    dropout: float = 0.0
    """Probability in [0, 1)."""

    def num_rows(self, vocabulary: int) -> int:
        """Of the embedding and the output layer, for so many tokens."""
        multiple = max(1, self.vocab_multiple)
        return -(-vocabulary // multiple) * multiple


@dataclass(kw_only=True, slots=True)
class CustomModelConfig(ModelConfig):
    name: str = "custom"
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class named by `_target_`."""
