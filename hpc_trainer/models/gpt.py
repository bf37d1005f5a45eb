"""A decoder-only transformer in the manner of GPT-2 (Radford et al. 2019); on bytes with `data=text_bytes`.

Learned positions, LayerNorm before each sub-layer, GELU (tanh form) of 4 x embed_dim, a head tied to the
token embedding; weights start at N(0, 0.02), those that write to the residual stream at 0.02 / sqrt(2 x
num_layers).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.models import check_at_least, check_dropout, check_num_classes
from hpc_trainer.models.parts import Part
from hpc_trainer.models.random_stream import own_random_stream

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

_INIT_STD = 0.02
_MLP_RATIO = 4


class CausalSelfAttention(nn.Module):
    """Multi-head attention: a position sees itself and what comes before; [batch, seq, dim] to the same."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.head_dim = config.embed_dim // config.num_heads
        self.dropout = config.dropout
        # Rows by head, as GPT-NeoX and Megatron have them: so a contiguous part of the rows is some whole heads.
        self.query_key_value = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.out = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq_len, embed_dim] to the same."""
        batch, seq_len, _ = hidden.shape
        # [batch, seq, 3 dim] -> three of [batch, heads, seq, dim / heads]; with tensor parallel this rank's heads
        by_head = self.query_key_value(hidden).view(batch, seq_len, -1, 3, self.head_dim)
        query, key, value = by_head.permute(3, 0, 2, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        outputs: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq_len, -1))
        return outputs


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each normalised before and added to the residual stream."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, _MLP_RATIO * dim)
        self.mlp_out = nn.Linear(_MLP_RATIO * dim, dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq_len, embed_dim] to the same."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        widened = functional.gelu(self.mlp_in(self.mlp_norm(hidden)), approximate="tanh")
        outputs: Tensor = hidden + self.dropout(self.mlp_out(widened))
        return outputs


class TiedHead(nn.Module):
    """Hidden states [.., dim] and the token embedding [vocabulary, dim] to logits [.., vocabulary]; holds no weight.

    Tied by use, not by a second parameter: safetensors refuses two names for one memory.
    """

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """[batch, seq_len, embed_dim] by [num_rows, embed_dim] to logits [batch, seq_len, num_rows]."""
        return functional.linear(hidden, embedding)


class Gpt(nn.Module):
    """`num_layers` blocks over token and position embeddings.

    `input_shape` is (seq_len,), the longest window; `num_classes` is the vocabulary, which is rounded up to a multiple
    of `vocab_multiple`. Tokens int64 [batch, seq] with seq ≤ seq_len to logits [batch, seq, num_classes as rounded];
    logits at a position depend on tokens up to it only. Raises ConfigError where a value or the input shape cannot be,
    or a window is too long.
    """

    def __init__(self, config: GptConfig, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        _check(config, input_shape)
        check_num_classes(num_classes)
        (self.seq_len,) = input_shape
        self.token_embedding = nn.Embedding(config.num_rows(num_classes), config.embed_dim)
        self.position_embedding = nn.Embedding(self.seq_len, config.embed_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim)
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
        """Tokens [batch, seq] to logits [batch, seq, num_classes]; without the head to [batch, seq, embed_dim]."""
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return self.apply_head(hidden) if with_head else hidden

    def embed(self, inputs: Tensor) -> Tensor:
        """Tokens [batch, seq] to the residual stream [batch, seq, embed_dim]."""
        seq_len = inputs.shape[1]
        if seq_len > self.seq_len:
            raise ConfigError(
                f"model=gpt was built for windows of at most {self.seq_len} tokens but got {seq_len}; "
                f"cut the window or set data.seq_len={seq_len}."
            )
        positions = torch.arange(seq_len, device=inputs.device)
        hidden: Tensor = self.dropout(self.token_embedding(inputs) + self.position_embedding(positions))
        return hidden

    def predict(self, hidden: Tensor) -> Tensor:
        """The residual stream to logits [batch, seq, num_classes]."""
        return self.apply_head(self.norm(hidden))

    def apply_head(self, hidden: Tensor) -> Tensor:
        """The output layer: [.., embed_dim] to logits [.., num_classes]."""
        logits: Tensor = self.head(hidden, self.token_embedding.weight)
        return logits

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """How ranks share the layers (Shoeybi et al. 2019, section 3): heads, the wide layer and the vocabulary are
        divided; norms and positions copied. Two all-reduces a block forward, two backward.
        """
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInputOutput, RowwiseParallel

        return {
            "token_embedding": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.attention": own_random_stream(),
            "blocks.*.attention.query_key_value": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.mlp_in": ColwiseParallel(),
            "blocks.*.mlp_out": RowwiseParallel(),
            "head": PrepareModuleInputOutput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None),
                output_layouts=Shard(-1), desired_output_layouts=Replicate(),
            ),
        }  # fmt: skip

    def pipeline_parts(self) -> list[Part]:
        """How it is cut into stages: before and after each block. The first and the last stage hold the embedding."""
        blocks = [Part(f"blocks.{index}") for index in range(len(self.blocks))]
        return [
            Part("embed", ("token_embedding", "position_embedding", "dropout")),
            *blocks,
            Part("predict", ("norm", "head", "token_embedding")),
        ]


def _check(config: GptConfig, input_shape: tuple[int, ...]) -> None:
    check_at_least("model.num_layers", config.num_layers, 1)
    check_at_least("model.num_heads", config.num_heads, 1)
    check_at_least("model.embed_dim", config.embed_dim, 1)
    check_at_least("model.vocab_multiple", config.vocab_multiple, 1)
    check_dropout(config.dropout)
    if config.embed_dim % config.num_heads:
        divisors = [count for count in range(1, config.embed_dim + 1) if config.embed_dim % count == 0]
        nearest = min(divisors, key=lambda count: abs(count - config.num_heads))
        raise ConfigError(
            f"model.num_heads={config.num_heads} must divide model.embed_dim={config.embed_dim}; "
            f"nearest legal: model.num_heads={nearest}."
        )
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise ConfigError(
            f"model=gpt reads tokens, so the data's input_shape must be (seq_len,) with seq_len ≥ 1, "
            f"but it is {input_shape}. Choose data=text_bytes or synthetic_tokens; for images, model=cnn."
        )
