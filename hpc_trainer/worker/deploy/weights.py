"""Weights of one checkpoint as one state_dict, however ranks sharded them, and files of weights alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError, RunStateError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.checkpoint.tensor_files import SavedTensor, whole_tree, write_tensors


@dataclass(frozen=True, slots=True)
class Taken:
    """State of a module in a checkpoint, and the checkpoint's record of what it was made with."""

    state: dict[str, Any]
    made_with: Mapping[str, Any]


def take_out(checkpoints: Path, step: int, *, name: str, over: tuple[str, str] | None = None) -> Taken:
    """Return the state_dict of the module `name` on the CPU, and what the checkpoint was made with.

    Args:
        over: (another object, prefix of its names): its tensors replace those of the module.

    Raises:
        CheckpointError: the checkpoint holds no such module.
        CorruptCheckpointError: bytes have changed, or there is no checkpoint of this step.
        UntrustedFileError, OSError: the files are not trusted, or cannot be read.
    """
    notes: list[str] = []
    store = CheckpointStore(checkpoints, group=RankGroup(), keep_last=1, attempt=0, read_only=True, warn=notes.append)
    info = store.newest_valid(only=step)
    if info is None:
        raise CorruptCheckpointError("; ".join(notes) or f"{checkpoints} holds no checkpoint of step {step}.")

    def take(shared: Any, _: Any) -> dict[str, Any]:
        return whole_tree(_state_of(shared["objects"], name, over))  # type: ignore[no-any-return]

    return Taken(store.load(info, take), info.meta.get("made_with") or {})


def write_weights(path: Path, state: Mapping[str, Any]) -> None:
    """Write weights as torch.save does if the suffix is .pt, else as safetensors; they are on disk on return.

    Raises:
        RunStateError: the state holds more than tensors, and the format does not.
    """
    if path.suffix == ".pt":
        with path.open("xb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        return
    other = next((key for key, value in state.items() if not isinstance(value, torch.Tensor)), None)
    if other is not None:
        raise RunStateError(
            f"{other} of the model is no tensor (get_extra_state), and safetensors holds tensors alone. Use --to torch."
        )
    write_tensors(path, dict(state))


def read_weights(path: Path) -> dict[str, Any]:
    """Read what `write_weights` wrote. No code of the file runs: torch's format may hold only tensors and numbers."""
    if path.suffix == ".pt":
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
        return loaded
    return load_file(path)


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
    return isinstance(value, dict) and any(isinstance(entry, SavedTensor) for entry in value.values())
