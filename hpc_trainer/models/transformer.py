"""Block of our transformers: attention, then a perceptron, each with a norm before and added to its input.

`model=gpt` and `model=vit` consist of it. Its options are those of GPT-2 (Radford et al. 2019) or later ones: rotary
positions (Su et al. 2021, arXiv:2104.09864), RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), SwiGLU (Shazeer 2020,
arXiv:2002.05202) and grouped queries (Ainslie et al. 2023, arXiv:2305.13245).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_trainer.models.channels import Channels
from hpc_trainer.runtime.devices import kinds_in_use

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


# Dropout in a layer that tensor-parallel ranks share: each rank draws other numbers, with no more state to save.


def own_random_stream() -> ParallelStyle:
    """Return a style for a `tensor_parallel_plan`: in training the layer draws from this rank's own random stream.

    This needs `layer.dropout` > 0. Ranks of one tensor-parallel group draw the same numbers, because they hold the same
    activations. In attention they hold different heads, and the same dropout mask for heads of two ranks would be
    wrong. So the layer draws a number from the common stream, the same on all ranks, and seeds its own stream from it
    and the rank; afterwards the common stream continues. Recomputation restores the common stream, so it draws the same
    numbers again. Megatron keeps a second state instead.
    """
    from torch.distributed.tensor.parallel import ParallelStyle

    class OwnRandomStream(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            forked: Any = module
            forked.own_stream_rank = device_mesh.get_local_rank()
            forked.__class__ = _forked(type(module))  # type: ignore[arg-type]  # classes can be hashed; mypy 2 says no
            return module

    return OwnRandomStream()


@functools.cache
def _forked(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` that draws from its own random stream.

    A class, not hooks: torch.compile recognises equal layers by their class, and hooks have numbers.
    """

    def forward(self: Any, *args: Any) -> Any:
        if self.training and self.dropout:
            return in_own_stream(self, kind.forward, args)
        return kind.forward(self, *args)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def in_own_stream(layer: Any, forward: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run `forward` of `layer` with this rank's own random stream; afterwards the common stream continues.

    This function reads a number from a tensor, so torch.compile must skip it (features/compile/graphs.py), but not
    `forward`.
    """
    drawn = int(torch.randint(2**62, ())) + layer.own_stream_rank
    before, devices = torch.get_rng_state(), [(kind, kind.rng_state()) for kind in kinds_in_use()]
    torch.default_generator.manual_seed(drawn)
    for kind, _ in devices:
        kind.seed(drawn)
    try:
        return forward(layer, *args)
    finally:  # recomputation may leave a layer early
        torch.set_rng_state(before)
        for kind, state in devices:
            kind.set_rng_state(state)


_ROPE_BASE = 10_000.0  # Su et al. 2021, section 3.2.2
_RMS_EPS = 1e-5  # as in Llama 2; torch's default depends on the number format


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Sizes and options of a block; the defaults are those of GPT-2."""

    dim: int
    """Width of the residual stream; `num_heads` divides it."""
    num_heads: int
    mlp_dim: int
    """Width of the perceptron's hidden layer."""
    dropout: float = 0.0
    num_kv_heads: int | None = None
    """Number of heads of keys and values, which divides `num_heads`; None for `num_heads`."""
    is_causal: bool = True
    """If True, a position sees itself and earlier positions; else all positions."""
    has_rope: bool = False
    has_rms_norm: bool = False
    has_swiglu: bool = False
    norm_eps: float = 1e-5
    gelu: str = "tanh"
    """torch's name of the approximation: tanh (GPT-2) or none (exact)."""

    def norm(self) -> nn.Module:
        """Return a new norm over the last dimension."""
        return nn.RMSNorm(self.dim, eps=_RMS_EPS) if self.has_rms_norm else nn.LayerNorm(self.dim, eps=self.norm_eps)


class Attention(nn.Module):
    """Multi-head attention; keeps the shape [batch, seq, dim]."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        num_kv_heads = shape.num_kv_heads or shape.num_heads
        self.head_dim = shape.dim // shape.num_heads
        self.group_size = shape.num_heads // num_kv_heads
        self.dropout, self.is_causal, self.has_rope = shape.dropout, shape.is_causal, shape.has_rope
        # Rows are ordered by head of keys, as in GPT-NeoX and Megatron: its queries, its key, its value. So contiguous
        # rows hold whole heads.
        self.query_key_value = nn.Linear(shape.dim, num_kv_heads * (self.group_size + 2) * self.head_dim)
        self.out = nn.Linear(shape.dim, shape.dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, seq_len, dim] to the same shape."""
        batch, seq_len, _ = hidden.shape
        # [batch, seq, kv heads, queries + 2, head_dim]; with tensor parallelism only this rank's heads
        by_head = self.query_key_value(hidden).view(batch, seq_len, -1, self.group_size + 2, self.head_dim)
        if self.group_size == 1:  # three of [batch, heads, seq, head_dim]
            query, key, value = by_head.permute(3, 0, 2, 1, 4).unbind(0)
        else:
            parts = by_head.split((self.group_size, 1, 1), dim=3)
            query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)
        if self.has_rope:
            query, key = rotate(query), rotate(key)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.group_size > 1,
        )  # fmt: skip
        outputs: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq_len, -1))
        return outputs


