"""What a person sees who watches runs: on a real pseudo-terminal of any size, and in a pipe as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.cli import live
from hpc_trainer.cli.live import table_of
from hpc_trainer.observe.telemetry_views import GpuNow, gpu_now
from hpc_trainer.operate import waits
from hpc_trainer.record.files import append_lines, write_json
from hpc_trainer.record.reading import read_json
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.cli.screens import Screen
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

GB = 10**9
FIGURES = {
    "loss": 1.234567, "lr": 3e-4, "steps_per_s": 42.7, "step_time_s": 0.0234, "step_time_p95_s": 0.0251,
    "samples_per_s": 512.0, "tokens_per_s": 482_123.0, "data_wait_share": 0.021, "mfu": 0.42,
}  # fmt: skip
DEVICE = {
    "uuid": "GPU-1", "name": "NVIDIA H100", "utilisation": 0.9, "memory_used": 61_200_000_000,
    "memory_total": 80 * GB, "temperature_c": 64.0, "power_w": 512.0,
}  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """Three runs on Slurm: one at work on two GPUs, one at work without, one that waits."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(3, "cluster=slurm"))
    sweep.submit()
    rows = ("500_0|RUNNING|n1|None|x", "500_1|RUNNING|n1|None|x", "500_2|PENDING||Priority|x")
    fake_slurm.answer("squeue", "".join(f"{row}\n" for row in rows))
    fake_slurm.answer("sacct", "")
    for index in (0, 1):
        sweep.start(index)
        _beat(sweep, index, 50)
    folder = sweep.run(0).folder / "telemetry"
    folder.mkdir()
    for rank, used in ((0, 61_200_000_000), (1, 10 * GB)):
        device = {**DEVICE, "memory_used": used, "utilisation": 0.9 + 0.1 * rank, "temperature_c": 64.0 - rank}
        line = {"time": 1.0, "elapsed_s": 5.0, "node": "n1", "step": 50, "device": device, "host": None}
        append_lines(folder / f"attempt-000.rank-{rank}.jsonl", [{**line, "device": None}, line])
    return sweep


def _beat(sweep: SweepOnDisk, index: int, step: int, **more: object) -> None:
    sweep.beat(index, step=step, **FIGURES)
    beat = {**(read_json(sweep.run(index).heartbeat) or {}), **more}
    write_json(sweep.run(index).heartbeat, beat)


def _runs(sweep: SweepOnDisk) -> list[RunStatus]:
    return read_status(sweep.paths).runs


def _lines(runs: list[RunStatus], gpus: dict[str, GpuNow] | None = None, *, width: int, height: int = 24) -> list[str]:
    lines = table_of(
        runs, {run_id: gpu.figures() for run_id, gpu in (gpus or {}).items()}, width=width, height=height
    ).plain.split("\n")
    assert max(map(len, lines)) <= width
    assert len(lines) < max(height, 3)
    return lines


def test_one_run_shows_everything(sweep: SweepOnDisk) -> None:
    run = _runs(sweep)[0]
    gpu = gpu_now(sweep.run(0), 0)
    assert gpu == GpuNow(
        num_gpus=2, utilisation=0.95, memory_used=61_200_000_000, memory_total=80 * GB, temperature_c=64.0,
        power_w=1024.0,
    )  # fmt: skip
    head, progress, figures, gpus = _lines([run], {run.run_id: gpu}, width=120)
    assert head == f"{run.run_id}  RUNNING"
    assert progress.endswith(f"step 50/{run.num_steps}  {50 / run.num_steps:.0%}  ETA 30s")
    assert figures == ("loss 1.235  lr 0.0003  482k tokens/s  a step 23.4 ms (p95 25.1 ms)  data wait 2%  mfu 42%")
    assert gpus == "2 GPUs 95%  61.2 of 80 GB  64 °C  1.02kW"


def test_mfu_of_a_gpu_that_nobody_knows_is_unknown(sweep: SweepOnDisk) -> None:
    sweep.beat(0, step=7, steps_per_s=3.0)
    run, gpu = _runs(sweep)[0], gpu_now(sweep.run(0), 0)
    assert gpu is not None
    assert _lines([run], {run.run_id: gpu}, width=80)[2] == "3 steps/s  mfu unknown"


