"""Draw mutants of the code and list those that the nearest tests do not kill: `make mutants`.

A mutant is the project with one small error in one file, made by an operator of cosmic-ray. Its nearest tests are
`tests/unit/LAYER/test_MODULE*.py` and those that NEAREST names. All are collected once; for each mutant the session
forks, the function with the error takes the place of the right one, and tests are played until one fails. An error
outside of functions costs a fork that imports the code anew.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import inspect
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.warm import _HEAVY, _PR_SET_CHILD_SUBREAPER

ROOT = Path(__file__).resolve().parents[1]
_OBSERVE = (
    "advice",
    "facts",
    "flight",
    "profile_request",
    "rules_of_resources",
    "rules_of_time",
    "straggler_log",
    "telemetry",
)
FOLDERS = ("record", "slurm", "launch", *(f"observe/{name}.py" for name in _OBSERVE))
_COSMIC_RAY = ROOT / ".venv/mutants"
_NEVER = frozenset(
    {
        *("name", "string", "newline", "fstring_start", "fstring_string", "fstring_end", "fstring", "fstring_expr"),
        *(
            "trailer",
            "atom_expr",
            "atom",
            "simple_stmt",
            "expr_stmt",
            "suite",
            "param",
            "tfpdef",
            "arglist",
            "argument",
        ),
        *("(", ")", "[", "]", "{", "}", ",", ".", ":", "=", "->", "None", "if", "in", "is", "for", "return", "def"),
    }
)
"""Kinds of nodes, and leaves, that no operator changes; the frequent ones: all operators are asked about the others."""
_COPIED = ("hpc_trainer", "tests", "conf", "jobs", "docs", "pyproject.toml", "README.md")
_STATE = [
    f"record/test_{name}.py"
    for name in (
        "run_state", "status", "slurm_answers", "newer_lives", "lag", "ownership", "known_ends", "nothing_to_ask",
    )
]  # fmt: skip
_LOST = ["api/test_jobs_without_files.py", "api/test_lost_lines.py", "api/test_lost_intents.py"]
_FROZEN = [f"launch/frozen_code/test_{name}.py" for name in ("owners", "snapshot", "frozen_worker")]
_RULES = [f"observe/advice/test_{name}.py" for name in ("rules", "facts", "gpu_faults")]
NEAREST = {
    "record/chain": [
        "launch/test_follow.py",
        "worker/test_follow.py",
        "launch/test_stages.py",
        "search/test_pool_runs.py",
        "search/test_next_run.py",
    ],
    "record/checkpoint_folders": ["training/checkpoint/test_retention.py", "training/checkpoint/test_store.py"],
    "record/last_words": ["operate/test_why.py", "launch/test_setup_lines.py", "record/test_known_ends.py"],
    "record/layout": ["record/test_files.py", "record/test_spec.py", "cli/test_many_runs.py"],
    "record/metrics": [
        "operate/test_axes.py",
        "operate/test_report.py",
        "operate/test_report_interactive.py",
        "record/test_summaries.py",
    ],
    "record/processes": ["record/test_races.py"],
    "record/rungs": ["record/test_holds.py"],
    "record/spec": [
        "operate/test_axes.py",
        "operate/test_find_and_results.py",
        "record/test_newer_lives.py",
        "launch/test_pools.py",
    ],
    "record/ledger": ["operate/test_report.py"],
    "record/files": [
        "record/test_shared_folder.py",
        "cli/test_permissions.py",
        "record/test_turns.py",
        "record/test_worker_files_failure.py",
        "record/test_ledger_spent.py",
        "record/test_holds.py",
        "record/test_bad_nodes.py",
    ],
    "record/submissions": [
        "launch/test_several_shapes.py",
        "tidy/test_sweeps.py",
        "operate/test_axes.py",
        "record/test_newer_lives.py",
    ],
    "record/journal": [
        "observe/telemetry/test_move.py",
        "record/test_turns.py",
        "record/test_reading.py",
        "record/test_worker_files_failure.py",
        "record/test_worker_files_first_weights.py",
    ],
    "record/shared_folder": ["record/test_reading.py", "record/test_unseen_results.py"],
    "record/tracebacks": ["record/test_signs.py", "record/test_last_words.py", "operate/test_failures.py"],
    "record/trust": [
        "record/test_files.py",
        "record/test_ownership.py",
        "record/test_spec.py",
        "record/test_submissions.py",
        "cli/test_permissions.py",
        "cli/test_planted_links.py",
    ],
    "record/reading": [
        "record/test_shared_folder.py",
        "record/test_files.py",
        "record/test_metrics_log.py",
        "record/test_ledger_allocations.py",
        "record/test_worker_files_first_weights.py",
        "operate/test_axes.py",
        "record/test_known_ends.py",
    ],
    "record/run_folder": [
        *_STATE,
        *_LOST,
        "launch/test_several_shapes.py",
        "record/test_lost_life.py",
        "record/test_races.py",
        "record/test_turns.py",
        "cli/test_many_runs.py",
        "operate/test_hold.py",
    ],
    "record/known_ends": [*_STATE, "record/test_unseen_results.py", "cli/test_many_runs.py"],
    "record/slurm_answers": [
        *_STATE,
        *_LOST,
        "launch/test_several_shapes.py",
        "record/test_races.py",
        "record/test_turns.py",
        "record/test_unseen_results.py",
        "api/test_lost_answers.py",
        "operate/test_hold.py",
    ],
    "record/run_state": [
        *_STATE,
        *_LOST,
        "launch/test_several_shapes.py",
        "record/test_lost_life.py",
        "record/test_run_status.py",
        "record/test_races.py",
        "cli/test_many_runs.py",
        "record/test_unseen_results.py",
        "record/test_turns.py",
        "api/test_lost_answers.py",
        "operate/test_hold.py",
    ],
    "record/run_status": [*_STATE, "operate/test_why.py", "record/test_ledger.py", "cli/test_many_runs.py"],
    "record/run_figures": [
        "record/test_run_status.py",
        "record/test_status.py",
        "record/test_ledger.py",
        "cli/test_shown_runs.py",
        "operate/test_report.py",
        "operate/test_axes.py",
        "operate/test_usage.py",
    ],
    "record/known_runs": [*_LOST, "record/test_status.py", "record/test_ownership.py", "operate/test_usage.py"],
    "record/status": [
        "operate/test_why.py",
        *_STATE,
        *_LOST,
        "record/test_run_status.py",
        "record/test_turns.py",
        "operate/test_axes.py",
        "cli/test_many_runs.py",
    ],
    "record/turns": ["worker/test_slot.py"],
    "slurm/commands": [
        "slurm/test_cluster.py",
        "slurm/test_sbatch.py",
        "slurm/test_inventory.py",
        "launch/test_batch_job.py",
        "launch/test_private_folder.py",
    ],
    "slurm/jobs": ["api/test_jobs_without_files.py", "operate/test_hold.py"],
    "slurm/limits": [
        "slurm/test_read_limits.py",
        "slurm/test_inventory.py",
        "slurm/test_preflight.py",
        "launch/test_arrays.py",
    ],
    "slurm/shape": [
        "slurm/test_preflight.py",
        "operate/test_names.py",
        "launch/test_plan.py",
        "launch/test_scripts.py",
        "hardware/test_discover.py",
    ],
    "slurm/queue": ["slurm/test_accounting.py", "operate/test_usage.py", "launch/test_fit.py"],
    "slurm/terms": ["slurm/test_jobs.py", "slurm/test_queue.py", "slurm/test_accounting.py", "slurm/test_reasons.py"],
    "launch/batch_job": [
        "launch/test_scripts.py",
        "launch/test_submitit_bridge.py",
        "launch/test_setup_lines.py",
    ],
    "launch/extend": ["api/test_extend.py", "launch/test_change.py", "tidy/test_cleaning.py"],
    "launch/frozen_code": _FROZEN,
    "launch/frozen_code/archive": [*_FROZEN, "api/test_changed_code.py", "verify/test_checkout.py"],
    "launch/frozen_code/files": [*_FROZEN, "cli/test_permissions.py"],
    "launch/frozen_code/snapshot": [*_FROZEN, "launch/frozen_code/test_of_command.py", "cli/test_permissions.py"],
    "launch/frozen_code/frozen_worker": ["launch/frozen_code/test_owners.py", "launch/frozen_code/test_unpacking.py"],
    "launch/frozen_code/unpacking": ["launch/frozen_code/test_frozen_worker.py"],
    "launch/follow": ["worker/test_follow.py"],
    "launch/freeze": ["launch/test_several_shapes.py", "record/test_newer_lives.py", "launch/test_pools.py"],
    "launch/grids": [
        "launch/test_private_folder.py",
        "operate/test_hold.py",
        "notify/test_notify.py",
        "launch/test_top_up.py",
        "api/test_changed_code.py",
        "api/test_lost_intents.py",
    ],
    "launch/arrays": ["launch/test_plan.py", "launch/test_pools.py", "launch/test_array_parallelism.py"],
    "launch/known": ["launch/test_plan.py", "launch/test_several_shapes.py"],
    "launch/plan": [
        "launch/test_arrays.py",
        "launch/test_pools.py",
        "launch/test_array_parallelism.py",
        "launch/test_several_shapes.py",
    ],
    "launch/searches": ["search/test_pool_runs.py", "api/test_api.py"],
    "launch/settle": ["record/test_lag.py", "record/test_ownership.py"],
    "launch/submitit_bridge": ["record/test_lag.py"],
    "launch/later_jobs": ["launch/test_successor.py", "launch/test_top_up.py"],
    "launch/submit": [
        "launch/test_top_up.py",
        "launch/test_killed_anywhere.py",
        "launch/test_private_folder.py",
        "operate/test_hold.py",
        "notify/test_notify.py",
        "api/test_api.py",
        "launch/test_array_parallelism.py",
    ],
    "observe/advice": ["cli/test_advise.py", *_RULES],
    "observe/facts": _RULES,
    "observe/flight": ["observe/inside/test_flight.py", "observe/inside/test_hang.py"],
    "observe/profile_request": ["observe/profile/test_profile_request.py"],
    "observe/straggler_log": [
        "observe/stragglers/test_straggler_log.py",
        "observe/stragglers/test_judge.py",
        "observe/stragglers/test_told_stragglers.py",
    ],
    "observe/telemetry": [
        "observe/telemetry/test_care.py",
        "operate/test_axes.py",
        "operate/test_logs.py",
        "observe/telemetry/test_samples.py",
        "observe/telemetry/test_telemetry_of_runs.py",
        "record/test_run_status.py",
    ],
    "observe/rules_of_resources": _RULES,
    "observe/rules_of_time": _RULES,
}
"""Files of the code whose tests have other names too, and folders for files that have neither; below tests/unit/."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """An error of one operator at one place in a file."""

    path: Path
    line: int
    operator: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator.partition('/')[2]}"

    def source(self) -> str | None:
        """Return the file with the error; None if it is no Python, or means the same (`_meaning`)."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        before = self.path.read_text()
        try:
            after: str = mutate_code(before, get_operator(self.operator)(), self.occurrence)
            is_equality = self.operator.endswith(_EQUALITY)
            return after if _meaning(after, is_equality) != _meaning(before, is_equality) else None
        except (SyntaxError, AttributeError):  # the `*` of `def call(*, key)` is no product, `a.B` of `except` no name
            return None


