"""What holds for the whole project: links lead somewhere, files stay short, lists stay sorted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpc_trainer"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PYTHON = sorted(
    path
    for top in ("hpc_trainer", "jobs", "tests")
    for path in (ROOT / top).rglob("*.py")
    if "__pycache__" not in path.parts
)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def _outside_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", _outside_code(page))
    dead = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists():
            dead.append(target)
        elif fragment and goal.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", _outside_code(goal), flags=re.MULTILINE)
            if fragment not in map(anchor, headings):
                dead.append(target)
    assert dead == []


def test_there_is_a_package_to_look_at() -> None:
    assert len(MODULES) > 50
    assert PAGES


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_file_is_longer_than_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_every_module_says_what_it_is_and_lists_sorted_names(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if tree.body:
        assert ast.get_docstring(tree), "a module begins with a docstring"
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
            assert names == sorted(names)
            assert len(names) == len(set(names))


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_file_loads_what_could_execute_code(path: Path) -> None:
    """P5: no pickle, no eval, no unsafe YAML, and torch.load only with weights_only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in {"eval", "exec", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}, name
            if name == "torch.load":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("weights_only") == "True"
            assert not any(k.arg == "shell" and ast.unparse(k.value) == "True" for k in node.keywords), "shell=True"


def test_hydra_submitit_and_slurm_commands_stay_where_they_belong() -> None:
    def users(pattern: str) -> set[str]:
        found = (path for path in MODULES if re.search(pattern, path.read_text(encoding="utf-8"), flags=re.MULTILINE))
        return {path.relative_to(PACKAGE).parts[0] for path in found}

    assert users(r"^\s*(from|import) submitit\b") == {"launch"}
    assert users(r"^\s*(from|import) (hydra|omegaconf)\b") == {"config"}
    assert users(r"run_slurm\(|\[\"(squeue|sacct|scontrol|scancel)\"") == {"slurm"}
