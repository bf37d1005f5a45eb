"""`plan --fit`: which of several shapes would end soonest, by Slurm's starts and the speeds of earlier runs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_trainer.cli.show_plan import fit_json, print_fit
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.fit import Fit, _share, duration, find_fit, moment
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.grids import plan_grid
from hpc_trainer.record.ledger import Kind, Spent, append_spent, spent_so_far
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.slurm.queue import read_starts
from tests.unit.launch.grids import submit
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

WORDS = ("cluster=slurm", "experiment=digits", "train.num_steps=1000", "train.eval_every_steps=20")
SHAPES = ("hardware=gpu_x1,gpu_x2",)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(folder))
    return folder


def _starts(fake: FakeSlurm, **after_s: float) -> dict[str, float]:
    """sbatch --test-only answers by the GPUs that a script asks for: `one=60` starts it in a minute."""
    now = int(time.time())
    starts = {gpus: now + after_s[gpus] for gpus in after_s}
    lines = "\n".join(
        f'*"gpus-per-node={number}"*) at={time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(starts[name]))} ;;'
        for name, number in (("one", 1), ("two", 2))
        if name in starts
    )
    script = fake.bin / "sbatch"
    script.write_text(
        script.read_text().replace(
            'if [ "$name" = test-only ]; then\n    echo',
            f'if [ "$name" = test-only ]; then\n case "$(cat)" in {lines}\n *) exit 0 ;; esac\n'
            '    echo "sbatch: Job 1 to start at $at using 1 processors on nodes n1 in partition main" >&2\n'
            "    exit 0\n    echo",
        )
    )
    return starts


def _measured(
    runs: Path, name: str, spec: RunSpec, *, step_s: float, start_s: float = 20.0, save_s: float | None = 4.0
) -> SweepOnDisk:
    """An earlier run of `spec` that did 100 steps."""
    sweep = SweepOnDisk(runs / name, [spec])
    sweep.submit()
    sweep.start()
    sweep.beat(step=100)
    beat = json.loads(sweep.run().heartbeat.read_text())
    sweep.run().heartbeat.write_text(json.dumps(beat | ({} if save_s is None else {"save_s": save_s})))
    # An evaluation a second long at each 20th step, which a step's share below has to count with 0.05 s.
    step_s -= 0.05 if spec.config["train"]["eval_every_steps"] == 20 else 0.0
    seconds = [("imports", start_s), ("step", 90 * step_s), ("data_wait", 10 * step_s), ("evaluation", 5.0)]
    append_spent(sweep.run(), 0, 100, spent_so_far(seconds, steps_done=100))
    return sweep


def _spec(*words: str) -> RunSpec:
    (spec,) = freeze_grid([*WORDS, *words]).specs
    return spec


def _fit(runs: Path, *words: str) -> Fit:
    return find_fit(plan_grid(freeze_grid([*WORDS, *words])), runs)


def test_a_later_start_that_ends_sooner_is_best_and_a_line_says_why(
    runs: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = _starts(fake_slurm, one=0, two=600)
    # Measured with another seed, learning rate and length: none of these changes how long a step takes.
    _measured(runs, "one", _spec("hardware=gpu_x1", "seed=5", "optim.lr=0.5", "train.num_steps=100"), step_s=3.0)
    _measured(runs, "two", _spec("hardware=gpu_x2"), step_s=1.0)
    fake_slurm.forget_calls()
    fit = _fit(runs, *SHAPES, "sweep_name=new")
    best, second = fit.candidates
    assert (best.hardware, best.segments, fit.by_end) == ("gpu_x2", 1, True)
    assert best.end == pytest.approx(starts["two"] + 20 + 1000 * 1.0 + 4)
    assert second.end == pytest.approx(starts["one"] + 20 + 1000 * 3.0 + 4)
    assert re.fullmatch(
        r"gpu_x2 ends soonest, (at|on) .*: it starts (at|on) .* and needs 17 min for 1000 steps of 1 s, by two/\S+; "
        r"gpu_x1 is 23 min later\.",
        fit.why,
    ), fit.why
    calls = fake_slurm.calls("test-only") + [call for call in fake_slurm.calls("squeue") if "--start" in call]
    assert len(calls) == 2, "one for each candidate"
    print_fit(fit)
    shown = capsys.readouterr().out
    assert shown.index("gpu_x2") < shown.index("gpu_x1")
    assert fit_json(fit)["candidates"][0]["speed"]["step_s"] == pytest.approx(1.0)


def test_a_list_is_compared_too(runs: Path, fake_slurm: FakeSlurm) -> None:
    _starts(fake_slurm, one=300, two=0)
    fit = _fit(runs, "hardware=first:gpu_x1,gpu_x2", "parallel.elastic=true")
    assert [candidate.hardware for candidate in fit.candidates] == ["gpu_x2", "gpu_x1"]


def test_without_a_speed_starts_are_compared_and_it_says_so(runs: Path, fake_slurm: FakeSlurm) -> None:
    _starts(fake_slurm, one=0, two=600)
    _measured(runs, "two", _spec("hardware=gpu_x2"), step_s=0.001)
    _measured(runs, "other", _spec("hardware=gpu_x1", "model=mlp"), step_s=0.001)
    fit = _fit(runs, *SHAPES)
    assert ([candidate.hardware for candidate in fit.candidates], fit.by_end) == (["gpu_x1", "gpu_x2"], False)
    assert fit.why == (
        "gpu_x1 starts soonest, now; gpu_x2 is 10 min later. Ends are not compared: the speed on gpu_x1 is not known, "
        "as no run of this training has been measured there."
    )


def test_a_run_longer_than_the_limit_is_planned_in_attempts(runs: Path, fake_slurm: FakeSlurm) -> None:
    _starts(fake_slurm, one=0, two=0)
    _measured(runs, "one", _spec("hardware=gpu_x1"), step_s=10.0, start_s=36.0, save_s=24.0)
    fit = _fit(runs, "hardware=gpu_x1", "hardware.time_limit_min=60", "sweep_name=new")
    (only,) = fit.candidates
    # Of 3600 s: 120 s of warning, 60 s by which it may come early, 36 s to start, 24 s to save: 3360 s for 10,000 s.
    assert (only.segments, only.duration_s) == (3, pytest.approx(10_000 + 3 * 60))
    waits = "if each restart waits 0 s, as a job waits now, because no restart has been measured there"
    assert f"in 3 attempts of at most 60 min, {waits}" in fit.why
    (short,) = _fit(runs, "hardware=gpu_x1", "hardware.time_limit_min=1", "sweep_name=new").candidates
    assert (short.end, "leaves no time between a start and a save" in str(short.note)) == (None, True)


def test_waits_between_attempts_count_as_measured_else_as_a_job_waits_now(runs: Path, fake_slurm: FakeSlurm) -> None:
    """Ten short attempts in a queue of hours end later than a long one, though they need the same time."""
    _starts(fake_slurm, one=3600)
    busy = _spec("hardware=gpu_x1", "hardware.partition=busy")
    sweep = _measured(runs, "one", busy, step_s=10.0, start_s=36.0, save_s=24.0)
    words = ("hardware=gpu_x1", "hardware.time_limit_min=60", "sweep_name=new")
    (only,) = _fit(runs, *words, "hardware.partition=busy").candidates
    assert only.wait_now_s == pytest.approx(3600, abs=300), "the start stands still while the test runs"
    assert only.waits_s == pytest.approx(2 * only.wait_now_s)
    assert only.end == pytest.approx((only.start or 0) + 10_000 + 3 * 60 + only.waits_s)

    sweep.end(state=RunState.PREEMPTED, cause="timeout", step=100, action="requeue", age_s=600.0)
    sweep.start(attempt=1)
    fit = _fit(runs, *words, "hardware.partition=busy")
    (only,) = fit.candidates
    assert only.waits_s == pytest.approx(2 * 600, abs=250)
    assert re.search(r"if each restart waits 1\d min, as earlier restarts did", fit.why)


def test_a_queue_that_does_not_answer_is_told(runs: Path, fake_slurm: FakeSlurm) -> None:
    silent = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    (fake_slurm.bin / "sbatch").write_text(f"#!/bin/sh\necho '{silent}' >&2\nexit 1\n")
    fit = _fit(runs, "hardware=gpu_x1")
    (only,) = fit.candidates
    assert (only.start, only.end, fit.why) == (None, None, "Slurm names a start for none of them.")
    assert "sbatch --test-only did not answer" in str(only.note)
    assert "Socket timed out" in str(only.note)


def test_what_is_not_known_of_a_segment_is_said(runs: Path, fake_slurm: FakeSlurm) -> None:
    _starts(fake_slurm, one=0)
    _measured(runs, "one", _spec("hardware=gpu_x1"), step_s=1.0, save_s=None)
    assert "(the time to save is not known, and not counted)" in _fit(runs, "hardware=gpu_x1", "sweep_name=new").why


def test_an_interrupted_run_has_fewer_steps_left_and_a_waiting_one_its_expected_start(
    runs: Path, fake_slurm: FakeSlurm
) -> None:
    grid = freeze_grid([*WORDS, "hardware=gpu_x1", "sweep_name=sweep", "seed=0,1"])
    submit(grid)
    start = int(time.time()) + 900
    fake_slurm.forget_calls()
    script = fake_slurm.bin / "squeue"
    answer = (
        f'case "$*" in *--start*) printf "JOBID|START_TIME|end\\n101_0|{start}|end\\n101_1|N/A|end\\n"; exit ;; esac\n'
    )
    script.write_text(script.read_text().replace('\necho "JOBID', f'\n{answer}echo "JOBID', 1))
    fit = find_fit(plan_grid(grid), runs)
    assert [(job.job_id, job.start) for job in fit.waiting] == [("101_0", start), ("101_1", None)]
    assert fit.candidates == ()
    assert len([call for call in fake_slurm.calls("squeue") if "--start" in call]) == 1, "for all of them"
    assert read_starts(["101_0"]) == {"101_0": start}


def test_a_shape_that_cannot_run_is_last_and_says_why(runs: Path, fake_slurm: FakeSlurm) -> None:
    _starts(fake_slurm, one=0, two=0)
    fake_slurm.answer("scontrol", "PartitionName=main Default=YES MaxTime=01:00:00 TotalNodes=1\n")
    fake_slurm.forget_calls()
    best, other = _fit(runs, "hardware=gpu_x1", "hardware.partition=first:maln,main").candidates
    assert (best.shape.partition, best.note, other.start) == ("main", None, None)
    assert "Did you mean main?" in str(other.note)
    assert len(fake_slurm.calls("test-only")) == 1, "sbatch is asked about what it could accept"


@pytest.mark.usefixtures("no_slurm")
def test_without_slurm_it_is_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match="choose a cluster"):
        find_fit(plan_grid(freeze_grid(["experiment=digits"])), runs)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (40, "40 s"), (720, "12 min"), (18_720, "5 h 12 min"), (273_600, "3 d 4 h"), (59.6, "60 s"), (60, "1 min"),
        (3_569, "59 min"), (3_571, "1 h 0 min"), (86_340, "23 h 59 min"), (86_400, "1 d 0 h"), (90_000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_moment_is_told_with_its_day_unless_that_is_today(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.mktime((2026, 11, 27, 12, 0, 0, 0, 0, -1))
    fixed = SimpleNamespace(
        time=lambda: now, strftime=time.strftime, localtime=lambda seconds=now: time.localtime(seconds)
    )
    monkeypatch.setattr("hpc_trainer.launch.fit.time", fixed)
    assert [moment(each) for each in (None, now - 60, now + 1, now + 60, now + 86_400, now + 31 * 86_400)] == [
        "-", "now", "now", "at 12:01", "on 2026-11-28 at 12:00", "on 2026-12-28 at 12:00",
    ]  # fmt: skip


def test_of_two_that_end_at_once_the_one_with_fewer_gpu_hours_is_best(runs: Path, fake_slurm: FakeSlurm) -> None:
    _starts(fake_slurm, one=600, two=600)
    for name, shape in (("one", "gpu_x1"), ("two", "gpu_x2")):
        _measured(runs, name, _spec(f"hardware={shape}"), step_s=1.0)
    fit = _fit(runs, "hardware=gpu_x2,gpu_x1", "sweep_name=new")
    assert [candidate.hardware for candidate in fit.candidates] == ["gpu_x1", "gpu_x2"]
    assert fit.why.endswith(", as soon as gpu_x2, and takes fewer GPU-hours.")


def test_the_speed_of_several_runs_is_their_median(runs: Path, fake_slurm: FakeSlurm) -> None:
    _starts(fake_slurm, one=0)
    for number, (step_s, save_s) in enumerate(((1.0, None), (2.0, 3.0), (9.0, 5.0))):
        spec = _spec("hardware=gpu_x1", f"seed={number}")
        _measured(runs, f"s{number}", spec, step_s=step_s, start_s=10.0 * step_s, save_s=save_s)
    speed = _fit(runs, "hardware=gpu_x1", "sweep_name=new").candidates[0].speed
    assert speed is not None
    assert (speed.step_s, speed.start_s, speed.save_s) == (pytest.approx(2.0), pytest.approx(20.0), 4.0)
    assert {name.partition("/")[0] for name in speed.runs} == {"s0", "s1", "s2"}


def test_a_run_without_a_ledger_is_as_fast_as_its_heartbeat_says(runs: Path, fake_slurm: FakeSlurm) -> None:
    _starts(fake_slurm, one=0)
    sweep = SweepOnDisk(runs / "one", [_spec("hardware=gpu_x1")])
    sweep.submit()
    sweep.start()
    sweep.beat(step=100)  # two steps a second
    few = spent_so_far([("step", 4 * 7.0)], steps_done=4)
    append_spent(sweep.run(), 0, 4, few)  # fewer steps than tell a speed
    (only,) = _fit(runs, "hardware=gpu_x1", "sweep_name=new").candidates
    assert only.speed is not None
    assert (only.speed.step_s, only.speed.start_s) == (0.5, None)
    append_spent(sweep.run(), 1, 5, spent_so_far([("step", 5 * 7.0)], steps_done=5))
    (only,) = _fit(runs, "hardware=gpu_x1", "sweep_name=new").candidates
    assert only.speed is not None
    assert only.speed.step_s == pytest.approx(7.0)


def test_an_event_that_comes_every_few_steps_is_shared_among_them() -> None:
    """A short run has one too, at its end."""
    spent = Spent(attempt=0, time=0.0, step=100, steps_done=100, seconds={"evaluation": 6.0})
    shares = [_share(spent, Kind.evaluation, every) for every in (None, 0, 50, 40, 100, 300)]
    assert shares == [0.0, 0.0, 6 / 2 / 50, 6 / 3 / 40, 6 / 100, 6 / 300]
    assert _share(spent, Kind.save_stall, 50) == 0.0


def test_a_run_of_unknown_speed_hides_the_end_of_its_shape(runs: Path, fake_slurm: FakeSlurm) -> None:
    """The longest run decides, and nobody knows that it is not this one."""
    _starts(fake_slurm, one=0)
    _measured(runs, "one", _spec("hardware=gpu_x1", "model=mlp"), step_s=5.0)
    for models in ("mlp,cnn", "cnn,mlp"):
        (only,) = _fit(runs, "hardware=gpu_x1", f"model={models}", "sweep_name=new").candidates
        assert (only.num_runs, only.speed, only.end) == (2, None, None)
        assert only.run_id.startswith("cnn")
    (only,) = _fit(runs, "hardware=gpu_x1", "model=mlp", "train.num_steps=100,1000", "sweep_name=new").candidates
    assert (only.num_runs, only.steps) == (2, 1000)