_GUARDS = frozenset({"frozen", "slots", "kw_only"})
_EQUALITY = ("ReplaceComparisonOperator_Is_Eq", "ReplaceComparisonOperator_IsNot_NotEq")

_FLAGS = re.compile(r"(?:\(?os\.O_[A-Z]+\)?(?: [|+^] )?)+")


def _meaning(source: str, is_equality: bool) -> str:
    """Return what a run of the code can depend on. Errors in the rest are not drawn, for no test could see them.

    Nothing reads annotations. `frozen`, `slots` and `kw_only` of a dataclass only refuse code that mypy refuses too.
    What stands under `if TYPE_CHECKING:` is for mypy. `x == State.DONE` says the same as `x is State.DONE`, since the
    members of an enum are equal to nothing but themselves; the opposite error is drawn, for a text equals a StrEnum's.
    `os.O_RDWR + os.O_CREAT` and `^` are what `|` is, since no two of these flags share a bit.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in {"annotation", "returns"} & set(node._fields):
            setattr(node, field, ast.Constant(None))
        match node:
            case ast.Call(func=ast.Name("dataclass")):
                node.keywords = [keyword for keyword in node.keywords if keyword.arg not in _GUARDS]
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.UnaryOp(ast.Not(), ast.Name("TYPE_CHECKING"))):
                node.test, node.body = ast.Name("TYPE_CHECKING"), [ast.Pass()]
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Attribute(ast.Name(owner))]):
                if is_equality and owner[:1].isupper():
                    node.ops = [ast.Eq() if isinstance(node.ops[0], ast.Is) else ast.NotEq()]
            case ast.BinOp(op=ast.BitOr() | ast.Add() | ast.BitXor()) if _FLAGS.fullmatch(text := ast.unparse(node)):
                node.op, node.left, node.right = ast.BitOr(), ast.Name(re.sub(r"\W+", " ", text)), ast.Constant(None)
    return ast.dump(tree)


def draw(paths: Sequence[Path], count: int, seed: int) -> list[tuple[Mutant, str]]:
    """Draw places of all files, and for each place one mutant, with its source.

    So `+`, which eleven others may replace, counts as much as `True`.
    """
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    operators = [(name, get_operator(name)()) for name in operator_names() if "Variable" not in name]
    places: dict[tuple[Path, tuple[int, int], str], list[Mutant]] = {}
    for path in paths:
        seen: Counter[str] = Counter()
        for node in ast_nodes(get_ast(path.read_text())):
            for name, operator in () if {node.type, getattr(node, "value", "")} & _NEVER else operators:
                for begin, _ in operator.mutation_positions(node):
                    mutant = Mutant(path, begin[0], name, seen[name])
                    places.setdefault((path, begin, name.partition("_")[0]), []).append(mutant)
                    seen[name] += 1
    chance, drawn = random.Random(seed), list[tuple[Mutant, str]]()
    order = list(places.values())
    chance.shuffle(order)
    for each in order:
        mutant = chance.choice(each)
        if len(drawn) < count and (source := mutant.source()) is not None:
            drawn.append((mutant, source))
    return drawn


def nearest_tests(path: Path) -> tuple[str, ...]:
    """Return the test files for a file of the code."""
    module = path.relative_to("hpc_trainer").with_suffix("")
    tests = Path("tests/unit")
    found = sorted((tests / module.parent).glob(f"test_{module.name}*.py"))
    found += [tests / each for each in NEAREST.get(str(module), ())]
    found = found or [tests / each for each in NEAREST.get(str(module.parent), ())]
    return tuple(dict.fromkeys(map(str, found)))


Drawn = tuple[int, Mutant, str]
"""Number in the draw, and the source with the error."""


class Failures:
    """A plugin of pytest that writes the first test that fails into the log."""

    def __init__(self, log: Path) -> None:
        self._log, self._failed = log, ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self._failed:
            self._failed = report.nodeid
            self._log.write_text(self._failed)


class Player(Failures):
    """A plugin of pytest that plays the collected tests of each mutant in a fork, in place of all tests once."""

    def __init__(self, drawn: Sequence[Drawn], answers: Answers, log: Path) -> None:
        super().__init__(log)
        self._drawn, self._answers = drawn, answers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("tests cannot be collected")
        of_file: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            of_file.setdefault(str(item.path.relative_to(Path.cwd())), []).append(item)
        judge = Judge(lambda test: self._play([each for each in session.items if each.nodeid == test], {}), self._log)
        for number, mutant, source in self._drawn:
            self._answers.begin(number)
            items = [item for test in nearest_tests(mutant.path) for item in of_file.get(test, ())]
            try:
                changed = functions_of(mutant.path, source)
            except Exception as error:
                _say(f"{number:3} {mutant}: the function cannot be replaced ({error!r}), so all is imported anew")
                self._answers.end(number, _IRREPLACEABLE)
                continue
            play = functools.partial(self._play_but, items, changed)
            self._answers.end(number, judge.killer_of(number, mutant, source, play))
        return True

    def pytest_internalerror(self, excrepr: object) -> None:
        _say(f"pytest's session ends: {excrepr}")

    def _play_but(
        self, items: Sequence[pytest.Item], changed: dict[types.FunctionType, types.CodeType], left_out: set[str]
    ) -> int:
        return self._play([each for each in items if each.nodeid not in left_out], changed)

    def _play(self, items: Sequence[pytest.Item], changed: dict[types.FunctionType, types.CodeType]) -> int:
        for function, code in changed.items():
            function.__code__ = code
        for item, after in zip(items, [*items, None][1:], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._failed:
                break
        return int(bool(self._failed))


class Answers:
    """What a session of pytest says of its mutants, in a file: it may end before it has played them all."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def begin(self, number: int) -> None:
        self.end(number, None)

    def end(self, number: int, killer: str | None) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([number, killer]) + "\n")

    def take(self) -> tuple[dict[int, str], int | None]:
        """Return the killers by number, and the number of the mutant that was played when the session ended."""
        told = [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []
        self._file.unlink(missing_ok=True)
        return {number: killer for number, killer in told if killer is not None}, (
            told[-1][0] if told and told[-1][1] is None else None
        )


def is_in_function(path: Path, source: str) -> bool:
    """True if the error is in the body of a function: what is computed at the import is the same."""
    return _skeleton(compile(source, str(path), "exec")) == _skeleton(compile(path.read_text(), str(path), "exec"))


def _skeleton(code: types.CodeType) -> tuple[Any, ...]:
    """Return what an import of the module computes; functions count by their names alone."""
    consts = [
        each if not isinstance(each, types.CodeType) or each.co_name.startswith("<")
        else each.co_name if each.co_flags & inspect.CO_OPTIMIZED else _skeleton(each)
        for each in code.co_consts
    ]  # fmt: skip
    return code.co_code, code.co_names, consts


def functions_of(path: Path, source: str) -> dict[types.FunctionType, types.CodeType]:
    """Return the functions of a file that is imported, with their code in another source of it."""
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    before = dict(_codes(compile(path.read_text(), str(path), "exec")))
    return {
        _function(module, names): code
        for names, code in _codes(compile(source, str(path), "exec"))
        if code != before[names]
    }


def _codes(code: types.CodeType, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], types.CodeType]]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType) and not each.co_name.startswith("<"):
            place = (*names, each.co_name)
            yield from [(place, each)] if each.co_flags & inspect.CO_OPTIMIZED else _codes(each, place)


