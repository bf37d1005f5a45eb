"""Blocks of a model: the modules that FSDP, recomputation, compilation and others process one by one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hpc_trainer.errors import ConfigError


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a module, such as the layers of a transformer or ResNet.

    A block is an outermost item of an nn.ModuleList or nn.Sequential that has modules in it. A sequence of plain
    layers (an MLP) has no blocks.
    """
    for child in module.children():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        is_block = is_list and not isinstance(child, (nn.ModuleList, nn.Sequential))
        if is_block and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child)


def check_has_blocks(model: nn.Module, what: str, use: str) -> None:
    """Check that a whole model has blocks; a stage of it may have none.

    Args:
        model: the whole model.
        what: the beginning of the message: what would be done to blocks.
        use: what to use instead, for the message.

    Raises:
        ConfigError: the model has no blocks.
    """
    if not any(True for _ in blocks(model)):
        raise ConfigError(
            f"{what}, and {type(model).__name__} has none: layers that are modules with layers of their own, in "
            f"an nn.ModuleList or nn.Sequential. Use {use}."
        )
