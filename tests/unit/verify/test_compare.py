"""Lines of metrics.jsonl side by side: the first step that differs, and what was not computed is left out."""

from __future__ import annotations

import math

from hpc_trainer.verify.compare_metrics import compare, last_step


def _line(step: int, loss: float, **more: float) -> dict[str, float]:
    return {"step": step, "loss": loss, "time": 17.0 + step, "samples_per_s": step / 7, **more}


WAS = [_line(10, 2.3), _line(20, 2.1, lr=0.1), {"step": 20, "eval_loss": 2.2}, _line(30, 1.9)]


def test_a_copy_that_logs_every_step_is_identical() -> None:
    now = [_line(step, {10: 2.3, 20: 2.1}.get(step, 5.0), lr=0.1, samples_per_s=99.0) for step in range(1, 25)]
    now.insert(20, {"step": 20, "eval_loss": 2.2})

    found = compare(WAS, now, 20)

    assert found.is_identical
    assert (found.steps, found.names) == ((10, 20), ("loss", "lr", "eval_loss"))


def test_the_first_step_that_differs_comes_first_and_the_loss_before_others() -> None:
    now = [_line(10, 2.3), _line(20, 2.1000001, lr=0.2)]

    found = compare(WAS, now, 20)

    assert not found.is_identical
    assert [(each.step, each.name) for each in found.deviations] == [(20, "loss"), (20, "lr")]
    relative = found.deviations[0].relative
    assert relative is not None
    assert math.isclose(relative, 1e-7 / 2.1, rel_tol=1e-6)


def test_steps_that_the_copy_lacks_are_told() -> None:
    found = compare(WAS, [_line(10, 2.3)], 20)

    assert (found.is_identical, found.missing) == (False, (20,))


def test_nothing_in_common_is_not_identical() -> None:
    assert not compare(WAS, [{"step": 10, "other": 1.0}], 10).is_identical


def test_nan_is_the_same_as_nan() -> None:
    assert compare([_line(1, math.nan)], [_line(1, math.nan)], 1).is_identical
    assert not compare([_line(1, math.nan)], [_line(1, 2.0)], 1).is_identical


def test_which_step_is_the_last() -> None:
    assert last_step(WAS, 25) == 20
    assert last_step(WAS, 5) == 10  # nothing was logged before: the first that was
    assert last_step(WAS, 1000) == 30
    assert last_step([{"step": 3, "time": 1.0}], 5) is None
