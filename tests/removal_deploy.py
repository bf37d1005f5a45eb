"""Proof that the domain deploy can be removed: python -m tests.removal_deploy

A copy of the package without the domain's folder, its name in the registry and its file of `conf/` imports every
module, composes a configuration, trains digits for some steps on the CPU, and shows and reports the run. Its verbs are
gone, and what only they read is refused with a reason.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.removal_observe import play, without

_REFUSED = {
    ("export", "digits"): "No such command 'export'",
    ("predict", "digits"): "No such command 'predict'",
    ("plan", "experiment=digits", "sweep.forms=[{to: onnx}]"): "sweep.forms is read by no part of this installation",
    ("report", "--exports", "."): "--exports: no part of this installation reads it",
}
"""What the command line answers to words of the removed domain."""


def refuse(root: Path) -> None:
    """Check the answers of a copy to words of the removed domain, after `play`."""
    for words, message in _REFUSED.items():
        environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "HPC_TRAINER_RUNS": str(root / "runs")}
        argv = [sys.executable, "-m", "hpc_trainer", *words]
        done = subprocess.run(argv, cwd=root, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 2, (words, done)
        assert message in done.stderr, (words, done.stderr)
    print(f"{len(_REFUSED)} uses of the removed domain are refused")


def main() -> None:
    """Play the removal in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        root = Path(folder).resolve()
        without("deploy", root)
        (root / "conf" / "sweep" / "compress.yaml").unlink()
        play(root)
        refuse(root)


if __name__ == "__main__":
    main()
