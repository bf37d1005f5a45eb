"""What telemetry says of runs to a person: warnings in `status` and `why`, energy in `results`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.observe import telemetry
from hpc_trainer.observe.sampler import move_of
from hpc_trainer.observe.telemetry import Device, DeviceWarning, Host, Sample, Trouble, append_samples, write_warnings
from hpc_trainer.observe.telemetry_views import render_telemetry, telemetry_charts
from hpc_trainer.operate.results import result_table
from hpc_trainer.operate.why import explain
from hpc_trainer.record.journal import write_move
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    sweep = SweepOnDisk(
        tmp_path / "runs" / "sweep",
        make_specs(2, "cluster=slurm", "train.global_batch_size=50", "monitor.co2_g_per_kwh=400"),
    )
    sweep.submit()
    fake_slurm.answer("squeue", "500_0|RUNNING|n7|None|x\n")
    return sweep


def _warning(rank: int, trouble: Trouble) -> DeviceWarning:
    return DeviceWarning(
        rank=rank, trouble=trouble, node="n7", device="H100 GPU-a", detail="hw_thermal", since=1.0, last=2.0, seconds=9
    )


def test_a_gpu_that_is_too_hot_is_a_warning_while_the_run_works(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    sweep.beat(step=7, loss=0.5)
    assert read_status(sweep.paths).runs[0].warning is None
    sweep.run().telemetry.mkdir()
    found = [_warning(0, Trouble.slowed), _warning(3, Trouble.ecc)]
    for each in found:
        write_warnings(sweep.run(), 0, each.rank, [each])
    status = read_status(sweep.paths)
    run = status.runs[0]
    assert (run.state, run.warning) == (RunState.RUNNING, f"{found[0].text} (and 1 more: hpc-trainer why)")
    why = explain(status, run)
    assert [line for line in why.evidence if line.startswith("the GPU")] == [each.text for each in found]
    assert why.advice[-1].endswith("hardware.exclude=n7")
    assert "finite" not in why.verdict


def test_a_run_that_failed_shows_what_its_gpu_had(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    sweep.end(state=RunState.FAILED, cause="exception", error={"type": "RuntimeError", "message": "CUDA error"})
    sweep.run().telemetry.mkdir()
    write_warnings(sweep.run(), 0, 0, [_warning(0, Trouble.lost)])
    status = read_status(sweep.paths)
    assert status.runs[0].warning is None
    assert any("was lost by its driver" in line for line in explain(status, status.runs[0]).evidence)


def test_energy_of_all_attempts_and_ranks(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    sweep.beat(step=8, loss=0.5)
    paths = sweep.run()
    paths.telemetry.mkdir()
    for attempt, rank, joules in ((0, 0, 3.6e6), (0, 1, 1.8e6), (1, 0, 1.8e6)):
        for share in (0.0, 0.5, 1.0):
            device = Device(uuid=f"GPU-{rank}", energy_j=joules * share)
            sample = Sample(
                attempt=attempt, rank=rank, time=1e9, elapsed_s=share, node="n7", step=8, device=device,
                host=Host(energy_j=1e9),
            )  # fmt: skip
            append_samples(paths, [sample])
    known, unknown = result_table(read_status(sweep.paths)).rows
    assert (known["energy_kwh"], known["j_per_sample"], known["co2_g"]) == (2.0, 7.2e6 / (8 * 50), 800.0)
    assert not {"energy_kwh", "j_per_sample", "co2_g"} & unknown.keys()


def test_a_report_draws_each_rank_over_time(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    paths = sweep.run()
    paths.telemetry.mkdir()
    for rank in range(2):
        samples = [
            Sample(
                attempt=0, rank=rank, time=1e9 + 6 * number, elapsed_s=6.0 * number, node="n7", step=number,
                device=Device(uuid=f"GPU-{rank}<b>", temperature_c=50 + number % 2, power_w=300.0),
                host=Host(cpus=1.0),
            )
            for number in range(500)
        ]  # fmt: skip
        append_samples(paths, samples)
    charts = telemetry_charts(read_status(sweep.paths))
    assert [each.title for each in charts] == ["GPU temperature", "GPU power"]
    (first, _) = charts[0].lines
    assert first.name == "rank 0 GPU-0<b>"
    assert len(first.points) == 168  # three samples each, where the last of them stands, and the newest as it is
    assert first.points[0] == (pytest.approx(2 * 6 / 60), pytest.approx(50 + 1 / 3))
    assert first.points[1][0] == pytest.approx(5 * 6 / 60)
    page = render_telemetry(charts)
    assert page.count("<figure>") == 2
    assert "rank 1 GPU-1&lt;b&gt;" in page
    assert "<b>" not in page


def test_no_line_goes_through_the_time_between_two_attempts(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    paths = sweep.run()
    paths.telemetry.mkdir()
    for attempt, begin in enumerate((1e9, 1e9 + 600)):
        samples = [
            Sample(
                attempt=attempt, rank=0, time=begin + second, elapsed_s=float(second), node="n7", step=1, device=None,
                host=Host(cpus=1.0),
            )
            for second in range(2)
        ]  # fmt: skip
        append_samples(paths, samples)
    (chart,) = telemetry_charts(read_status(sweep.paths))
    assert [[minutes for minutes, _ in each.points] for each in chart.lines] == [
        [0.0, pytest.approx(1 / 60)], [10.0, pytest.approx(601 / 60)],
    ]  # fmt: skip
    assert {each.colour for each in chart.lines} == {0}
    assert render_telemetry([chart]).count("</svg>rank 0<") == 1


def test_a_report_of_runs_without_gpus_draws_their_hosts(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    assert telemetry_charts(read_status(sweep.paths)) == []
    assert render_telemetry([]) == ""
    paths = sweep.run()
    paths.telemetry.mkdir()
    host = Sample(
        attempt=0,
        rank=0,
        time=1e9,
        elapsed_s=0.0,
        node="n7",
        step=0,
        device=None,
        host=Host(cpus=1.0, rss_bytes=2 * 10**9),
    )
    append_samples(paths, [host])
    charts = telemetry_charts(read_status(sweep.paths))
    assert [(each.title, each.lines[0].points) for each in charts] == [
        ("Busy cores", [(0.0, 1.0)]), ("Resident memory", [(0.0, 2.0)]),
    ]  # fmt: skip


def test_where_no_energy_can_be_known_one_file_of_an_attempt_is_read(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sweep.run()
    paths.telemetry.mkdir(parents=True)
    for attempt, rank, host in ((0, 0, Host(cpus=1.0)), (0, 1, Host(energy_j=9.0)), (1, 0, Host(energy_j=2.0)),
                                (1, 1, Host()), (1, 2, Host(energy_j=3.0))):  # fmt: skip
        sample = Sample(
            attempt=attempt, rank=rank, time=1e9, elapsed_s=0.0, node="n7", step=0, device=None, host=host,
        )  # fmt: skip
        append_samples(paths, [sample])
    read: list[str] = []
    ends = telemetry.read_ends

    def counted(path: str, faults: Faults | None, *, last: int) -> tuple[bytes, bytes]:
        read.append(path)
        return ends(path, faults, last=last)

    monkeypatch.setattr(telemetry, "read_ends", counted)
    assert telemetry.newest_energy_j(paths) == 5.0
    assert len(read) == 1 + 3
    paths.telemetry_file(2, 0).write_text("no json\n")
    sample = Sample(attempt=2, rank=1, time=1e9, elapsed_s=0.0, node="n7", step=0, device=None, host=Host(energy_j=4.0))
    append_samples(paths, [sample])
    assert telemetry.newest_energy_j(paths) == 9.0, "a damaged file says nothing of the other ranks"


def test_a_run_that_leaves_a_node_says_which_and_why(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.start(resumed=0)
    sweep.run().telemetry.mkdir()
    move = move_of(_warning(3, Trouble.slowed))
    write_move(sweep.run(), 0, move)
    sweep.end(state=RunState.REQUEUED, cause=move.cause, action="requeue", saved_step=7, signal="DEVICE")
    fake_slurm.answer("squeue", "500_0|PENDING||BeginTime|x\n")
    status = read_status(sweep.paths)
    run = status.runs[0]
    assert (run.state, run.cause) == (RunState.REQUEUED, "overheated")
    assert run.warning == f"overheated, it leaves n7: {_warning(3, Trouble.slowed).text}"
    why = explain(status, run)
    assert f"attempt 0: {move.text}" in why.evidence
    assert [line for line in why.timeline if line.endswith(f"attempt 0: {move.text}")]
    assert why.advice[-1] == "tell your centre about n7"
