"""Submit grids of training runs to Slurm in one line; they come back by themselves, with the same bits."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_trainer.training.context import RunContext

__all__ = ["RunContext", "__version__"]

try:
    __version__ = version("hpc_trainer")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Imports `RunContext` when it is first asked for: it brings torch, and the command line must not."""
    if name == "RunContext":
        from hpc_trainer.training.context import RunContext

        return RunContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
