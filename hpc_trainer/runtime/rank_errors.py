"""Outcome of an action, as JSON that ranks can send each other: its value, or the kind and the text of its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hpc_trainer.errors import (
    CheckpointError,
    CorruptCheckpointError,
    HpcTrainerError,
    StorageError,
    UntrustedFileError,
)
from hpc_trainer.runtime.rank_group import RankGroup

T = TypeVar("T")
# An error of one rank is raised on all ranks, by its name: nothing is unpickled from a peer.
_KINDS = {kind.__name__: kind for kind in (CheckpointError, CorruptCheckpointError, StorageError, UntrustedFileError)}


def attempt(action: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    """Run `action`, which returns JSON, and return (outcome, error); the error is None if there was none."""
    try:
        return {"kind": "", "value": action()}, None
    except HpcTrainerError as error:
        kind = type(error).__name__
        return {"kind": kind if kind in _KINDS else CheckpointError.__name__, "text": str(error)}, error
    except OSError as error:
        return {"kind": StorageError.__name__, "text": f"{type(error).__name__}: {error}"}, error
    except Exception as error:  # whatever it is: a rank that left here would leave its peers waiting
        text = f"{type(error).__name__}: {error}"
        return {"kind": CheckpointError.__name__, "text": text}, error


def raise_any(outcomes: list[dict[str, Any]], cause: Exception | None) -> None:
    """Raise the errors among the outcomes (by rank) as one error, of their kind if they are all of one kind."""
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome["kind"]}
    if failed:
        kinds = {outcome["kind"] for outcome in failed.values()}
        kind = _KINDS[kinds.pop()] if len(kinds) == 1 else CheckpointError
        texts = dict.fromkeys(outcome["text"] for outcome in failed.values())
        if len(failed) < len(outcomes) or len(texts) > 1:
            texts = dict.fromkeys(f"rank {rank}: {outcome['text']}" for rank, outcome in failed.items())
        raise kind("; ".join(texts)) from cause


def on_rank_zero(group: RankGroup, action: Callable[[], Any]) -> Any:
    """Return rank 0's result (JSON) on all ranks, or raise its error on all ranks. Collective."""
    outcome, cause = None, None
    if group.is_rank_zero:
        outcome, cause = attempt(action)
    outcome = group.broadcast(outcome)
    raise_any([outcome], cause)
    return outcome["value"]


def on_each_rank(group: RankGroup, action: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
    """Run `action` on each rank, and return its results, or raise the errors of all ranks. Collective.

    Args:
        action: returns (value that stays on this rank, JSON value for all ranks).

    Returns:
        (value of this rank, JSON values by rank).
    """
    kept: list[T] = []

    def share() -> Any:
        own, shared = action()
        kept.append(own)
        return shared

    outcome, cause = attempt(share)
    outcomes = group.gather(outcome)
    raise_any(outcomes, cause)
    return kept[0], [each["value"] for each in outcomes]
