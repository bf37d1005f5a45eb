"""What `plan` has to know of a model that it does not build: rows of what goes with what ask for it."""

from __future__ import annotations

import enum


class Trait(enum.Enum):
    """What a model is, or has. `tests/unit/models/test_traits.py` builds each of ours and looks if it says so."""

    reads_images = "reads_images"
    """Inputs are [batch, channels, height, width], and nothing else."""
    reads_tokens = "reads_tokens"
    blocks = "blocks"
    """`models/blocks.py` finds some: FSDP, recomputation and compilation take them one by one."""
    block_matrices = "block_matrices"
    """Linear layers in its blocks."""
    convolutions = "convolutions"
    batch_norm = "batch_norm"
    channel_groups = "channel_groups"
    """A method of that name (`models/channels.py`), for channel pruning."""
    pipeline_parts = "pipeline_parts"
    """A method of that name (`models/parts.py`), for stages."""
    tensor_parallel_plan = "tensor_parallel_plan"
    """A method of that name (docs/parallelism.md)."""