def _function(module: types.ModuleType, names: Sequence[str]) -> types.FunctionType:
    found: Any = module
    for name in names:
        found = vars(found)[name]
    for way in ("fget", "func", "__func__"):  # of a property, a cached_property, a classmethod
        found = getattr(found, way, None) or found
    found = inspect.unwrap(found)
    assert isinstance(found, types.FunctionType), names
    return found


class Judge:
    """Says which test kills a mutant; a test that fails without a mutant too kills none, and is left out."""

    def __init__(self, play_alone: Callable[[str], int], log: Path) -> None:
        self._play_alone, self._log = play_alone, log
        self._left_out: set[str] = set()
        self._sound: set[str] = set()

    def killer_of(self, number: int, mutant: Mutant, source: str, play: Callable[[set[str]], int]) -> str:
        """Return the test that fails, "" if none does; `play` is given the tests to leave out."""
        begin = time.monotonic()
        while (killer := self._play(number, mutant, source, play)) and "::" in killer and not self._is_sound(killer):
            self._left_out.add(killer)
            _say(f"    {killer} fails without a mutant too")
        _say(f"{number:3} {time.monotonic() - begin:5.1f} s {mutant}: {killer or 'SURVIVED'}")
        if not killer:
            lines = mutant.path.read_text().splitlines(), source.splitlines()
            _say("\n".join(f"      {line}" for line in [*difflib.unified_diff(*lines, n=0, lineterm="")][3:]))
        return killer

    def _play(self, number: int, mutant: Mutant, source: str, play: Callable[[set[str]], int]) -> str:
        """Play with the error in the file too, for programs that tests start."""
        before, time_before = mutant.path.read_text(), mutant.path.stat().st_mtime
        self._log.write_text("")
        mutant.path.write_text(source)
        os.utime(mutant.path, (number, number))  # Python's cache knows a file by its second and its length
        code = _in_fork(functools.partial(play, self._left_out))
        mutant.path.write_text(before)
        os.utime(mutant.path, (time_before, time_before))
        failed = self._log.read_text()
        return "" if code == 0 else failed or ("out of time" if code is None else f"pytest ends with {code}")

    def _is_sound(self, test: str) -> bool:
        if test not in self._sound and _in_fork(functools.partial(self._play_alone, test)) == 0:
            self._sound.add(test)
        return test in self._sound


