"""Code that goes round `record/reading.py` and `record/files.py`: right on a local disk, wrong where two clients see
one folder.

Each exception names the file, the construct and the reason: the folder is of one machine, or of the user, or what is
done there is right on NFS too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[2] / "hpc_trainer"
_OWNERS = {"record/shared_folder.py", "record/reading.py", "record/trust.py", "record/files.py"}

_LOSES_REPLIES = {"rename", "replace", "link", "renames"}
_FLAGS = {"O_EXCL", "O_APPEND"}

# file -> construct -> why it is right there.
ALLOWED: dict[str, dict[str, str]] = {
    "record/metrics.py": {"O_APPEND": "a program's own file of one attempt, with one writer"},
    "worker/program.py": {"st_mtime": "on the node's own disk: which files a program wrote into its copy of the code"},
    "worker/rank.py": {"O_APPEND": "the log of one rank of one attempt: one writer"},
    "verify/probe.py": {'mode "a"': "the trace of one rank of a run that verify resume started: one writer"},
    "launch/submit.py": {'mode "ab"': "the log of the local queue, whose processes are on this host"},
    "launch/frozen_code/unpacking.py": {
        "fcntl": "locks on the node's own disk; on a shared folder a claim that only saves work",
        "replace": "bytecode under a name of its own; a lost reply costs a compilation",
        "rename": "what another rank unpacked is as good: it is compared afterwards",
        "O_EXCL": "a claim that only saves work",
        "exists": "stands alone in the archive and imports nothing of ours; what it finds is compared",
        "st_mtime": "old copies on the node's own disk; an old claim costs two ranks that compile",
    },
    "data/images/shards.py": {"fcntl": "a lock on the node's own disk", "replace": "on the node's own disk"},
    "doctor/folder_probe.py": dict.fromkeys(
        ("O_EXCL", "O_APPEND", "rename", "fcntl", "touch", "st_mtime"),
        "tries what the file system keeps, on files that nobody else reads",
    ),
    "init_project/project.py": {'mode "x"': "a file of a project of the user's own, which init must not overwrite"},
    "observe/sampler.py": {"replace": "in the folder of the node's own collector"},
    "record/run_folder.py": {"st_mtime": "late by ten minutes on purpose, for clocks differ (CLOCKS_S)"},
    "launch/fit.py": {"st_mtime": "which sweeps are the newest: an old answer leaves one out"},
    "hardware/rank_probe.py": {
        "replace": "a file of one rank, which is read when the job has ended",
        "st_mtime": "the file system's own clock is what is asked for",
    },
    "hardware/pack.py": {
        "replace": "a file that the user asked for, written under a name of this process's own",
        'mode "a"': "the same file, before it has its name",
        "exists": "whether the user's own file would be replaced: a question, no claim; and a copy on this machine",
    },
    "launch/frozen_code/archive.py": {"link": "if the link or its reply is lost, the sweep writes its own copy"},
    "record/holds.py": {"st_mtime": "only shown, if the hold itself cannot be read"},
    "tidy/archive.py": {
        "O_EXCL": "a new file of this process's own, in a place that the user names",
        "st_mtime": "what the archive says of a file",
    },
    "deploy/trained.py": {'mode "xb"': "a file that the user asked for, in a folder of this process's own"},
    "deploy/graphs.py": {"replace": "in the folder of an export that is being written, under its own name"},
}
# What is asked of the user's own files, of the machine, or only shown: an answer of a minute ago does no harm.
ONLY_SHOWN = {
    "config", "cli", "data", "training/data", "models", "tasks", "launch/frozen_code/snapshot.py",
    "launch/frozen_code/files.py",
    "launch/frozen_code/import_path.py", "launch/targets.py", "launch/hydra_app.py",
    "runtime/machine.py", "runtime/code.py", "features/init_from", "observe", "worker/program_start.py", "deploy",
    "operate/report", "operate/find.py", "verify/old_code.py", "verify/preempt.py",
    "verify/reproduce.py", "verify/verbs.py",
    "launch/submit.py",  # whether a folder is there whose owner is to be looked at
    "record/status.py",  # the text of an error: whether there is a folder of sweeps
    "record/journal.py",  # failure files of attempts whose lines are lost
    "record/metrics.py",  # rank 0's own file
}  # fmt: skip


def _files() -> list[Path]:
    return sorted(path for path in _PACKAGE.rglob("*.py") if path.relative_to(_PACKAGE).as_posix() not in _OWNERS)


def _constructs(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what is used) of everything that means another thing on a shared folder."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
            if "fcntl" in names:
                yield node.lineno, "fcntl"
        elif isinstance(node, ast.Attribute) and (node.attr in _FLAGS or node.attr == "st_mtime"):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _of_call(node, node.func)


def _of_call(node: ast.Call, function: ast.Attribute) -> Iterator[tuple[int, str]]:
    of_os = isinstance(function.value, ast.Name) and function.value.id in ("os", "shutil")
    is_rename = len(node.args) == (2 if of_os else 1) and not node.keywords  # `text.replace` has two
    if (function.attr in _LOSES_REPLIES and is_rename) or function.attr in ("hardlink_to", "touch"):
        yield node.lineno, function.attr
    elif function.attr == "exists" and not node.args:
        yield node.lineno, "exists"
    elif function.attr == "open":
        modes = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        yield from ((node.lineno, f'mode "{mode}"') for mode in modes if mode[:1] in ("a", "x"))


def _goes_round(path: Path) -> Iterator[str]:
    name = path.relative_to(_PACKAGE).as_posix()
    allowed = ALLOWED.get(name, {})
    is_only_shown = any(name == each or name.startswith(f"{each}/") for each in ONLY_SHOWN)
    for line, what in _constructs(ast.parse(path.read_text(encoding="utf-8"))):
        if what not in allowed and not (is_only_shown and what in ("exists", "st_mtime")):
            yield f"{name}:{line}: {what}: use record/reading.py or record/files.py, or say why in this test"


def test_shared_files_are_touched_by_two_modules() -> None:
    found = [problem for path in _files() for problem in _goes_round(path)]
    assert not found, "\n".join(found)


def test_no_exception_is_left_over() -> None:
    """An exception whose code is gone would allow the next mistake."""
    for name, allowed in ALLOWED.items():
        used = {what for _, what in _constructs(ast.parse((_PACKAGE / name).read_text(encoding="utf-8")))}
        assert allowed.keys() <= used, f"{name}: {sorted(allowed.keys() - used)} is used no more"
    for name in ONLY_SHOWN:
        assert (_PACKAGE / name).exists(), name
