"""Meaning of a failed run's last output, and remedies: for `why` and the report."""

from __future__ import annotations

from hpc_trainer.operate.verdicts import REFUSALS
from hpc_trainer.runs.spec import Shape
from hpc_trainer.state.last_words import Sign, sign_of
from hpc_trainer.state.status import RunStatus


def meaning_of(run: RunStatus) -> Sign | None:
    """Return what a failed run's last output means; None if it means nothing or the cause has a verdict of its own."""
    error = run.error
    if not run.state.has_failed or run.cause in REFUSALS:
        return None
    return sign_of([*last_lines(run), f"{error.get('type', '')}: {error.get('message', '')}"])


def last_lines(run: RunStatus) -> list[str]:
    """Return the last lines that the run's job or program printed before its failure; empty if they are not known."""
    return str(run.error.get("output", "")).splitlines()


def more_memory(shape: Shape) -> str:
    """Return the override for twice the memory of a shape, or for 4 GB a core if the shape uses the site's default."""
    for name in ("mem_gb_per_gpu", "mem_gb_per_cpu", "mem_gb_per_node"):
        asked_gb = getattr(shape, name)
        if asked_gb is not None:
            return f"hardware.{name}={2 * asked_gb:g}"
    return f"hardware.mem_gb_per_node={4 * shape.tasks_per_node * shape.cpus_per_task}"
