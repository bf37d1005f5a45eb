"""The blocks of a model: what FSDP, recomputation, compilation and others take one by one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hpc_trainer.errors import ConfigError


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost items of lists and sequences that consist of modules themselves: layers of a transformer or ResNet.

    A sequence of plain layers (an MLP) has none.
    """
    for child in module.children():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        is_block = is_list and not isinstance(child, (nn.ModuleList, nn.Sequential))
        if is_block and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child)


def check_has_blocks(model: nn.Module, what: str, use: str) -> None:
    """Of a whole model; a stage of one may have none.

    Raises:
        ConfigError: `what` does something to blocks, and there are none; `use` is the way out.
    """
    if not any(True for _ in blocks(model)):
        raise ConfigError(
            f"{what}, and {type(model).__name__} has none: layers that are modules with layers of their own, in "
            f"an nn.ModuleList or nn.Sequential. Use {use}."
        )
