"""Decoder-only transformer like GPT-2 (Radford et al. 2019); on bytes with `data=text_bytes`.

Learned positions, LayerNorm before each sub-layer, GELU (tanh form) of 4 x embed_dim, a head tied to the
token embedding; weights start at N(0, 0.02), those that write to the residual stream at 0.02 / sqrt(2 x
num_layers). Keys choose options of later models (transformer.py): rotary positions, RMSNorm, SwiGLU, grouped queries.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_trainer.config.schema.model import GptConfig, MlpKind, Norm, Positions
from hpc_trainer.errors import ConfigError
from hpc_trainer.models import check_num_classes
from hpc_trainer.models.channels import Channels
from hpc_trainer.models.parts import Part
from hpc_trainer.models.transformer import Block, BlockShape, block_channels, block_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

_INIT_STD = 0.02


class TiedHead(nn.Module):
    """Output layer without a weight: maps hidden states [.., dim] and an embedding [vocabulary, dim] to logits.

    The weight is tied by use, not by a second parameter: safetensors refuses two names for one memory.
    """

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Map [batch, seq_len, embed_dim] and [num_rows, embed_dim] to logits [batch, seq_len, num_rows]."""
        return functional.linear(hidden, embedding)


class Gpt(nn.Module):
    """`num_layers` blocks over token and position embeddings.

    `input_shape` is (seq_len,), the longest window; `num_classes` is the vocabulary, which is rounded up to a multiple
    of `vocab_multiple`. Maps tokens int64 [batch, seq], seq ≤ seq_len, to logits [batch, seq, rounded num_classes];
    logits at a position depend only on tokens up to it. Raises ConfigError if the input shape is not possible, or a
    window is too long.
    """

    def __init__(self, config: GptConfig, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        _check(input_shape)
        check_num_classes(num_classes)
        (self.seq_len,) = input_shape
        self._shape = shape = _shape(config)
        self.token_embedding = nn.Embedding(config.num_rows(num_classes), config.embed_dim)
        self.position_embedding = None if shape.has_rope else nn.Embedding(self.seq_len, config.embed_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(config.num_layers))
        self.norm = shape.norm()
        self.head = TiedHead()
        self._init_weights(config.num_layers)

    def _init_weights(self, num_layers: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                is_residual = name.endswith(("attention.out", "mlp_out"))
                scale = 1 / math.sqrt(2 * num_layers) if is_residual else 1.0
                nn.init.normal_(module.weight, std=_INIT_STD * scale)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)

    def forward(self, inputs: Tensor, *, with_head: bool = True) -> Tensor:
        """Map tokens [batch, seq] to logits [batch, seq, num_classes], or to [batch, seq, embed_dim] without head."""
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return self.apply_head(hidden) if with_head else hidden

    def embed(self, inputs: Tensor) -> Tensor:
        """Map tokens [batch, seq] to the residual stream [batch, seq, embed_dim]."""
        seq_len = inputs.shape[1]
        if seq_len > self.seq_len:
            raise ConfigError(
                f"model=gpt was built for windows of at most {self.seq_len} tokens but got {seq_len}; "
                f"cut the window or set data.seq_len={seq_len}."
            )
        hidden: Tensor = self.token_embedding(inputs)
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding(torch.arange(seq_len, device=inputs.device))
        outputs: Tensor = self.dropout(hidden)
        return outputs

    def predict(self, hidden: Tensor) -> Tensor:
        """Map the residual stream to logits [batch, seq, num_classes]."""
        return self.apply_head(self.norm(hidden))

    def apply_head(self, hidden: Tensor) -> Tensor:
        """Apply the output layer: map [.., embed_dim] to logits [.., num_classes]."""
        logits: Tensor = self.head(hidden, self.token_embedding.weight)
        return logits

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """Return how ranks share the layers: `block_plan`, a divided vocabulary, and copied positions."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import PrepareModuleInputOutput, RowwiseParallel

        return {
            "token_embedding": RowwiseParallel(input_layouts=Replicate()),
            **block_plan(self._shape),
            "head": PrepareModuleInputOutput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None),
                output_layouts=Shard(-1), desired_output_layouts=Replicate(),
            ),
        }  # fmt: skip

    def channel_groups(self) -> list[Channels]:
        """Return heads and perceptron units of each block; the width of the residual stream does not change."""
        return block_channels(self._shape, len(self.blocks))

    def pipeline_parts(self) -> list[Part]:
        """Return the parts for stages, cut before and after each block; the first and the last hold the embedding."""
        blocks = [Part(f"blocks.{index}") for index in range(len(self.blocks))]
        positions = () if self.position_embedding is None else ("position_embedding",)
        return [
            Part("embed", ("token_embedding", *positions, "dropout")),
            *blocks,
            Part("predict", ("norm", "head", "token_embedding")),
        ]


def _shape(config: GptConfig) -> BlockShape:
    return BlockShape(
        dim=config.embed_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        mlp_dim=config.mlp_dim,
        dropout=config.dropout,
        has_rope=config.positions == Positions.rope,
        has_rms_norm=config.norm == Norm.rmsnorm,
        has_swiglu=config.mlp == MlpKind.swiglu,
    )


def _check(input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise ConfigError(
            f"model=gpt reads tokens, so the data's input_shape must be (seq_len,) with seq_len ≥ 1, "
            f"but it is {input_shape}. Choose data=text_bytes or synthetic_tokens; for images, model=cnn."
        )