def test_what_nobody_knows_is_left_out(sweep: SweepOnDisk) -> None:
    sweep.beat(1, step=7)
    run = _runs(sweep)[1]
    assert gpu_now(sweep.run(1), 0) is None
    text = "\n".join(_lines([run], width=80))
    for word in ("GPU", "mfu", "loss", "data wait", "p95"):
        assert word not in text
    assert "2 steps/s" in text


@pytest.mark.parametrize("width", [20, 40, 80, 120, 250])
def test_no_line_is_wider_than_the_terminal(width: int, sweep: SweepOnDisk) -> None:
    runs, gpu = _runs(sweep), gpu_now(sweep.run(0), 0)
    assert gpu is not None
    gpus = {runs[0].run_id: gpu}
    many = _lines(runs, gpus, width=width)
    assert len(many) == 3
    _lines(runs[:1], gpus, width=width)
    if width >= 80:
        for line in many[:2]:
            for word in ("RUNNING", f"50/{runs[0].num_steps}", "ETA 30s", "loss 1.235", "482k tokens/s"):
                assert word in line, "what is essential"
        assert "PENDING" in many[2]
    if width == 250:
        assert [run.run_id for run in runs] == [line.split()[0] for line in many]
        assert "2 GPUs 95%  mfu 42%  61.2 of 80 GB  a step 23.4 ms  64 °C  1.02kW  lr 0.0003" in many[0]
        assert "GPU" not in many[1]


