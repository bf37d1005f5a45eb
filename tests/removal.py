"""Delete each feature from a copy of the project, and check that the rest works: python -m tests.removal [NAME ...]

python -m tests.removal --tests 8 --seed 3 zero1 lora     # eight drawn test files of the rest; --tests 0 plays none
python -m tests.removal --all                             # every test file of the rest that the table does not list

The copy lacks the folder of the feature, the lines of sections that name it (`of_feature`), the files of `conf/` that
choose it, and its tests: those of its folder, and those that name one of its keys or choices. In the copy

    resolves    every import of a module or of a name of ours, late ones too, finds what it names
    composes    two experiments are composed and checked, and every ability that is left is imported
    layers      lint-imports keeps its contracts
    tests       drawn test files of the rest pass

The table ends with the other files that mention the feature: they know a key or a choice of it by name.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from hpc_trainer.config.table.choice import keys_of, split
from hpc_trainer.config.table.declarations import features

ROOT = Path(__file__).resolve().parents[1]
FEATURES = ROOT / "hpc_trainer" / "features"
NAMES = tuple(sorted(path.parent.name for path in FEATURES.glob("*/__init__.py")))
_COPIED = ("hpc_trainer", "conf", "jobs", "tests", "docs", "pyproject.toml", "README.md", "Makefile", "constraints.txt")
_GROUP_KEYS = {"precision": "compute_dtype", "parallel": "strategy"}
_COMPOSES = """
import importlib, sys
import hpc_trainer
assert hpc_trainer.__file__.startswith(sys.argv[1]), hpc_trainer.__file__
from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.table.declarations import features
import hpc_trainer.cli.main, hpc_trainer.launch.submit, hpc_trainer.record.status, hpc_trainer.training.build
import hpc_trainer.worker.rank
from tests.composed import composed
for words in (["experiment=digits"], ["experiment=gpt_bytes", "cluster=local"]):
    validate(composed(words))
for feature in features():
    importlib.import_module(feature.rank_half).ABILITY
