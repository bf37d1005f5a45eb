"""Facts of a run from its records and samples, and how advice on the runs of a sweep is put together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpc_trainer.observe.advice import (
    RULES,
    AdvisedRun,
    next_command,
    next_command_of_sweep,
    shared_advice,
    sweep_lines,
)
from hpc_trainer.observe.facts import Gain, Pace, RankUse, pace_of, uses_of, worked_s
from hpc_trainer.observe.telemetry import Device, Host, Sample, mean_of
from hpc_trainer.record.states import RunState
from tests.unit.observe.advice.test_rules import GPU, SLOW, SLURM, SMALL, advice_of, facts_of, rank, waiting


def _sample(step: int | None, *, rank: int = 0, cpus: float | None = 1.0, rss: int = 100, **gpu: Any) -> Sample:
    device = Device(**{"uuid": f"GPU-{rank}", "name": "H100", **gpu}) if gpu else None
    return Sample(
        attempt=0, rank=rank, time=1.0, elapsed_s=1.0, node=f"n{rank}", step=step, device=device,
        host=Host(cpus=cpus, rss_bytes=rss, cpus_allowed=4),
    )  # fmt: skip


def test_samples_between_the_first_step_and_the_last_count() -> None:
    samples = [_sample(step, cpus=cpus) for step, cpus in ((0, 9.0), (0, 9.0), (1, 9.0), (2, 1.0), (3, 2.0), (3, 9.0))]
    (use,) = uses_of(samples)
    assert (use.name, use.node, use.samples, use.cpus, use.most_cpus) == ("rank 0", "n0", 2, 1.5, 2.0)


def test_of_a_program_that_tells_no_step_the_first_two_samples_do_not_count() -> None:
    (use,) = uses_of([_sample(None, cpus=float(cpus)) for cpus in (9, 9, 1, 2, 3)])
    assert (use.samples, use.cpus) == (3, 2.0)
    (few,) = uses_of([_sample(None, cpus=float(cpus)) for cpus in (9, 8)])
    assert (few.samples, few.cpus) == (2, 8.5), "better than none"


def test_what_a_gpu_did_is_the_mean_of_its_samples_and_its_clock_is_compared_with_the_best() -> None:
    samples = [
        _sample(0, utilisation=0.0), _sample(1, utilisation=0.0),
        _sample(2, utilisation=0.4, sm_clock_mhz=1000, throttle=("hw_thermal",), power_limit_w=700.0, name="H100"),
        _sample(3, utilisation=0.8, sm_clock_mhz=1400, throttle=(), power_limit_w=600.0),
        _sample(4, utilisation=0.6, sm_clock_mhz=1200),
        *(_sample(step, rank=1, utilisation=1.0, sm_clock_mhz=2000, rss=200 + step) for step in range(5)),
        *(_sample(step, rank=2, name="A100", sm_clock_mhz=500) for step in range(5)),
    ]  # fmt: skip
    first, second, third = uses_of(samples)
    assert (first.utilisation, first.clock_share, first.power_limit_w) == (pytest.approx(0.6), 0.6, None)
    assert (first.device, first.throttle, first.cpus_allowed, first.most_rss) == ("H100", {"hw_thermal": 0.5}, 4, 100)
    assert (second.name, second.clock_share, second.throttle, second.most_rss) == ("rank 1", 1.0, {}, 204)
    assert (third.device, third.utilisation, third.clock_share) == ("A100", None, 1.0), "of its own kind"
    (without,) = uses_of([_sample(step, cpus=None) for step in range(5)])
    assert (without.device, without.utilisation, without.clock_share, without.throttle) == (None, None, None, {})
    assert (without.cpus, without.most_cpus, without.power_limit_w) == (None, None, None)


def test_several_gpus_of_one_rank_are_told_apart() -> None:
    samples = [_sample(step, uuid=f"GPU-{gpu}", utilisation=0.5) for step in range(4) for gpu in (0, 1)]
    assert [use.name for use in uses_of([*samples, *(_sample(step, rank=1) for step in range(4))])] == [
        "GPU 0 of rank 0", "GPU 1 of rank 0", "rank 1",
    ]  # fmt: skip
    assert uses_of([]) == []


def _record(step: int, step_s: object = 0.5, wait_s: object = 0.1) -> dict[str, Any]:
    return {"step": step, "step_time_s": step_s, "data_wait_s": wait_s}


def test_the_pace_is_that_of_the_spans_after_the_first_of_each_attempt() -> None:
    assert pace_of([_record(10), _record(20), _record(40, 1.0, 0.0)], [0]) == Pace(30, 10 * 0.5 + 20 * 1.0, 1.0, 2)
    # The second attempt resumed at 30: its span up to 40 is cold, and so are its 10 steps after 30.
    resumed = [_record(10), _record(20), _record(40), _record(50)]
    assert pace_of(resumed, [0, 30]) == Pace(20, 10.0, 2.0, 2)
    evaluation = {"step": 20, "eval_loss": 1.0}
    assert pace_of([_record(10), evaluation, _record(20)], [0]) == Pace(10, 5.0, 1.0, 1)
    assert pace_of([_record(10), _record(20, 0.5, None)], [0]) == Pace(10, 5.0, 0.0, 1)
    for too_few in ([], [_record(10)], [_record(10), _record(20, 0.0)], [_record(10), _record(10)]):
        assert pace_of(too_few, [0]) is None


def test_a_share_of_waiting_is_at_most_the_whole_step() -> None:
    assert (Pace(10, 5.0, 1.0, 1).step_s, Pace(10, 5.0, 1.0, 1).wait_share) == (0.5, 0.2)
    assert Pace(10, 5.0, 6.0, 1).wait_share == 1.0


def test_attempts_without_an_end_have_not_worked_for_a_known_time() -> None:
    run = facts_of(attempts=2).run
    assert worked_s(run) == 200.0
    first, second = run.attempts
    open_ended = dataclasses.replace(second, end_time=None)
    set_back = dataclasses.replace(second, end_time=second.start_time - 1)
    for other in (open_ended, set_back):
        assert worked_s(dataclasses.replace(run, attempts=[first, other])) == 100.0


def test_the_mean_is_that_of_known_values() -> None:
    assert mean_of([1.0, None, 2.0]) == 1.5
    assert mean_of([None]) is mean_of([]) is None
    assert mean_of([0.0]) == 0.0


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (Gain(share=0.5), "up to 2x faster"), (Gain(share=0.5, is_bound=False), "about 2x faster"),
        (Gain(share=1.0), "up to 100x faster"), (Gain(share=0.3, of="GPUs"), "up to 30% fewer GPUs"),
        (Gain(share=1.0, of="host memory", is_bound=False), "about 99% less host memory"),
    ],
)  # fmt: skip
def test_a_gain_in_words(gain: Gain, text: str) -> None:
    assert str(gain) == text


_OPTIONAL = [each.name for each in dataclasses.fields(RankUse) if each.default is None]


@pytest.mark.parametrize("name", _OPTIONAL)
@pytest.mark.parametrize("words", [SMALL, SLURM, GPU], ids=["local", "slurm", "gpu"])
def test_a_figure_that_one_rank_does_not_have_keeps_no_rule_from_the_other_ranks(
    name: str, words: tuple[str, ...]
) -> None:
    known = rank(
        device="H100", utilisation=0.3, clock_share=0.9, power_limit_w=700.0, cpus=0.9, most_cpus=1.0, cpus_allowed=8,
        most_rss=1e9,
    )  # fmt: skip
    unknown = dataclasses.replace(known, name="rank 1", **{name: None})
    both = advice_of(facts_of(words, pace=waiting(0.3), ranks=[unknown, known]))
    assert {advice.rule for advice in both} <= {advice.rule for advice in advice_of(
        facts_of(words, pace=waiting(0.3), ranks=[known])
    )}  # fmt: skip


@pytest.mark.parametrize(("own_s", "share"), [(0.1, 0.5), (0.15, 1.0), (9.0, 1.0), (0.01, 0.0)])
def test_a_slow_rank_costs_at_most_a_whole_step(own_s: float, share: float) -> None:
    (rule,) = [rule for rule in RULES if rule.name == "straggler"]
    slow = dataclasses.replace(SLOW, own_s=own_s, others_s=0.05)
    (finding,) = rule.find(facts_of(stragglers=[slow], pace=Pace(100, 10.0, 0.0, 10)))
    assert finding.changes[0].gain.share == pytest.approx(share)


def _advised(run_id: str, share: float | None, state: RunState = RunState.COMPLETED) -> AdvisedRun:
    (first, *_) = advice_of(facts_of(pace=waiting(0.5)))
    advice = [] if share is None else [dataclasses.replace(first, gain=Gain(share=share))]
    return AdvisedRun(run_id, state, ["model=mlp", "data.num_workers=0"], advice)


def test_advice_that_several_runs_share_is_told_once_with_the_largest_gain() -> None:
    tuned = [_advised("a", 0.3), _advised("b", 0.6), _advised("c", None), _advised("d", 0.5)]
    (group,) = shared_advice(tuned)
    assert (group.run_ids, group.advice) == (["a", "b", "d"], tuned[1].advice[0])
    (line,) = sweep_lines(tuned)
    assert line == f"3 run(s), as a: {tuned[1].advice[0].line}"
    assert next_command_of_sweep(tuned, "s") == next_command(tuned[0], "s")
    assert next_command_of_sweep(tuned[2:3], "s") is None


def test_the_next_command_has_the_change_in_place_of_the_old_value() -> None:
    (advice,) = _advised("a", 0.5).advice
    change = " ".join(advice.set)
    assert advice.is_same_run
    assert next_command(_advised("a", 0.5), "s") == f"plan model=mlp {change} sweep_name=s-tuned"
    assert next_command(_advised("a", 0.5, RunState.RUNNING), "s") == f"plan model=mlp {change}"
    for state in (RunState.FAILED, RunState.CANCELLED):
        assert next_command(_advised("a", 0.5, state), "s") == f"retry a {change}"
    another = dataclasses.replace(advice, is_same_run=False)
    run = dataclasses.replace(_advised("a", 0.5, RunState.FAILED), advice=[another])
    assert next_command(run, "s") == f"plan model=mlp {change}"
    by_hand = dataclasses.replace(advice, set=(), do="do this")
    assert next_command(dataclasses.replace(run, advice=[by_hand]), "s") is None
    assert next_command(dataclasses.replace(run, command_line=[]), "s") is None
    assert next_command_of_sweep([dataclasses.replace(run, advice=[by_hand])], "s") == "advise a"