@pytest.mark.parametrize("width", [40, 80, 100, 140])
def test_a_run_s_name_is_cut_alike_at_every_look(width: int, sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Whatever else a line says, as more steps, states with other names, figures that come and go."""
    first = _lines(_runs(sweep), width=width)
    for index, step in ((0, 7), (1, 150)):
        sweep.beat(index, step=step)
    second = _lines(_runs(sweep), width=width)
    fake_slurm.answer("squeue", "500_1|RUNNING|n1|None|x\n500_2|PENDING||Priority|x\n")
    sweep.end(0, state=RunState.FAILED, cause="exception", error={"type": "ValueError", "message": "words " * 20})
    third = _lines(_runs(sweep), width=width)
    sweep.end(1, state=RunState.OUT_OF_MEMORY, cause="out_of_memory")
    fourth = _lines(_runs(sweep), width=width)
    names = [[line.split()[0] for line in look] for look in (first, second, third, fourth)]
    assert names[0] == names[1] == names[2] == names[3]
    assert all(name.endswith(spec.run_id[-10:]) for name, spec in zip(names[0], sweep.specs, strict=True))


def test_what_runs_differ_in_is_shown_where_it_fits(sweep: SweepOnDisk) -> None:
    runs = _runs(sweep)
    axes = {run.run_id: {"optim.lr": "1e-3", "seed": str(place)} for place, run in enumerate(runs)}

    def shown(width: int) -> list[str]:
        return table_of(runs, {}, width=width, height=24, axes=axes).plain.split("\n")

    assert all(f"  optim.lr=1e-3 seed={place}  " in line for place, line in enumerate(shown(140)))
    assert all("ETA 30s" in line and "loss 1.235" in line for line in shown(140)[:2])
    assert "seed" not in "".join(shown(80))


def test_of_more_runs_than_lines_those_at_work_are_shown(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(30, "cluster=slurm"))
    sweep.submit()
    at_work = (3, 20, 29)
    fake_slurm.answer(
        "squeue", "".join(f"500_{n}|{'RUNNING|n1' if n in at_work else 'PENDING|'}|None|x\n" for n in range(30))
    )
    for index in at_work:
        sweep.start(index)
        sweep.beat(index, step=5)
    lines = _lines(_runs(sweep), width=80, height=12)
    assert len(lines) == 11
    assert sum("RUNNING" in line for line in lines[:-1]) == len(at_work)
    assert lines[-1] == "and 20 more: 20 PENDING"


def test_small_losses_have_digits_in_a_table_of_many(sweep: SweepOnDisk) -> None:
    sweep.beat(1, step=50, loss=4.2e-5)
    assert "loss 4.2e-05" in _lines(_runs(sweep), width=80)[1]


def test_remarks_and_ends_are_shown(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    slow = "rank 1 on n1 takes 1.8 times as long as the others"
    _beat(sweep, 0, 60, remarks={"stragglers": slow})
    sweep.end(1, state=RunState.FAILED, cause="exception", error={"type": "ValueError", "message": "a\x1b[2J\nb"})
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n500_2|PENDING||Priority|x\n")
    runs = _runs(sweep)
    assert _lines(runs[:1], width=120)[-1] == slow
    failed = next(line for line in _lines(runs, width=160) if "FAILED" in line)
    assert "ValueError: a\\x1b[2J" in failed


def test_a_run_whose_worker_has_told_nothing_yet_is_watched(
    sweep: SweepOnDisk, on_terminal: Callable[[int], Callable[[], str]], monkeypatch: pytest.MonkeyPatch,
    fake_slurm: FakeSlurm,
) -> None:  # fmt: skip
    """For Slurm it runs while it imports torch: right after every submit."""
    fake_slurm.answer("squeue", "".join(f"500_{index}|RUNNING|n1|None|x\n" for index in range(3)))

    def sleep(_: object) -> None:
        for index in range(3):
            sweep.start(index) if index == 2 else None
            sweep.done(index, eval_accuracy=0.5)

    monkeypatch.setattr(waits, "_sleep", sleep)
    close = on_terminal(100)
    live.watch(sweep.paths, {spec.run_id for spec in sweep.specs})
    assert close().count("RUNNING") >= 3


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_shows_the_newest_state_in_place(
    width: int, sweep: SweepOnDisk, on_terminal: Callable[[int], Callable[[], str]], monkeypatch: pytest.MonkeyPatch,
    fake_slurm: FakeSlurm,
) -> None:  # fmt: skip
    looks = 0

    def sleep(_: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            _beat(sweep, 0, 60)
        if looks == 30:
            for index in range(3):
                sweep.start(index) if index == 2 else None
                sweep.done(index, eval_accuracy=0.5)

    monkeypatch.setattr(waits, "_sleep", sleep)
    close = on_terminal(width)
    live.watch(sweep.paths, {spec.run_id for spec in sweep.specs})
    got = close()
    screen = Screen(width)
    screen.feed(got)
    assert screen.num_wraps == 0
    shown = [line for line in screen.lines if line.strip()]
    assert len(shown) == 3, "earlier looks are drawn over"
    assert all("COMPLETED" in line and line.rstrip().endswith("accuracy 0.5000") for line in shown)
    assert looks == 30
    assert got.count("PENDING") == 2, "nothing new is nothing drawn"
    assert "60/" in got


def test_a_pipe_gets_lines(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(_: object) -> None:
        for index in range(3):
            sweep.done(index)

    sweep.beat(1, step=50, loss=4.2e-5)
    monkeypatch.setattr(waits, "_sleep", sleep)
    live.watch(sweep.paths, {spec.run_id for spec in sweep.specs})
    first, second, third, *ends = capsys.readouterr().out.splitlines()
    ids, steps = [spec.run_id for spec in sweep.specs], sweep.specs[0].num_steps
    assert first == f"{ids[0]}  RUNNING  50/{steps}  ETA 30s  loss 1.235"
    assert second == f"{ids[1]}  RUNNING  50/{steps}  ETA 30s  loss 4.2e-05"
    assert third.startswith(f"{ids[2]}  PENDING")
    assert [line.split()[:2] for line in ends] == [[run_id, "COMPLETED"] for run_id in ids]


def test_a_metric_that_is_null_is_not_shown(sweep: SweepOnDisk) -> None:
    beat = read_json(sweep.run(0).heartbeat) or {}
    write_json(sweep.run(0).heartbeat, {**beat, "metrics": dict.fromkeys(("loss", "lr"))})
    runs = read_status(sweep.paths).runs
    for shown in (runs[:1], runs):
        text = table_of(shown, {}, width=160, height=20).plain.splitlines()[0 if len(shown) > 1 else slice(None)]
        assert "RUNNING" in str(text)
        assert "loss" not in str(text)
