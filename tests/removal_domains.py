"""Delete each domain from a copy of the project, and check the rest: python -m tests.removal_domains [NAME ...]

The copy lacks the folder of the domain, its name in the registry and its files of `conf/`. In it every module is
imported; a run is planned, trained on the CPU, shown, explained and reported; the verbs of the domain are gone; what
only the domain reads is refused with a reason. Without data the built-in digits, a user's own data set and a user's
program are trained.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpc_trainer.domains import DOMAINS
from tests.removal import ROOT, copy_project

VERBS = {
    "deploy": ("export", "eval", "predict"),
    "observe": ("advise", "profile"),
    "verify": ("verify", "find-lr"),
    "data": ("data",),
    "doctor": ("doctor",),
    "init_project": ("init",),
    "hardware": ("hardware",),
    "notify": (),
    "tidy": ("tag", "note", "rename", "clean", "rm", "archive", "unarchive"),
    "search": ("best",),
}
"""Verbs that go with each domain."""
FILES = {
    "deploy": ("conf/sweep/compress.yaml",),
    "data": tuple(
        f"conf/data/{path.name}"
        for path in (ROOT / "conf/data").glob("*.yaml")
        if path.stem not in ("custom", "digits")
    ),
}
"""Files of `conf/` that choose what a domain has."""
REFUSED = {
    "deploy": {
        (
            "plan",
            "experiment=digits",
            "sweep.forms=[{to: onnx}]",
        ): "sweep.forms is not used by any part of this",
        ("report", "--exports", "."): "--exports: no part of this installation reads it",
    },
    "search": {
        ("plan", "experiment=digits", "search=random"): "search=random is read by no part of this installation",
    },
}
"""What the command line answers to words that only a removed domain reads."""
_RUN = ("experiment=digits", "train.num_steps=20", "train.eval_every_steps=10", "monitor.log_every_steps=5")
STEPS = (
    "train.num_steps=4", "schedule.warmup_steps=0", "train.global_batch_size=8", "train.eval_every_steps=2",
    "model=mlp",
)  # fmt: skip
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
    copy_project(root, ("hpc_trainer", "conf", "pyproject.toml", "README.md"))
    shutil.rmtree(root / "hpc_trainer" / domain)
    for name in FILES.get(domain, ()):
        (root / name).unlink()
    registry = root / "hpc_trainer" / "domains.py"
    text, count = re.subn(rf'(\nDOMAINS = \(.*?)"{domain}",? ?', r"\1", registry.read_text(), flags=re.DOTALL)
    assert count == 1, f"{domain} is not in the registry"
    registry.write_text(text)


def play(domain: str, root: Path) -> None:
    """Import all modules of a copy, use it, and look for the verbs of the domain.

    Raises:
        AssertionError: the copy does something else than the project without the domain.
        subprocess.CalledProcessError: a command failed; its output is on standard error.
    """
    print(f"{_python(root, '-c', _IMPORTS_ALL, str(root)).strip()} modules are imported")
    if domain == "data":
        _train_what_needs_no_domain(root)
    else:
        _train_and_show(root)
    commands = re.findall(r"^  ([a-z-]+) {2,}", _ours(root, "--help"), flags=re.MULTILINE)
    assert "plan" in commands, commands
    for verb in VERBS[domain]:
        assert verb not in commands, commands
        _refused(root, (verb, "digits"), f"No such command '{verb}'")
    for words, message in REFUSED.get(domain, {}).items():
        _refused(root, words, message)
    print(f"gone: {', '.join(VERBS[domain])}")


def _train_and_show(root: Path) -> None:
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


def _train_what_needs_no_domain(root: Path) -> None:
    """Train the digits, a user's own data set and a user's program."""
    listed = _python(root, "-c", "from hpc_trainer.config.store import VARIANTS; print(*VARIANTS['data'])").split()
    assert listed == ["digits", "custom"], listed
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


def _ours(root: Path, *words: str) -> str:
    return _python(root, "-m", "hpc_trainer", *words)


def _python(root: Path, *words: str) -> str:
    done = _start(root, *words)
    if done.returncode:
        sys.stderr.write(f"{' '.join(words)[:300]}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        done.check_returncode()
    return done.stdout


def _refused(root: Path, words: tuple[str, ...], message: str) -> None:
    done = _start(root, "-m", "hpc_trainer", *words)
    assert done.returncode == 2, (words, done)
    assert message in done.stderr, (words, done.stderr)


def _start(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(root), "HPC_TRAINER_RUNS": str(root / "runs"), "HOME": str(root)}
    return subprocess.run([sys.executable, *words], cwd=root, env=environ, capture_output=True, text=True, check=False)


def main(names: list[str]) -> None:
    """Play the removal of each domain in a temporary folder; stop at the first that fails."""
    for domain in names or DOMAINS:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="without-") as folder:
            root = Path(folder).resolve()
            without(domain, root)
            play(domain, root)
        print(f"The rest works without {domain} ({time.monotonic() - begin:.0f} s).\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