"""


@dataclass(slots=True)
class Outcome:
    """Result of the removal of one feature: failed checks with their output, and files that mention the feature."""

    name: str
    failures: dict[str, str] = field(default_factory=dict)
    mentions: tuple[str, ...] = ()
    num_tests: int = 0

    @property
    def passes(self) -> bool:
        return not self.failures


@dataclass(frozen=True, slots=True)
class Traces:
    """Keys, choices and classes by which other files can know a feature."""

    keys: tuple[str, ...]
    """Keys that the feature declares, as `parallel.zero1`."""
    choices: tuple[tuple[str, str], ...]
    """Choices of groups that turn it on, as (`optim`, `lion`)."""
    pattern: re.Pattern[str]
    words: tuple[str, ...]
    """Texts of which each file that matches `pattern` has one: most files have none, and need no search."""

    def are_in(self, path: Path) -> bool:
        """Return True if a file mentions the feature."""
        text = path.read_text(encoding="utf-8")
        return any(word in text for word in self.words) and self.pattern.search(text) is not None

    @classmethod
    def of(cls, name: str) -> Traces:
        """Return the traces of a feature of this tree."""
        feature = next(each for each in features() if each.name == name)
        keys = tuple(_declared(name))
        parts = [split(part) for way in feature.on.split(" or ") for part in way.split(" & ") if part]
        choices = tuple(
            (key, value)
            for key, sign, values in parts
            if sign == "=" and "." not in key and (ROOT / "conf" / key).is_dir()
            for value in values.split("|")
        )
        plain = (f"features.{name}", f"features/{name}", *(key.rpartition(".")[2] for key in keys))
        plain += tuple(f"{group}={value}" for group, value in choices)
        plain += tuple(key for key in keys_of(feature.on) if "." in key) if feature.on else ()
        words = [re.escape(f"features.{name}"), re.escape(f"features/{name}"), *(re.escape(key) for key in keys)]
        words += [rf"{group}={value}\b" for group, value in choices]
        words += [rf"(?<![\w.]){key.rpartition('.')[2]}(?==)" for key in keys]
        words += [rf"\.{key.rpartition('.')[2]}\b(?!\()" for key in keys]
        words += [re.escape(key) for key in keys_of(feature.on) if "." in key] if feature.on else []
        return cls(keys, choices, re.compile("|".join(words)), plain)


def _declared(name: str) -> Iterator[str]:
    """Yield the keys that sections leave to a feature: the lines with `of_feature`."""
    sections = {"LoopConfig": "train.", "ParallelConfig": "parallel.", "OptimConfig": "optim.", "TrainConfig": ""}
    for path in sorted((ROOT / "hpc_trainer" / "config" / "schema").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for line in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(line, ast.AnnAssign) and f"of_feature('{name}')" in ast.unparse(line):
                    assert isinstance(node, ast.ClassDef)
                    yield f"{sections[node.name]}{ast.unparse(line.target)}"


def remove(name: str, copy: Path, traces: Traces) -> tuple[str, ...]:
    """Remove a feature from a copy of the project; return the other files of the package that mention it."""
    shutil.rmtree(copy / "hpc_trainer" / "features" / name)
    shutil.rmtree(copy / "tests" / "unit" / "features" / name, ignore_errors=True)
    line = re.compile(rf'of_feature\("{name}"\)|from hpc_trainer\.features\.{name} import')
    for path in (copy / "hpc_trainer" / "config" / "schema").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(each for each in lines if not line.search(each)), encoding="utf-8")
    for path in sorted((copy / "conf").rglob("*.yaml")):
        if path.name != "train.yaml" and _chooses(path, copy / "conf", traces):
            path.unlink()
    gone = [key for key in traces.keys if "." not in key]
    root = copy / "conf" / "train.yaml"
    lines = [each for each in root.read_text().splitlines() if not any(f"- {key}:" in each for key in gone)]
    root.write_text("\n".join(lines) + "\n")
    for path in sorted((copy / "tests").rglob("*.py")):
        if path.name.startswith("test_") and traces.are_in(path):
            path.unlink()
    files = sorted((copy / "hpc_trainer").rglob("*.py"))
    return tuple(str(path.relative_to(copy / "hpc_trainer")) for path in files if traces.are_in(path))


def _chooses(path: Path, conf: Path, traces: Traces) -> bool:
    """Return True if a file of `conf/` is a choice of the feature, or sets one of its keys."""
    group = path.parent.relative_to(conf).as_posix()
    if (group, path.stem) in traces.choices or group in traces.keys:
        return True
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    chosen = {
        (key.removeprefix("override ").lstrip("/"), str(value))
        for entry in content.pop("defaults", [])
        if isinstance(entry, dict)
        for key, value in entry.items()
    }
    flat = set(_flat(content, "" if "@package _global_" in path.read_text(encoding="utf-8") else f"{group}."))
    of_root = {key for key, _ in chosen} & set(traces.keys)
    is_set = any(each == key or each.startswith(f"{key}.") for each in flat for key in traces.keys)
    return bool(of_root or is_set or chosen & set(traces.choices))


def _flat(tree: object, prefix: str) -> Iterator[str]:
    for name, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{prefix}{name}"
        yield from _flat(value, f"{prefix}{name}.")


def unresolved(copy: Path) -> Iterator[str]:
    """Yield each import of a module or name of ours that is not there, also inside of functions."""
    for path in sorted((copy / "hpc_trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("hpc_trainer."):
                continue
            place = copy / str(node.module).replace(".", "/")
            package = place / "__init__.py"
            source = package if package.is_file() else place.with_suffix(".py")
            text = source.read_text(encoding="utf-8") if source.is_file() else None
            for each in node.names:
                is_module = (place / each.name).is_dir() or (place / f"{each.name}.py").is_file()
                if text is None or not (is_module or re.search(rf"\b{each.name}\b", text)):
                    yield f"{path.relative_to(copy)}:{node.lineno}: {node.module}.{each.name}"


def play(name: str, *, seed: int, num_tests: int | None, is_quick: bool = False) -> Outcome:
    """Remove a feature from a fresh copy and check the rest.

    Args:
        name: name of the feature.
        seed: draws the test files.
        num_tests: number of test files that are played; None: all.
        is_quick: leave out the contracts of layers and the tests.
    """
    traces, outcome = Traces.of(name), Outcome(name)
    with tempfile.TemporaryDirectory(prefix="hpc-trainer-removal-") as folder:
        copy = Path(folder).resolve() / "project"
        copy_project(copy)
        outcome.mentions = remove(name, copy, traces)
        missing = "\n".join(unresolved(copy))
        if missing:
            outcome.failures["resolves"] = missing
        _check(outcome, "composes", [sys.executable, "-c", _COMPOSES, str(copy)], copy)
        if is_quick:
            return outcome
        _check(outcome, "layers", [str(Path(sys.executable).parent / "lint-imports")], copy)
        files = _test_files(copy, seed, num_tests)
        outcome.num_tests = len(files)
        if files and "composes" not in outcome.failures:
            words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slurm and not long and not xla"]
            _check(outcome, "tests", [sys.executable, "-m", "pytest", *words, *files], copy)
    return outcome


def copy_project(copy: Path, parts: Sequence[str] = _COPIED) -> None:
    """Copy files and folders of the project to a folder, without bytecode."""
    for part in parts:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        elif source.is_file():
            copy.mkdir(exist_ok=True)
            shutil.copy(source, copy / part)


def _test_files(copy: Path, seed: int, num_tests: int | None) -> list[str]:
    """Return test files of layers and features, drawn by `seed`; None: all of them."""
    files = sorted(str(path.relative_to(copy)) for path in (copy / "tests" / "unit").rglob("test_*.py"))
    return files if num_tests is None else sorted(random.Random(seed).sample(files, min(num_tests, len(files))))


def _check(outcome: Outcome, check: str, words: list[str], copy: Path) -> None:
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):  # pytest: a file has no test of the chosen marks
        outcome.failures[check] = f"{done.stdout[-3000:]}{done.stderr[-2000:]}".strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="features; none: all")
    parser.add_argument("--tests", type=int, default=6, help="drawn test files of the rest for each feature")
    parser.add_argument("--all", action="store_true", help="all test files of the rest")
    parser.add_argument("--quick", action="store_true", help="neither layers nor tests")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    outcomes = []
    for name in given.names or NAMES:
        begun = time.monotonic()
        outcome = play(name, seed=given.seed, num_tests=None if given.all else given.tests, is_quick=given.quick)
        outcomes.append(outcome)
        verdict = "passes" if outcome.passes else f"FAILS ({', '.join(outcome.failures)})"
        mentions = f"{len(outcome.mentions)}: {' '.join(outcome.mentions)}" if outcome.mentions else "none"
        print(f"{name:22} {verdict:24} {time.monotonic() - begun:4.0f} s  mentioned by {mentions}", flush=True)
    for outcome in outcomes:
        for check, output in outcome.failures.items():
            print(f"\n--- {outcome.name}: {check}\n{output}")
    print(f"\n{sum(each.passes for each in outcomes)} of {len(outcomes)} features can be deleted")
    return 0 if all(each.passes for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
