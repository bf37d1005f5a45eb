"""Random number generators: seed them differently for each rank, and save and restore all of them."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hpc_trainer.runtime.devices import kind_of, kinds_in_use

_PYTHON_STATE_VERSION = 3  # of random.getstate(), since Python 2.3


def seed_everything(seed: int, rank: int | str | None = None) -> None:
    """Seed Python, numpy and torch (CPU, all CUDA devices) from (seed, rank). Not collective.

    Without `rank` the seed is the same on all ranks, for building the model. With `rank` every rank gets its own
    stream, for dropout and the like; seed like this after the model is built. Ranks that share layers (tensor parallel)
    hold the same activations and pass the same `rank` (`config.mesh.MeshShape.stream`).

    The seed of each generator is a part of SHA-256 over the text "hpc_trainer <seed> <rank> <generator>", so
    neighbouring seeds and ranks have nothing in common, and (seed 0, rank 1) is not (seed 1, rank 0). torch's
    CPU generator takes 32 bits of it (at::mt19937): of 1,000 ranks, two share a stream with probability 1e-4.
    """
    number = _seed_python(seed, rank)
    torch.manual_seed(number)
    for kind in kinds_in_use():  # torch.manual_seed does this, except for XLA
        kind.seed(number)


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seed the generators of `seed_everything` from (seed, logical rank, step). Not collective.

    This takes 40 µs, and leaves no state to save. Two of a million steps may share a stream of torch's CPU generator,
    as in `seed_everything`; they see different samples.
    """
    number = _seed_python(seed, f"{rank} {step}")
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.2 ms without CUDA
    for kind in kinds_in_use():
        kind.seed(number)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the generators' state at the end of the context, so that draws and seeds in it leave no trace."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


def rng_for_world(saved: dict[str, Any] | None, *, seed: int, rank: int | str, step: int) -> dict[str, Any]:
    """Return the random state with which a rank continues from a checkpoint.

    This is the state that this rank saved, if as many ranks saved as there are now, on the same mesh. Else no saved
    stream fits: every rank begins a new one from (seed, rank, step). So two restarts at one step are alike, and ranks
    that read different samples have different streams. Dropout then differs from the undisturbed run, and the
    generators of this process are set to the state that is returned.

    Args:
        saved: result of `rng_state` at the save; None if another number of ranks saved, or on another mesh.
        seed: `config.seed`.
        rank: 0 to world_size - 1; with tensor or pipeline parallelism `MeshShape.stream`.
        step: the step of the checkpoint.
    """
    if saved is not None:
        return saved
    seed_everything(seed, f"{rank} resumed {step}")
    return rng_state()


def rng_state() -> dict[str, Any]:
    """Return the state of the generators of Python, numpy, torch's CPU and the current device, as `pack` takes it.

    "cuda" is None in a process that has not used CUDA; other kinds of devices have a key if they are in use. Generators
    that the user created are not included.
    """
    version, state, gauss = random.getstate()
    assert version == _PYTHON_STATE_VERSION
    return {
        "python": {"words": torch.tensor(state, dtype=torch.int64), "gauss": gauss},
        "numpy": arrays_to_tensors(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": None,
        **{kind.type: kind.rng_state() for kind in kinds_in_use()},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that `rng_state` returned. The state of a device is ignored if this machine has none such.

    Raises:
        KeyError: a part is missing.
    """
    python = state["python"]
    random.setstate((_PYTHON_STATE_VERSION, tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(tensors_to_arrays(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        kind_of("cuda").set_rng_state(state["cuda"])
    for kind in kinds_in_use():
        if kind.type != "cuda" and kind.type in state:
            kind.set_rng_state(state[kind.type])


def _seed_python(seed: int, place: int | str | None) -> int:
    """Seed Python and numpy, and return the seed for torch."""
    random.seed(_mix(seed, place, "python"))
    numpy_seed = _mix(seed, place, "numpy").to_bytes(32, "little")
    np.random.seed(
        np.frombuffer(numpy_seed, dtype="<u4").astype(np.uint32)
    )  # seeds numpy's global generator on purpose
    return _mix(seed, place, "torch") % 2**63


def _mix(seed: int, rank: int | str | None, generator: str) -> int:
    """Return the seed of a generator, an int of 256 bits."""
    place = "all" if rank is None else str(rank)
    return int.from_bytes(hashlib.sha256(f"hpc_trainer {seed} {place} {generator}".encode()).digest(), "little")


def arrays_to_tensors(value: Any) -> Any:
    """Convert a numpy generator's state: tensors replace arrays, as `pack` takes them."""
    if isinstance(value, dict):
        return {key: arrays_to_tensors(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def tensors_to_arrays(value: Any) -> Any:
    """Undo `arrays_to_tensors`."""
    if isinstance(value, dict):
        return {key: tensors_to_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