def _say(text: str) -> None:
    os.write(_OUTPUT, f"{text}\n".encode())  # pytest takes what is printed


_OUTPUT = os.dup(1)


def _in_fork(act: Callable[[], int], most_cpu_s: int = 60, most_s: float = 600.0) -> int | None:
    """Return the exit code of an act in a fork, which is ended with all that it started; None if it takes too long."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (most_cpu_s, most_cpu_s))
            CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            code = act()
        except BaseException:
            os.write(_OUTPUT, traceback.format_exc().encode())
        finally:
            sys.stdout.flush()
            os._exit(code)
    end, found, status = time.monotonic() + most_s, 0, 0
    try:
        while not found and time.monotonic() < end:
            time.sleep(0.02)
            found, status = os.waitpid(pid, os.WNOHANG)
    finally:  # also when this process is told to end
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return os.waitstatus_to_exitcode(status) if found and not os.WIFSIGNALED(status) else None


_IRREPLACEABLE = "the function cannot be replaced"
_WORDS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slurm and not long and not xla",
          "-W", "ignore:Module already imported")  # fmt: skip


def _play_anew(tests: Sequence[str], log: Path, left_out: Collection[str] = ()) -> int:
    """Import all anew, and play until a test fails."""
    _to_nowhere(1, 2)
    skipped = [f"--deselect={each}" for each in left_out]
    code = int(pytest.main([*_WORDS, "-x", *skipped, *tests], [Failures(log)]))
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


def _play_session(drawn: Sequence[Drawn], answers: Answers, log: Path) -> int:
    """Play errors in functions."""
    _to_nowhere(1)
    tests = {test for _, mutant, _ in drawn for test in nearest_tests(mutant.path)}
    return int(pytest.main([*_WORDS, *sorted(tests)], [Player(drawn, answers, log)]))


def _to_nowhere(*descriptors: int) -> None:
    for each in descriptors:
        os.dup2(os.open(os.devnull, os.O_WRONLY), each)


def play_all(drawn: Sequence[Drawn]) -> dict[int, str]:
    """Return the test that kills each mutant, by its number; "" where none does."""
    log = Path("mutants.log").absolute()
    CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a session that died has left is ended too
    inside = [each for each in drawn if nearest_tests(each[1].path) and is_in_function(each[1].path, each[2])]
    killers = {number: "" for number, _, _ in drawn} | play_functions(inside, log)
    judge = Judge(lambda test: _play_anew([test], log), log)
    for number, mutant, source in drawn:
        is_played = (number, mutant, source) in inside and killers[number] != _IRREPLACEABLE
        if not is_played and (tests := nearest_tests(mutant.path)):
            killers[number] = judge.killer_of(number, mutant, source, functools.partial(_play_anew, tests, log))
    return killers


def play_functions(drawn: Sequence[Drawn], log: Path) -> dict[int, str]:
    """Return the killers of errors in functions.

    Whatever ends the session costs no other mutant: it goes on in a new one. A mutant that ends two is killed.
    """
    answers, killers = Answers(log.with_suffix(".jsonl")), dict[int, str]()
    ended: set[int] = set()
    right = {mutant.path: mutant.path.read_text() for _, mutant, _ in drawn}
    while rest := [each for each in drawn if each[0] not in killers]:
        code = _in_fork(functools.partial(_play_session, rest, answers, log), 10**6, 10**6)
        told, playing = answers.take()
        killers |= told
        if playing is None and not told:
            sys.exit(f"pytest ended with {code} before the first mutant")
        if playing is not None:
            _say(f"{playing:3} was played when pytest's session ended with {code}")
            for path, source in right.items():
                path.write_text(source)
            if playing in ended:
                killers[playing] = "it ends pytest's session"
            ended.add(playing)
    return killers


def main() -> int:
    """Copy the project, draw, play, and print a table by file; 1 if fewer than 85 % are killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--from", type=int, default=1, dest="first", help="number of the draw to begin with")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the draw: those that survived")
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="folders or files in hpc_trainer")
    given = parser.parse_args()
    _say(f"seed {given.seed}: {given.count} of {' '.join(given.folders)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        _enter_copy(Path(folder))
        paths = [Path("hpc_trainer", each) for each in given.folders]
        files = sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))
        sys.path.append(str(_COSMIC_RAY))
        drawn = [(number, *each) for number, each in enumerate(draw(files, given.count, given.seed), 1)]
        sys.path.remove(str(_COSMIC_RAY))  # no test finds what is not ours
        for name in _HEAVY:
            importlib.import_module(name)
        drawn = [each for each in drawn if each[0] in (given.only or range(given.first, given.count + 1))]
        killers = play_all(drawn)
        os.chdir("/")
    return _show_table(drawn, killers)


