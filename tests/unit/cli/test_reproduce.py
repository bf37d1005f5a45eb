"""What `verify reproduce` prints: the verdict first, then what differs, then what could not be looked at."""

from __future__ import annotations

from pathlib import Path

from hpc_trainer.record.environment import Difference
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.verify.compare_metrics import Comparison, Deviation
from hpc_trainer.verify.reproduce import Original, Reproduced
from hpc_trainer.verify.verbs import _reproduced_lines

ORIGINAL = Original(paths=RunPaths(Path("run-0123456789")), attempt=0, environment={}, last=20)
SAME = Comparison(steps=(10, 20), names=("loss", "lr"), deviations=(), missing=())
TORCH = Difference("package", "torch", "2.13.0", "2.13.1")


def _said(comparison: Comparison, *differences: Difference, **more: object) -> list[str]:
    found = Reproduced(run_id="run-0123456789", comparison=comparison, differences=list(differences))
    for key, value in more.items():
        setattr(found, key, value)
    return _reproduced_lines(found, ORIGINAL)


def test_identical_and_nothing_differs() -> None:
    assert _said(SAME) == [
        "IDENTICAL: the first 20 steps. Compared bit for bit: loss, lr, at 2 logged step(s).",
        "Nothing that is recorded differs: code, data, packages, libraries, devices, variables.",
    ]


def test_identical_although_something_differs() -> None:
    said = _said(SAME, TORCH, gpus=(["GPU-1"], ["GPU-2"]))

    assert said[1:] == [
        "These differ, and changed nothing here:", "  torch 2.13.1, was 2.13.0", "GPUs: GPU-2; the run had GPU-1.",
    ]  # fmt: skip


def test_the_first_deviation_is_named_and_the_others_are_counted() -> None:
    deviations = (Deviation(10, "loss", 2.0, 2.5), Deviation(20, "loss", 1.0, 3.0))
    comparison = Comparison(steps=(10, 20), names=("loss",), deviations=deviations, missing=())

    assert _said(comparison, TORCH) == [
        "NOT IDENTICAL: step 10: loss 2.5 against 2.0 (relative 0.2).",
        "2 values differ at 2 of the compared steps; the largest relative difference is 2.",
        "These differ:",
        "  torch 2.13.1, was 2.13.0",
    ]


def test_without_a_record_nobody_says_what_differs() -> None:
    comparison = Comparison(steps=(10,), names=("loss",), deviations=(), missing=(20,))

    assert _said(comparison, is_recorded=False) == [
        "NOT IDENTICAL: the copy did not log 20, which the run did.",
        "There is no record of the run's environment: the differences are unknown.",
    ]


def test_of_many_differences_ten_are_shown() -> None:
    said = _said(SAME, *(Difference("package", f"p{number}", "1", "2") for number in range(12)))

    assert said[-1] == "  and 2 more: --json has all"
    assert len(said) == 13
