"""Every kind of doubt has a sentence and a meaning; no code looks at the words of a sentence."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.operate.verdicts import BY_DOUBT, TAKEN, of_unknown
from hpc_trainer.record import doubts
from hpc_trainer.record.doubts import Doubt, DoubtKind, kind_of_doubt

_EXAMPLES: dict[str, tuple[Any, ...]] = {
    "silent": ("squeue",), "silent_about": (["7"], "timeout"), "silent_after_damage": (None,), "interrupted": (),
    "other_cluster": ("submitted on the cluster b",), "other_host": (),
    "unseen_result": ("COMPLETED", "(0:0)", 12.0, 150.0), "accounting_behind": ("RUNNING",),
    "alive_without_job": (3.0,), "new_word": ("squeue", "MAGIC"), "taken": ("job 7",), "maybe_taken": (("7", "8"),),
    "lost_spec": ("Submit again.",), "untold_job": ("7",), "unreadable": ("heartbeat.json cannot be read: EIO",),
}  # fmt: skip


def _makers() -> dict[str, Any]:
    found = inspect.getmembers(doubts, inspect.isfunction)
    return {name: maker for name, maker in found if maker.__annotations__.get("return") == "Doubt"}


def test_each_kind_is_made_somewhere() -> None:
    makers = _makers()
    assert makers.keys() == _EXAMPLES.keys(), "an example for each"
    made = {maker(*_EXAMPLES[name]).kind for name, maker in makers.items()}
    assert made | {DoubtKind.damaged} == set(DoubtKind)


@pytest.mark.parametrize("name", sorted(_EXAMPLES))
def test_a_doubt_is_its_sentence_and_keeps_its_kind(name: str) -> None:
    doubt = _makers()[name](*_EXAMPLES[name])
    assert isinstance(doubt, str)
    assert len(doubt) > 10
    assert not doubt.endswith(".") or name == "lost_spec"
    for again in (copy.deepcopy(doubt), pickle.loads(pickle.dumps(doubt))):
        assert (str(again), again.kind) == (str(doubt), doubt.kind)


@pytest.mark.parametrize("kind", list(DoubtKind))
def test_each_kind_has_a_meaning_and_advice(kind: DoubtKind) -> None:
    verdict = of_unknown(Doubt(kind, "in whatever words"), None)
    assert verdict is BY_DOUBT[kind]
    assert verdict.says.endswith(".")
    assert verdict.advice


def test_what_is_lost_of_a_run_that_has_a_job_is_told_as_taken() -> None:
    assert of_unknown("attempt-001.jsonl has lost attempt 1", "7_0") is TAKEN
    assert kind_of_doubt(None) is DoubtKind.damaged


def test_no_code_looks_for_words_in_a_cause() -> None:
    """`"squeue" in run.cause` would go on working until somebody writes a better sentence."""
    paths = sorted(Path(doubts.__file__).parents[1].rglob("*.py"))
    assert len(paths) > 200
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
                name = ast.unparse(node.comparators[0]).rpartition(".")[2]
                is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
                looks = is_text and name in ("cause", "reason", "doubt")
                assert not looks, f"{path}:{node.lineno}"
