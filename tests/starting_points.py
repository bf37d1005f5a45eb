"""Eight programs as people have them, and each once more with what makes it go on where it was interrupted.

`tests/programs/NAME/before.py` knows nothing of hpc_trainer; `after.py` tells its steps and loads what it saved.
"""

from __future__ import annotations

import difflib
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

PROGRAMS = Path(__file__).parent / "programs"


class StartingPoint(NamedTuple):
    """One of the programs that docs/any_program.md counts lines of."""

    title: str
    command: str
    """For `--command`; SCRIPT is `before.py` or `after.py`, and KERAS the Python of the environment with TensorFlow."""
    more: tuple[str, ...] = ()
    """Other words of the submission."""


_WORDS = "{params.lr} {params.steps} {run.checkpoints}"
STARTING_POINTS = {
    "plain": StartingPoint("plain script", f"python SCRIPT {_WORDS}"),
    "argparse_ddp": StartingPoint(
        "argparse and DDP",
        "torchrun SCRIPT --lr {params.lr} --steps {params.steps} --out {run.checkpoints}",
        ("train.command_per=node", "hardware=testbed_x4"),
    ),
    "hydra_app": StartingPoint(
        "Hydra app", "python SCRIPT lr={params.lr} steps={params.steps} hydra.run.dir={run.checkpoints}"
    ),
    "lightning": StartingPoint("Lightning", f"python SCRIPT {_WORDS}"),
    "transformers": StartingPoint("Hugging Face Trainer", f"python SCRIPT {_WORDS}"),
    "jax": StartingPoint("JAX", f"python SCRIPT {_WORDS}"),
}
OF_KERAS = {
    "keras": StartingPoint("Keras", f"KERAS SCRIPT {_WORDS}"),
    "keras_workers": StartingPoint(
        "Keras on several workers",
        f"KERAS SCRIPT {_WORDS}",
        ("train.command_per=node", "train.command_env=tensorflow", "hardware=testbed_x4"),
    ),
}
"""Programs of an environment of their own, which `make keras` makes."""
KERAS = Path(f"{sys.prefix}-keras", "bin", "python")


def take(name: str, script: str, folder: Path, steps: int) -> tuple[str, ...]:
    """Copies the program into `folder`; the words that submit it there, in a sweep of its name."""
    shutil.copytree(PROGRAMS / name, folder, dirs_exist_ok=True)
    point = (STARTING_POINTS | OF_KERAS)[name]
    command = point.command.replace("SCRIPT", script).replace("KERAS", str(KERAS))
    return ("--command", command, "params.lr=0.05", f"params.steps={steps}", f"sweep_name={name}", *point.more)


def changed_lines(name: str) -> int:
    """Lines of `after.py` that `before.py` has not, blank ones left out."""
    before, after = ((PROGRAMS / name / f"{each}.py").read_text().splitlines() for each in ("before", "after"))
    return sum(line.startswith("+ ") and line.strip() != "+" for line in difflib.ndiff(before, after))
