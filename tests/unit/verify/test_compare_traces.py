"""What two traces say: the first difference, and for each kind of fault its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.record.layout import RunPaths
from hpc_trainer.verify.resume import (
    First,
    Trace,
    first_difference,
    other_metrics,
    read_trace,
    why_resumed_differs,
    why_undisturbed_differ,
)

WEIGHT = "model.weight"
State = dict[str, str]


def _line(kind: str, step: int, attempt: int = 0, **leaves: str) -> dict[str, Any]:
    return {"kind": kind, "step": step, "attempt": attempt, "leaves": leaves}


def _state(step: int, **changes: str) -> State:
    return {"inputs": f"i{step}", WEIGHT: f"w{step}", "random.torch": f"r{step}", **changes}


def _steps(begin: int, end: int, attempt: int = 0, **changes: str) -> list[dict[str, Any]]:
    return [_line("step", step, attempt, **_state(step, **changes)) for step in range(begin, end + 1)]


def _trace(*ranks: list[dict[str, Any]], metrics: Any = None) -> Trace:
    return Trace(lines=tuple(map(tuple, ranks)), metrics=metrics or {}, files={}, last_step=None)


UNDISTURBED = _trace([_line("restored", 0), *_steps(1, 6)])


def _resumed(
    *after: dict[str, Any], saved: State | None = None, restored: State | None = None, began: State | None = None
) -> Trace:
    """Saved at step 3, went on from there."""
    kept = {WEIGHT: "w3", "random.torch": "r3"}
    lines = [_line("restored", 0), *_steps(1, 3), _line("saved", 3, **{**kept, **(saved or {})})]
    lines += [_line("restored", 3, 1, **(restored or kept)), _line("began", 3, 1, **(began or {}))]
    return _trace([*lines, *(after or _steps(4, 6, 1))])


def test_the_same_after_a_resume_is_the_same() -> None:
    assert first_difference(UNDISTURBED, _resumed()) is None


def test_the_first_step_the_first_rank_and_every_name() -> None:
    one = _trace(_steps(1, 4), _steps(1, 4))
    other = _trace(_steps(1, 2) + _steps(3, 4, inputs="x"), _steps(1, 1) + _steps(2, 4, **{WEIGHT: "x", "more": "1"}))
    assert first_difference(one, other) == First(step=2, rank=1, names=(WEIGHT, "more"))
    assert first_difference(one, _trace(_steps(1, 3), _steps(1, 4))) == First(
        step=4, rank=0, names=("inputs", WEIGHT, "random.torch")
    )


def test_of_a_step_that_was_done_twice_the_last_time_counts() -> None:
    again = _trace([*_steps(1, 5, **{WEIGHT: "x"}), *_steps(1, 6, 1)])
    assert first_difference(UNDISTURBED, again) is None


@pytest.mark.parametrize(
    ("resumed", "kind", "words"),
    [
        (_resumed(*_steps(4, 6, 1, inputs="x")), "unseeded data", "keeps something of its own"),
        (
            _resumed(*_steps(4, 6, 1, **{WEIGHT: "x"}), saved={"loose.model.n": "3"}, began={"loose.model.n": "0"}),
            "missing state", "model.n: 3 when step 3 was saved, 0 after the resume at step 3",
        ),
        (
            _resumed(*_steps(4, 6, 1, **{WEIGHT: "x"}), restored={WEIGHT: "other", "random.torch": "r3"}),
            "not put back", f"{WEIGHT} are not, after loading the checkpoint",
        ),
        (_resumed(*_steps(4, 6, 1, **{WEIGHT: "x"})), "missing state", "something that is not saved influences it"),
        # An attribute that only the new attempt has is no sign of anything.
        (
            _resumed(*_steps(4, 6, 1, **{WEIGHT: "x"}), began={"loose.model.cache": "0"}),
            "missing state", "something that is not saved influences it",
        ),
    ],
)  # fmt: skip
def test_each_fault_after_a_resume_has_its_reason(resumed: Trace, kind: str, words: str) -> None:
    first = first_difference(UNDISTURBED, resumed)
    assert first is not None
    assert first.step == 4
    reason = why_resumed_differs(first, UNDISTURBED, resumed, num_workers=0)
    assert reason.kind == kind
    assert words in reason.text


LOST_COUNTER = _resumed(*_steps(4, 6, 1, **{WEIGHT: "x"}), saved={"loose.model.n": "3"}, began={"loose.model.n": "0"})
LOST_BUFFER = _resumed(
    *_steps(4, 6, 1, **{WEIGHT: "x"}), saved={"loose-buffer.model.s": "a1"}, began={"loose-buffer.model.s": "00"}
)
NOT_PUT_BACK = _resumed(*_steps(4, 6, 1, **{WEIGHT: "x"}), restored={WEIGHT: "other", "random.torch": "r3"})
UNKNOWN = _resumed(*_steps(4, 6, 1, **{WEIGHT: "x"}))
OTHER_INPUTS = _resumed(*_steps(4, 6, 1, inputs="x"))


@pytest.mark.parametrize(
    ("resumed", "has_own_loop", "said", "not_said"),
    [
        (LOST_COUNTER, False, "get_extra_state", "run.save"),
        (LOST_COUNTER, True, "run.save", "__getitems__"),
        (LOST_BUFFER, False, "persistent=True", "run.save"),
        (LOST_BUFFER, True, "persistent=True", "get_extra_state"),
        (NOT_PUT_BACK, False, "loading the checkpoint", "run."),
        (NOT_PUT_BACK, True, "after run.restore, what run.save was given", "loading"),
        (UNKNOWN, False, "get_extra_state", "run.save"),
        (UNKNOWN, True, "run.save", "the data set"),
        (OTHER_INPUTS, False, "augment(inputs, generators)", "run.save"),
        (OTHER_INPUTS, True, "default_rng((seed, epoch, index))", "augment("),
    ],
)
def test_the_advice_is_for_the_loop_that_a_person_has(
    resumed: Trace, has_own_loop: bool, said: str, not_said: str
) -> None:
    first = first_difference(UNDISTURBED, resumed)
    assert first is not None
    reason = why_resumed_differs(first, UNDISTURBED, resumed, num_workers=0, has_own_loop=has_own_loop)
    words = f"{reason.text} {reason.advice}"
    assert said in words
    assert not_said not in words


def test_a_buffer_that_is_not_saved_is_called_one() -> None:
    first = first_difference(UNDISTURBED, LOST_BUFFER)
    assert first is not None
    reason = why_resumed_differs(first, UNDISTURBED, LOST_BUFFER, num_workers=0)
    assert reason.kind == "missing state"
    assert reason.text.startswith("model.s: a1 when step 3 was saved, 00 after the resume at step 3. It is a buffer")
    assert "Make it a buffer" not in reason.advice


def test_nobody_is_told_to_draw_by_epoch_where_there_is_none() -> None:
    """`__getitems__` gets indices alone."""
    first = First(step=1, rank=0, names=("inputs", WEIGHT))
    assert "augment(inputs, generators)" in why_undisturbed_differ(first, deterministic=True).advice
    own = why_undisturbed_differ(first, deterministic=True, has_own_loop=True)
    assert "augment(" not in own.advice


def test_loader_processes_are_named_where_there_are_some() -> None:
    resumed = _resumed(*_steps(4, 6, 1, inputs="x"))
    first = first_difference(UNDISTURBED, resumed)
    assert first is not None
    assert "The 2 loader processes" in why_resumed_differs(first, UNDISTURBED, resumed, num_workers=2).text


def test_sums_over_three_ranks_may_be_in_another_order() -> None:
    one = _trace(*[list(UNDISTURBED.lines[0])] * 3)
    other = _trace(*[list(_resumed(*_steps(4, 6, 1, **{WEIGHT: "x"})).lines[0])] * 3)
    first = first_difference(one, other)
    assert first is not None
    assert why_resumed_differs(first, one, other, num_workers=0).kind == "reduction order"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("inputs", WEIGHT), "unseeded data"),
        (("random.torch",), "random numbers drawn"),
        ((WEIGHT,), "nondeterministic computation"),
        ((WEIGHT, "random.torch"), "nondeterministic computation"),
    ],
)
def test_undisturbed_runs_that_differ(names: tuple[str, ...], kind: str) -> None:
    first = First(step=2, rank=0, names=names)
    assert why_undisturbed_differ(first, deterministic=True).kind == kind
    assert "train.deterministic=false" not in why_undisturbed_differ(first, deterministic=True).text
    if kind == "nondeterministic computation":
        assert "train.deterministic=false allows it" in why_undisturbed_differ(first, deterministic=False).text


def test_metrics_that_are_never_the_same_are_left_out() -> None:
    def metrics(seconds: float, loss: float) -> Trace:
        return _trace([], metrics={1: {"seconds": seconds, "loss": loss, "grad_norm": float("nan")}})

    assert other_metrics(metrics(1, 0.5), metrics(3, 0.5), metrics(2, 0.5)) == ()
    assert other_metrics(metrics(1, 0.5), metrics(1, 0.7), metrics(1, 0.5)) == ((1, "loss"),)


def test_files_of_a_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    step = paths.checkpoints / "step-00000004"
    step.mkdir(parents=True)
    (step / "state.safetensors").write_bytes(b"abc")
    (step / "manifest.json").write_text("{}")
    paths.trace(0).write_text("".join(json.dumps(line) + "\n" for line in _steps(1, 2)))
    lines = [{"step": 1, "loss": 0.5, "time": 3.0, "steps_per_s": 9.0}, {"step": 1, "eval_loss": 0.25}]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace(paths, 2)
    assert trace.files == {"state.safetensors": b"abc"}
    assert trace.metrics == {1: {"loss": 0.5, "eval_loss": 0.25}}
    assert list(trace.steps(0)) == [1, 2]
    assert list(trace.steps(1)) == []
    assert trace.last_step == 4
