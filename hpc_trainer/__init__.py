"""Training runs on Slurm: submit a grid in one line; interrupted runs resume by themselves, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_trainer.api import (
        best,
        cancel,
        diff,
        hold,
        logs,
        metrics,
        note,
        plan,
        plan_chain,
        release,
        report,
        results,
        retry,
        show,
        status,
        submit,
        submit_chain,
        sweeps,
        sync,
        tag,
        usage,
        wait,
        why,
    )
    from hpc_trainer.record.metrics import log_metrics
    from hpc_trainer.training.context import RunContext

__version__: str

__all__ = [
    "RunContext", "__version__", "best", "cancel", "diff", "hold", "log_metrics", "logs", "metrics", "note", "plan",
    "plan_chain", "release", "report", "results", "retry", "show", "status", "submit", "submit_chain", "sweeps", "sync",
    "tag", "usage", "wait", "why",
]  # fmt: skip
_OF_API = frozenset(__all__) - {"RunContext", "__version__", "log_metrics"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: `RunContext` imports torch; the functions of `api.py` import Hydra."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("hpc_trainer")
        except PackageNotFoundError:  # a checkout that was never installed
            return "0+unknown"
    if name in _OF_API:
        from hpc_trainer import api

        return getattr(api, name)
    if name == "log_metrics":
        from hpc_trainer.record.metrics import log_metrics

        return log_metrics
    if name == "RunContext":
        from hpc_trainer.training.context import RunContext

        return RunContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, for completion; most of them are imported at their first use."""
    return sorted(__all__)
