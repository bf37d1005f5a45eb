"""Takes the weights out of one checkpoint, however ranks shared them, into one file that anybody can load.

    python -m hpc_trainer.worker.take_out < request.json     one JSON object is printed

A process of its own: reading tensors takes torch, and the login node's layers do without it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError, RunStateError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.checkpoint.tensor_files import SavedTensor, whole_tree, write_tensors


def take_out(
    checkpoints: Path, step: int, target: Path, *, name: str, over: tuple[str, str] | None = None
) -> dict[str, Any]:
    """Writes the state_dict of the module `name` to `target`: with the suffix .pt as torch.save does, else safetensors.

    Args:
        over: another object and what its names begin with: where it has a tensor of the module's, that one is taken.

    Returns:
        What the checkpoint was made with, and how many tensors, elements and bytes the file has.

    Raises:
        CheckpointError: there is no such module in it; CorruptCheckpointError: bytes have changed.
        RunStateError: the module has more than tensors, and the format does not; UntrustedFileError, OSError.
    """
    told: list[str] = []
    store = CheckpointStore(checkpoints, group=RankGroup(), keep_last=1, attempt=0, read_only=True, warn=told.append)
    info = store.newest_valid(only=step)
    if info is None:
        raise CorruptCheckpointError("; ".join(told) or f"{checkpoints} holds no checkpoint of step {step}.")

    def take(shared: Any, _: Any) -> dict[str, Any]:
        return whole_tree(_state_of(shared["objects"], name, over))  # type: ignore[no-any-return]

    state = store.load(info, take)
    others = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if target.suffix == ".pt":
        with target.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    elif others:
        raise RunStateError(
            f"{others[0]} of the model is no tensor (get_extra_state), and safetensors holds tensors alone. Use --to "
            "torch."
        )
    else:
        write_tensors(target, state)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return {
        "made_with": info.meta.get("made_with"),
        "num_tensors": len(tensors),
        "num_elements": sum(each.numel() for each in tensors),
        "num_bytes": target.stat().st_size,
    }


def _state_of(objects: Mapping[str, Any], name: str, over: tuple[str, str] | None) -> dict[str, Any]:
    if name not in objects or not _is_state(objects[name]):
        listed = ", ".join(key for key, value in objects.items() if _is_state(value)) or "none"
        raise CheckpointError(f"the checkpoint holds no module {name!r}. Modules in it: {listed}. Use --object NAME.")
    state = dict(objects[name])
    if over is not None:
        instead, prefix = objects.get(over[0], {}), over[1]
        state |= {key: instead[prefix + key] for key in state if isinstance(instead.get(prefix + key), SavedTensor)}
    return state


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(each, SavedTensor) for each in value.values())


def main() -> None:
    """Reads the arguments of `take_out` and prints what it returns, or the error, for the asking process to raise."""
    asked = json.load(sys.stdin)
    over = asked["over"]
    try:
        answer = take_out(
            Path(asked["checkpoints"]), asked["step"], Path(asked["target"]), name=asked["name"],
            over=None if over is None else (over[0], over[1]),
        )  # fmt: skip
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
