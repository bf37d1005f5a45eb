"""Proof that the domain data can be removed: python -m tests.removal_data

A copy of the package without the domain's folder, its name in the registry and its choices in `conf/` imports every
module, composes, runs a user's program, and trains the built-in digits and a user's own data set.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.removal_observe import _IMPORTS_ALL, _ours, _python, without

DOMAIN = "data"
OF_THE_CORE = ("custom.yaml", "digits.yaml")
"""Choices of `data=` whose dataclasses are in `config/schema/data.py`."""
STEPS = (
    "train.num_steps=4",
    "schedule.warmup_steps=0",
    "train.global_batch_size=8",
    "model=mlp",
    "train.eval_every_steps=2",
)
RINGS = '''
import torch

class Rings:
    """Points in two rings around zero; the class is the ring."""
    num_classes = 2

    def __len__(self):
        return 64

    def __getitem__(self, index):
        angle = torch.tensor(index / 7.0)
        return (1 + index % 2) * torch.stack([angle.cos(), angle.sin()]), index % 2

def build(split):
    return Rings()
'''
PROGRAM = "import pathlib, sys; pathlib.Path(sys.argv[1], 'told.txt').write_text('it ran')"


def play(root: Path) -> None:
    """Import all modules of a copy, and run three things with it that need no data set of the domain.

    Raises:
        subprocess.CalledProcessError: a command failed; its output is on standard error.
    """
    print(f"{_python(root, '-c', _IMPORTS_ALL, str(root)).strip()} modules are imported")
    listed = _python(root, "-c", "from hpc_trainer.config.store import VARIANTS; print(*VARIANTS['data'])").split()
    assert listed == ["digits", "custom"], listed
    assert "bench" not in _ours(root, "--help")
    (planned,) = json.loads(_ours(root, "plan", "experiment=digits", *STEPS, "--json"))["runs"]
    print(f"plan: {planned['run_id']}")
    (root / "rings.py").write_text(RINGS)
    (root / "program.py").write_text(PROGRAM)
    of_rings = ("sweep_name=rings", "data=custom", "data._target_=rings.build", "--trust", "rings")
    _ours(root, "train", "sweep_name=digits", *STEPS)
    _ours(root, "train", *of_rings, *STEPS)
    _ours(root, "train", "sweep_name=program", "--command", "python program.py {run.dir}")
    for sweep in ("digits", "rings", "program"):
        (run,) = json.loads(_ours(root, "status", sweep, "--json"))["runs"]
        assert run["state"] == "COMPLETED", run
        print(f"{sweep}: {run['run_id']} is {run['state']}")
    assert [path.read_text() for path in (root / "runs" / "program").rglob("told.txt")] == ["it ran"]


def main() -> None:
    """Play the removal in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        root = Path(folder).resolve()
        without(DOMAIN, root)
        for path in (root / "conf" / "data").glob("*.yaml"):
            if path.name not in OF_THE_CORE:
                path.unlink()
        play(root)


if __name__ == "__main__":
    main()