def rotate(heads: Tensor) -> Tensor:
    """Apply rotary positions to [batch, heads, seq, head_dim]; dimensions i and i + head_dim / 2 rotate together.

    Angles are computed each time: a buffer would be made equal on all ranks at every step.
    """
    half, seq_len = heads.shape[-1] // 2, heads.shape[-2]
    speeds = _ROPE_BASE ** (torch.arange(half, device=heads.device, dtype=torch.float32) / -half)
    angles = torch.arange(seq_len, device=heads.device, dtype=torch.float32)[:, None] * speeds  # [seq, head_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


class Block(nn.Module):
    """Attention, then a perceptron, each with a norm before and added to the residual stream."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gelu = shape.gelu
        self.attention_norm = shape.norm()
        self.attention = Attention(shape)
        self.mlp_norm = shape.norm()
        self.mlp_in = nn.Linear(shape.dim, shape.mlp_dim)
        self.mlp_gate = nn.Linear(shape.dim, shape.mlp_dim) if shape.has_swiglu else None
        self.mlp_out = nn.Linear(shape.mlp_dim, shape.dim)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, seq_len, dim] to the same shape."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        normed = self.mlp_norm(hidden)
        if self.mlp_gate is None:
            widened = functional.gelu(self.mlp_in(normed), approximate=self.gelu)
        else:
            widened = functional.silu(self.mlp_gate(normed)) * self.mlp_in(normed)
        outputs: Tensor = hidden + self.dropout(self.mlp_out(widened))
        return outputs


def block_channels(shape: BlockShape, num_layers: int) -> list[Channels]:
    """Return the removable channels of `blocks.*`: heads (each key's with its queries) and perceptron units."""
    group_size = shape.num_heads // (shape.num_kv_heads or shape.num_heads)
    head = (group_size + 2) * (shape.dim // shape.num_heads)
    wide = ("mlp_in", "mlp_gate") if shape.has_swiglu else ("mlp_in",)
    groups = []
    for name in (f"blocks.{index}" for index in range(num_layers)):
        made_by, read_by = (f"{name}.attention.query_key_value",), (f"{name}.attention.out",)
        groups.append(Channels(made_by=made_by, read_by=read_by, unit=head))
        groups.append(Channels(made_by=tuple(f"{name}.{layer}" for layer in wide), read_by=(f"{name}.mlp_out",)))
    return groups


def block_plan(shape: BlockShape) -> dict[str, ParallelStyle]:
    """Return how tensor-parallel ranks share `blocks.*` (Shoeybi et al. 2019, section 3).

    Heads and the wide layer are divided, norms copied. Each block needs two all-reduces forward and two backward.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    gate: dict[str, ParallelStyle] = {"blocks.*.mlp_gate": ColwiseParallel()} if shape.has_swiglu else {}
    return {
        "blocks.*.attention": own_random_stream(),
        "blocks.*.attention.query_key_value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp_in": ColwiseParallel(),
        **gate,
        "blocks.*.mlp_out": RowwiseParallel(),
    }
