"""Proof that the domain observe can be removed: python -m tests.removal_observe

A copy of the package without the domain's folder and without its name in the registry imports every module, composes a
configuration, trains digits for some steps on the CPU, and shows, explains and reports the run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOMAIN = "observe"
VERBS = ("advise", "profile")
_RUN = ("experiment=digits", "train.num_steps=20", "train.eval_every_steps=10", "monitor.log_every_steps=5")
_IMPORTS_ALL = """
import importlib, pkgutil, sys
import hpc_trainer
assert hpc_trainer.__file__.startswith(sys.argv[1]), hpc_trainer.__file__
names = [each.name for each in pkgutil.walk_packages(hpc_trainer.__path__, "hpc_trainer.")]
for name in names:
    if not name.endswith("__main__") and ".hydra_plugins" not in name:
        importlib.import_module(name)
print(len(names))
"""


def without(domain: str, root: Path) -> None:
    """Copy the package and its configurations to `root`, without a domain and its name in the registry."""
    for name in ("hpc_trainer", "conf"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root)
    shutil.rmtree(root / "hpc_trainer" / domain)
    registry = root / "hpc_trainer" / "domains.py"
    text, count = re.subn(rf'(\nDOMAINS = \(.*?)"{domain}",? ?', r"\1", registry.read_text(), flags=re.DOTALL)
    assert count == 1, f"{domain} is not in the registry"
    registry.write_text(text)


def play(root: Path) -> None:
    """Import all modules of a copy, train a run with it, and show it.

    Raises:
        subprocess.CalledProcessError: a command failed; its output is on standard error.
    """
    print(f"{_python(root, '-c', _IMPORTS_ALL, str(root)).strip()} modules are imported")
    planned = json.loads(_ours(root, "plan", *_RUN, "--json"))
    print(f"plan: {len(planned['runs'])} run")
    _ours(root, "train", *_RUN)
    (run,) = json.loads(_ours(root, "status", "--json"))["runs"]
    assert (run["state"], run["step"]) == ("COMPLETED", 20), run
    print(f"trained: {run['run_id']} is {run['state']} at step {run['step']}")
    for verb in ("results", "report"):
        _ours(root, verb, "--json")
    assert json.loads(_ours(root, "why", run["run_id"], "--html", str(root / "page.html"), "--json"))["timeline"]
    print("status, results, report and why show it")
    help_text = _ours(root, "--help")
    assert not [verb for verb in VERBS if f" {verb} " in help_text], help_text
    print(f"the verbs {' and '.join(VERBS)} are gone")


def _ours(root: Path, *words: str) -> str:
    return _python(root, "-m", "hpc_trainer", *words)


def _python(root: Path, *words: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(root), "HPC_TRAINER_RUNS": str(root / "runs"), "HOME": str(root)}
    argv: Sequence[str] = [sys.executable, *words]
    done = subprocess.run(argv, cwd=root, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"{' '.join(words)[:300]}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        done.check_returncode()
    return done.stdout


def main() -> None:
    """Play the removal in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        without(DOMAIN, Path(folder).resolve())
        play(Path(folder).resolve())


if __name__ == "__main__":
    main()
