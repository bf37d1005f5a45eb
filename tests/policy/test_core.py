"""The training core knows no feature: it reads none of their keys, and imports none of their modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from hpc_trainer.config.table.declarations import features
from hpc_trainer.training.ability import Ability

PACKAGE = Path(__file__).resolve().parents[2] / "hpc_trainer"
CORE = sorted((PACKAGE / "training").rglob("*.py"))
KEYS = sorted({key for each in features() for key in re.findall(r"\b[a-z]\w*(?:\.[a-z]\w*)+", each.on)})
"""As `train.ema_decay`; `optim=muon` is a value of a key that is the core's own."""


def test_there_are_keys_to_look_for() -> None:
    assert {"train.ema_decay", "parallel.zero1", "optim.offload"} <= set(KEYS)
    assert len(CORE) > 30


def test_the_core_reads_no_key_of_a_feature() -> None:
    found = []
    for path in CORE:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        read = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        wrong = [each for each in sorted(read) for key in KEYS if f".{each}".endswith(f".{key}")]
        wrong += [each for each in sorted(imported) if each.startswith("hpc_trainer.features")]
        found += [f"{path.relative_to(PACKAGE)}: {each}" for each in wrong]
    assert found == []


def test_no_feature_imports_another_ones_ability() -> None:
    """What two features need lies in the core."""
    for path in sorted((PACKAGE / "features").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        owners = {each.split(".")[2] for each in imported if each.startswith("hpc_trainer.features.")}
        assert owners <= {path.parent.name}, path


def test_keys_of_a_feature_can_be_read_before_any_section_is_made() -> None:
    """Sections import the faces of features (config/schema/key.py), so a face imports no section."""
    names = [
        path.parent.name for path in (PACKAGE / "features").glob("*/__init__.py") if "class Keys:" in path.read_text()
    ]
    assert len(names) > 15
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for each in [each for each in sys.modules if each.startswith('hpc_trainer')]:\n"
        "        del sys.modules[each]\n"
        "    importlib.import_module(f'hpc_trainer.features.{name}')\n"
        "    sections = {'hpc_trainer.config.schema.' + each for each in ('train', 'parallel', 'optim')}\n"
        "    assert not sections & sys.modules.keys(), name\n"
    )
    subprocess.run([sys.executable, "-c", code, *names], check=True, cwd=PACKAGE.parent)


def test_only_what_estimates_can_enter_a_mode_of_fake_tensors() -> None:
    """Each of these runs in a process of its own; that no rank enters the mode there is played in
    memory/test_search.py, mfu/test_mfu.py and pipeline/test_cut.py of tests/unit/features.
    """
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {name for name, text in texts.items() if "FakeTensorMode" in text} == {"runtime/fake_tensors.py"}
    users = {name for name, text in texts.items() if "hpc_trainer.runtime.fake_tensors" in text}
    assert users == {"features/memory/estimate.py", "features/mfu/flops.py", "features/pipeline/cut.py"}


def test_every_hook_says_what_it_is_for() -> None:
    hooks = [each for name, each in vars(Ability).items() if callable(each) and not name.startswith("_")]
    assert len(hooks) > 10
    assert all(each.__doc__ for each in hooks)


def test_the_shared_loop_uses_what_an_own_loop_can() -> None:
    """Public methods of the RunContext, and docs/own_loop.md has each."""
    page = (PACKAGE.parent / "docs" / "own_loop.md").read_text(encoding="utf-8")
    tree = ast.parse((PACKAGE / "training" / "loop.py").read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "run"
    }
    assert {"restore", "save_in_background", "stop_here", "finish"} <= used
    assert sorted(name for name in used if f"`run.{name}" not in page) == []
