"""Facts about a model that `plan` needs without building it: rows of what goes with what use them."""

from __future__ import annotations

import enum


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
