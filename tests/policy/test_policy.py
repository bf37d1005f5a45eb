"""What holds for the whole project: links lead somewhere, lists stay sorted."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hpc_trainer.cli.main import app
from tests import mutants

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


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def _outside_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def _anchors(page: Path) -> frozenset[str]:
    return frozenset(map(anchor, re.findall(r"^#+ (.*)$", _outside_code(page), flags=re.MULTILINE)))


def _dead_links(page: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", _outside_code(page))
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists() or (fragment and goal.suffix == ".md" and fragment not in _anchors(goal)):
            yield f"{_name(page)}: {target}"


def test_every_relative_link_leads_somewhere() -> None:
    assert [link for page in PAGES for link in _dead_links(page)] == []


def test_there_is_a_package_to_look_at() -> None:
    assert len(MODULES) > 50
    assert PAGES


def _of_module(tree: ast.Module) -> Iterator[str]:
    if tree.body and not ast.get_docstring(tree):
        yield "a module begins with a docstring"
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
            if names != sorted(set(names)):
                yield "the names in __all__ are not sorted, or one is there twice"


def test_every_module_says_what_it_is_and_lists_sorted_names() -> None:
    assert [f"{_name(path)}: {problem}" for path in PYTHON for problem in _of_module(_tree(path))] == []


# Words that only Slurm has; those that our own states share (record/states.py) are not among them.
SLURMS_WORDS = {
    "COMPLETING", "CONFIGURING", "REQUEUE_HOLD", "SPECIAL_EXIT", "BOOT_FAIL", "DEADLINE", "STAGE_OUT", "RESIZING",
    "NonZeroExitCode", "JobLaunchFailure", "RaisedSignal", "JobHeldUser", "GANG", "OFF",
}  # fmt: skip


def test_slurms_words_stand_in_slurm_alone() -> None:
    found = {
        (_name(path), node.value)
        for path in MODULES
        if "slurm" not in path.parts
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Constant) and node.value in SLURMS_WORDS
    }
    assert found == set()


@pytest.mark.parametrize("layer", ["slurm", "launch", "operate", "worker", "deploy", "verify", "cli"])
def test_errors_of_ours_are_told_apart_by_their_class(layer: str) -> None:
    """Our messages are for people: they change, and what depends on their words would change unseen."""
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
                assert "str(error)" not in ast.unparse(node), f"{_name(path)}:{node.lineno}"


_EXECUTES = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}
_PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def _executes(path: Path) -> Iterator[str]:
    tree = _tree(path)
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    pickles = {"cloudpickle"} if _name(path) == "hpc_trainer/hydra_apps/pickled.py" else set()
    if imported & _PICKLES != pickles:
        yield f"imports {sorted(imported & _PICKLES)}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, options = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
        if name in _EXECUTES or options.get("shell") == "True":
            yield f"line {node.lineno} calls {ast.unparse(node)[:80]}"
        if name == "torch.load" and options.get("weights_only") != "True":
            yield f"line {node.lineno} calls torch.load without weights_only=True"
        # A person's own files alone (docs/decisions/0045).
        if name == "torch.export.load" and _name(path) != "hpc_trainer/deploy/graphs.py":
            yield f"line {node.lineno} calls torch.export.load"


def test_no_file_loads_what_could_execute_code() -> None:
    """P5: no pickle, no eval, no unsafe YAML, and torch.load only with weights_only.

    But for the task of a Hydra app that no command starts: one file, for its owner alone (docs/decisions/0032).
    """
    assert [f"{_name(path)}: {problem}" for path in MODULES for problem in _executes(path)] == []


def test_hydra_submitit_and_slurm_commands_stay_where_they_belong() -> None:
    def users(pattern: str) -> set[str]:
        found = (path for path in MODULES if re.search(pattern, path.read_text(encoding="utf-8"), flags=re.MULTILINE))
        return {path.relative_to(PACKAGE).parts[0] for path in found}

    assert users(r"^\s*(from|import) submitit\b") == {"launch"}
    assert users(r"^\s*(from|import) (hydra|omegaconf)\b") == {"config", "hydra_apps"}
    assert users(r"run_slurm\(|\[\"(squeue|sacct|scontrol|scancel)\"") == {"slurm"}


def _imported(tree: ast.Module) -> set[str]:
    """First parts of what a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


# The second one by the name that it has in an archive of frozen code.
_OURS = ("hpc_trainer", "hpc_trainer_import_path", "hpc_trainer_unpacking")
# What is imported -> what provides it, where the names differ.
_PROVIDED_BY = {
    "PIL": "pillow",
    "hydra": "hydra-core",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "torch_xla": "torch-xla",
}


_PLACEHOLDER = re.compile(r"hpc-trainer [a-z-]+ (?:[^ `]+ )*?[^ `]*\b(?:RUN|SWEEP|EXPORT|MORE|LONGER|NAME|FILE)\b")


_VALUE = "\0"


