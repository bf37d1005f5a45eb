"""The seed of tests that draw: the same commit plays the same tests today and tomorrow."""

from __future__ import annotations

import os

_NAME = "HPC_TRAINER_FUZZ_SEED"


def chosen_seed() -> int:
    """The variable's number, which `make test-long` draws anew each time; else always the same one. Prints it."""
    seed = int(os.environ.get(_NAME) or 14)
    print(f"{_NAME}={seed}")
    return seed
