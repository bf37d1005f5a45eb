"""Random number generators: seeding them apart for each rank, and saving and restoring all of them."""

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
    """Seeds Python, numpy and torch (CPU, all CUDA devices) from (seed, rank). Not collective.

    Without `rank` the seed is the same on all ranks: for building the model. With it every rank gets a stream
    of its own, for dropout and the like; call that after the model is built. Ranks that share layers (tensor parallel)
    hold the same activations and give the same `rank` (`config.mesh.MeshShape.stream`).

    The seed of each generator is a part of SHA-256 over the text "hpc_trainer <seed> <rank> <generator>", so
    neighbouring seeds and ranks have nothing in common, and (seed 0, rank 1) is not (seed 1, rank 0). torch's
    CPU generator takes 32 bits of it (at::mt19937): of 1,000 ranks, two share a stream with probability 1e-4.
    """
    number = _seed_python(seed, rank)
    torch.manual_seed(number)
    for kind in kinds_in_use():  # torch does so by itself, but for XLA
        kind.seed(number)


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seeds the same generators from (seed, logical rank, step): 40 µs, and nothing to save. Not collective.

    Two of a million steps may share a stream of torch's CPU generator, as in `seed_everything`; they see other samples.
    """
    number = _seed_python(seed, f"{rank} {step}")
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.2 ms where there is no CUDA
    for kind in kinds_in_use():
        kind.seed(number)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the generators go on afterwards as if it had not been."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


def rng_for_world(saved: dict[str, Any] | None, *, seed: int, rank: int | str, step: int) -> dict[str, Any]:
    """The random state with which a rank goes on from a checkpoint.

    What this rank saved, if as many ranks saved as are there now, on the same mesh. Else nobody's stream is the right
    one: every rank begins a new one, from (seed, rank, step), so two restarts at one step are alike, and no two ranks
    share a stream that do not read the same samples. Dropout then differs from the undisturbed run. The generators of
    this process then have the state that is returned.

    Args:
        saved: what `rng_state` was at the save; None if another number of ranks saved, or on another mesh.
        seed: `config.seed`.
        rank: 0 to world_size - 1; with tensor or pipeline parallel `MeshShape.stream`.
        step: of the checkpoint.
    """
    if saved is not None:
        return saved
    seed_everything(seed, f"{rank} resumed {step}")
    return rng_state()


def rng_state() -> dict[str, Any]:
    """The state of Python's, numpy's, torch's CPU generator and that of the current device, as `pack` takes it.

    "cuda" is None in a process that has not used CUDA; other kinds of devices are there if they are in use. Generators
    that somebody made for himself are not here.
    """
    version, words, gauss = random.getstate()
    assert version == _PYTHON_STATE_VERSION
    return {
        "python": {"words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": arrays_to_tensors(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": None,
        **{kind.type: kind.rng_state() for kind in kinds_in_use()},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what `rng_state` returned. The state of a device is passed over on a machine that has none of its kind.

    Raises KeyError: a part is missing.
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
    """Seeds Python and numpy, and returns what to seed torch with."""
    random.seed(_mix(seed, place, "python"))
    words = _mix(seed, place, "numpy").to_bytes(32, "little")
    np.random.seed(np.frombuffer(words, dtype="<u4").astype(np.uint32))  # the global one is meant
    return _mix(seed, place, "torch") % 2**63


def _mix(seed: int, rank: int | str | None, generator: str) -> int:
    """256 bits."""
    place = "all" if rank is None else str(rank)
    return int.from_bytes(hashlib.sha256(f"hpc_trainer {seed} {place} {generator}".encode()).digest(), "little")


def arrays_to_tensors(value: Any) -> Any:
    """A numpy generator's state with tensors for arrays, as `pack` takes it."""
    if isinstance(value, dict):
        return {key: arrays_to_tensors(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def tensors_to_arrays(value: Any) -> Any:
    """Undoes `arrays_to_tensors`."""
    if isinstance(value, dict):
        return {key: tensors_to_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