def _messages(tree: ast.Module) -> Iterator[str]:
    """Texts of a module that are no docstrings and no help; each value in an f-string is `_VALUE`."""
    passed = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("typer.", "app.", "key")):
            passed |= {id(each) for each in ast.walk(node)}
        if isinstance(node, ast.JoinedStr):
            passed |= {id(each) for each in node.values}
            parts = (each.value if isinstance(each, ast.Constant) else _VALUE for each in node.values)
            yield "" if id(node) in passed else "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.value


@functools.cache
def _all_messages() -> list[tuple[Path, str]]:
    return [(path, text) for path in MODULES for text in _messages(_tree(path))]


def test_commands_in_messages_are_complete() -> None:
    texts = ((path, text.replace(_VALUE, "x")) for path, text in _all_messages())
    found = [f"{_name(path)}: {text}" for path, text in texts if _PLACEHOLDER.search(text)]
    assert found == [], "name the run, the sweep or the value that is meant"


_SAID = re.compile(r"^    (error: .*(?:\n    error: .*)*|(?:wrong|note|Note|Problem): .*)", flags=re.MULTILINE)
_WORD = re.compile(r"\b[a-z]{2,}\b")


def _is_said(parts: list[str], line: str) -> bool:
    """Return True if the line contains the sentence of these parts, with any values between them."""
    return all(part in line for part in parts) and bool(re.search(".+?".join(map(re.escape, parts)), line))


def test_messages_in_the_docs_are_those_of_the_package() -> None:
    """Each `error: ..` in a transcript of a page has a sentence that the package says; else its words have changed."""
    sentences = {part for _, text in _all_messages() for part in re.split(r"(?<=[.:;]) |\n", text)}
    known = [sentence.split(_VALUE) for sentence in sentences if len(_WORD.findall(sentence)) > 2]
    pages = [page for page in PAGES if page.name != "changelog.md" and page.parent.name != "decisions"]
    shown = [(page, line) for page in pages for line in _SAID.findall(page.read_text(encoding="utf-8"))]
    assert len(shown) > 10
    assert [f"{_name(page)}: {line}" for page, line in shown if not any(_is_said(parts, line) for parts in known)] == []


def test_what_is_imported_is_declared() -> None:
    """Not what comes with something else today."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^dev = \[", text, flags=re.DOTALL | re.MULTILINE)
    assert listed is not None
    declared = {name.lower() for name in re.findall(r'"([A-Za-z0-9_-]+)\s*[<>=~!\["]', listed.group(1))}
    assert {"torch", "submitit", "torchao"} <= declared
    missing = set()
    for path in MODULES:
        for name in _imported(_tree(path)):
            is_ours = name in sys.stdlib_module_names or name in _OURS
            if not is_ours and _PROVIDED_BY.get(name, name).lower() not in declared:
                missing.add(f"{name} ({_name(path)})")
    assert missing == set()
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    assert "\npyyaml==" in constraints


def _neighbours(path: Path) -> set[str]:
    """Files of the same folder that are imported by their bare names."""
    return _imported(_tree(path)) & {each.stem for each in path.parent.glob("*.py")}


def test_each_test_file_can_be_collected_alone() -> None:
    """No test imports a helper by its bare name, but where the folder's conftest.py puts that on the path."""
    tests = [path for path in PYTHON if path.is_relative_to(ROOT / "tests")]
    assert len(tests) > 100
    for folder in {path.parent for path in tests if path.name.startswith("test_") and _neighbours(path)}:
        conftest = folder / "conftest.py"
        assert conftest.exists(), f"{_name(folder)} needs a conftest.py"
        assert "sys.path.insert(0, str(Path(__file__).parent))" in conftest.read_text(encoding="utf-8"), _name(conftest)


_CHECKS = {"raises", "warns", "fail", "assert_close", "check_returncode"}


def _calls(function: ast.AST) -> set[str]:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls}


def _can_fail(function: ast.AST) -> bool:
    return any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(function)) or bool(
        _calls(function) & _CHECKS
    )


# Of a function that answers by an error: that there is none is what they say.
_ANSWERS_BY_ERROR = {"check_place", "check_trusted"}


def test_a_package_without_bytecode_fails_no_test_by_its_invalid_escapes() -> None:
    """Python tells of them when it compiles, that is at the first import in a new environment."""
    compile(r"'\.'", "package.py", "exec")
    with pytest.raises(DeprecationWarning):
        warnings.warn("another matter", DeprecationWarning, stacklevel=1)


def test_every_test_can_fail() -> None:
    """By an assertion of its own, or of a function that it calls."""
    functions = [
        (path, node)
        for path in PYTHON
        if path.is_relative_to(ROOT / "tests")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef)
    ]
    checking = set(_ANSWERS_BY_ERROR)
    for _ in range(5):  # of helpers that call helpers
        checking |= {node.name for _, node in functions if _can_fail(node) or _calls(node) & checking}
    idle = [
        f"{_name(path)}:{node.lineno} {node.name}"
        for path, node in functions
        if node.name.startswith("test_") and not _can_fail(node) and not _calls(node) & checking
    ]
    assert idle == []