def _enter_copy(folder: Path) -> None:
    """Go to a copy of the project, from which all is imported, here and in programs that tests start."""
    folder.chmod(0o711)  # a test's program runs as another user, who enters its folder
    for name in ("home", "tmp", "checkout"):
        (folder / name).mkdir()
    copy = folder / "checkout"
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, copy)
    os.chdir(copy)
    others = [each for each in sys.path if each and Path(each).resolve() != ROOT]
    sys.path[:] = [str(copy), *(each for each in others if not each.startswith(str(ROOT / "hpc_trainer")))]
    sys.path.append(str(copy / "hpc_trainer/hydra_apps/plugin"))
    os.environ |= {"PYTHONPATH": str(copy), "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    tempfile.tempdir = None


def _show_table(drawn: Sequence[Drawn], killers: Mapping[int, str]) -> int:
    counts = Counter(str(mutant.path) for _, mutant, _ in drawn)
    killed = Counter(str(mutant.path) for number, mutant, _ in drawn if killers[number])
    for path, count in sorted(counts.items()):
        _say(f"{path:52} {count:3} drawn {killed[path]:3} killed")
    share = killed.total() / max(1, len(drawn))
    _say(f"{killed.total()} of {len(drawn)} killed ({share:.0%})")
    return int(share < 0.85)


if __name__ == "__main__":
    sys.exit(main())
