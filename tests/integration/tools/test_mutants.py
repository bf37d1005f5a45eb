"""`make mutants` plays every mutant that it drew, whatever one of them does to pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import NEAREST, Answers, Player, _meaning
from tests.unit.launch.frozen_code.projects import write_files

_CODE = """
FACTOR = 2

def total(values):
    return sum(values)

def scaled(value):
    return FACTOR * value

def name():
    return "toy"
"""
_TESTS = """
import os, signal, time
from hpc_trainer.toy import FACTOR, name, scaled, total

def test_that_always_fails():
    assert name() == "another"

def test_total():
    if total([1, 2]) == 0:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    assert total([1, 2]) == 3

def test_scaled():
    assert scaled(3) == 6
"""
_CHANGES = [
    ("sum(values)", "sum(values) * 0"), ("FACTOR * value", "FACTOR + value"), ('"toy"', '"tool"'),
    ("FACTOR = 2", "FACTOR = 3"),
]  # fmt: skip
_PLAY = """
import json, sys
from pathlib import Path
from tests.mutants import Mutant, play_all

path = Path("hpc_trainer/toy.py")
right = path.read_text()
drawn = [(number, Mutant(path, 1, "core/Change", 0), right.replace(*each))
         for number, each in enumerate(json.loads(sys.argv[1]), 1)]
killers = play_all(drawn)
assert path.read_text() == right
print(json.dumps(killers))
"""


@pytest.mark.long
def test_a_mutant_that_ends_the_session_costs_no_other(tmp_path: Path) -> None:
    files = {"hpc_trainer/__init__.py": "", "hpc_trainer/toy.py": _CODE, "tests/unit/test_toy.py": _TESTS}
    write_files(tmp_path, files | {"pytest.ini": ""})
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}"}
    done = subprocess.run(
        [sys.executable, "-c", _PLAY, json.dumps(_CHANGES)],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *told, killers = done.stdout.splitlines()
    killer = "tests/unit/test_toy.py::test_scaled"
    assert json.loads(killers) == {"1": "it ends pytest's session", "2": killer, "3": "", "4": killer}
    assert any("test_that_always_fails fails without a mutant too" in line for line in told)


def test_every_nearest_test_and_what_it_is_nearest_to_are_there() -> None:
    root = Path(__file__).parents[3]
    tests = {test for each in NEAREST.values() for test in each}
    assert not [test for test in tests if not (root / "tests/unit" / test).is_file()]
    code = root / "hpc_trainer"
    assert not [name for name in NEAREST if not (code / f"{name}.py").is_file() and not (code / name).is_dir()]


@pytest.mark.parametrize(
    ("before", "after", "is_equality", "is_same"),
    [
        ("def f(a: int) -> int: pass", "def f(a: str) -> str: pass", False, True),
        ("@dataclass(frozen=True, order=True)\nclass A: pass", "@dataclass(order=True)\nclass A: pass", False, True),
        ("@dataclass(order=True)\nclass A: pass", "@dataclass(order=False)\nclass A: pass", False, False),
        ("@dataclass\nclass A: pass", "class A: pass", False, False),
        ("f(frozen=True)", "f(frozen=False)", False, False),
        ("if TYPE_CHECKING:\n    import a", "if not TYPE_CHECKING:\n    import a", False, True),
        ("if x:\n    import a", "if not x:\n    import a", False, False),
        ("a is State.b", "a == State.b", True, True),
        ("a is not State.b", "a != State.b", True, True),
        ("a is not State.b", "a == State.b", True, False),
        ("a is state.b", "a == state.b", True, False),
        ("a == State.b", "a is State.b", False, False),
        ("os.O_RDWR | os.O_CREAT | os.O_CLOEXEC", "os.O_RDWR | os.O_CREAT + os.O_CLOEXEC", False, True),
        ("os.O_RDWR | os.O_CREAT | os.O_CLOEXEC", "os.O_RDWR ^ os.O_CREAT | os.O_CLOEXEC", False, True),
        ("os.O_RDWR | os.O_CREAT | os.O_CLOEXEC", "os.O_RDWR & os.O_CREAT | os.O_CLOEXEC", False, False),
        ("os.O_RDWR | os.O_CREAT | flag", "os.O_RDWR | os.O_CREAT + flag", False, False),
    ],
)
def test_what_means_the_same_is_not_drawn(before: str, after: str, is_equality: bool, is_same: bool) -> None:
    assert (_meaning(before, is_equality) == _meaning(after, is_equality)) is is_same


def test_a_mutant_without_tests_survives(tmp_path: Path) -> None:
    """It was counted as killed where every nearest test is long or left out."""
    assert Player([], Answers(tmp_path / "answers"), tmp_path / "log")._play([], {}) == 0