def test_the_table_of_groups_lists_each_choice() -> None:
    text = (ROOT / "docs" / "configure.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]+?) \|", text, flags=re.MULTILINE))
    listed = {group: {name.strip() for name in rows.get(group, "").split(",")} - {""} for group in GROUPS}
    wrong = [
        f"docs/configure.md, the row of `{group}`: {word} {', '.join(sorted(names))}"
        for group, choices in GROUPS.items()
        for word, names in (("add", choices - listed[group]), ("leave out", listed[group] - choices))
        if names
    ]
    assert wrong == [], "\n".join(wrong)


GROUPS = {each.name: {path.stem for path in each.glob("*.yaml")} for each in (ROOT / "conf").iterdir() if each.is_dir()}


def _verbs() -> set[str]:
    """What one types behind `hpc-trainer`, but for what is hidden."""
    found: Any = typer.main.get_command(app)
    return {name for name, each in found.commands.items() if not each.hidden}


def test_each_verb_stands_in_the_docs() -> None:
    """In the table of the README, and with its JSON in docs/json.md; `log-metrics` prints none."""
    readme, json_page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/json.md"))
    rows = re.findall(r"^\|[^|]*\| (`[a-z`, -]+`) \|", readme.partition("## Verbs")[2], flags=re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([a-z-]+)[a-z -]*`", row)}
    titles = re.findall(r"^## (.*)$", json_page, flags=re.MULTILINE)
    with_json = {words.split()[0] for title in titles for words in title.split(", ")} | {"log-metrics"}
    assert "plan" in told & with_json
    assert sorted(_verbs() - told) == [], "README.md, the table of verbs: add them"
    assert sorted(_verbs() - with_json) == [], "docs/json.md: a heading for each"
    assert sorted(told - _verbs()) == [], "README.md, the table of verbs: leave them out"


def test_no_page_and_no_message_names_a_hidden_verb() -> None:
    """The changelog and the decisions tell of their time; the old verbs' own messages name them without hpc-trainer."""
    commands: Any = typer.main.get_command(app)
    old = "|".join(sorted({*commands.commands} - _verbs() - {"top-up"}))
    assert "certify" in old
    pages = [page for page in PAGES if page.name != "changelog.md" and page.parent.name != "decisions"]
    found = [
        f"{_name(path)}: {words}"
        for path in (*MODULES, *pages)
        for words in re.findall(rf"hpc-trainer (?:{old})\b(?!-).*", path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_ids_in_the_docs_have_the_digits_of_an_id() -> None:
    wrong = [
        f"{_name(page)}: {found}"
        for page in PAGES
        for found in re.findall(r"-s\d+-[0-9a-f]{6,}\b", page.read_text(encoding="utf-8"))
        if not re.fullmatch(r"-s\d+-[0-9a-f]{10}", found)
    ]
    assert wrong == []


def test_tests_never_see_the_slurm_of_the_machine(tmp_path: Path) -> None:
    planted, calls = ROOT / "tests" / "no_slurm", tmp_path / "calls"
    assert {"sbatch", "squeue", "sacct"} <= {path.name for path in planted.iterdir() if os.access(path, os.X_OK)}
    left_out = ("HPC_TRAINER_TESTS_PATH", "HPC_TRAINER_SLURM_CALLS", "PYTEST_", "SLURM", "COVERAGE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    env |= {"PATH": f"{planted}:{os.environ['HPC_TRAINER_TESTS_PATH']}", "HPC_TRAINER_SLURM_CALLS": str(calls)}
    inner = tmp_path / "test_inner.py"
    inner.write_text(
        "import os, shutil, subprocess\n"
        "def test_path(): assert shutil.which('sbatch') is None and shutil.which('sh') is not None\n"
        "def test_call(): subprocess.run([os.environ['CALLED'], '--version'])\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    alone = ["-p", "tests.conftest", str(inner)]  # outside of the folder of tests
    for called, code in (("/bin/true", 0), (str(planted / "sbatch"), 1)):
        done = subprocess.run(
            [*words, *alone], env=env | {"CALLED": called}, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
    assert "Tests have called the machine's Slurm:\nsbatch --version" in done.stdout
    assert calls.read_text() == "sbatch --version\n"


def test_each_file_that_make_mutants_draws_from_has_nearest_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, each error in the file counts as undetected."""
    monkeypatch.chdir(ROOT)
    places = [Path("hpc_trainer", name) for name in mutants.FOLDERS]
    files = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    with_functions = [
        path for path in files if any(isinstance(each, ast.FunctionDef) for each in ast.walk(_tree(path)))
    ]
    assert len(with_functions) > 70
    assert [str(path) for path in with_functions if not mutants.nearest_tests(path)] == []
    named = {f"tests/unit/{name}" for names in mutants.NEAREST.values() for name in names}
    assert [name for name in sorted(named) if not Path(name).is_file()] == []
    modules = (Path("hpc_trainer", name) for name in mutants.NEAREST)
    assert [str(module) for module in modules if not (module.is_dir() or module.with_suffix(".py").is_file())] == []
