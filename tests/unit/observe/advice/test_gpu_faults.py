"""Faults of GPUs, planted in files as runs write them: telemetry and memory.json, by their own writers. No GPU is here.

What the samples say is made up; the format, and all that reads it, is real.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.observe.advice import Advice, advise_runs
from hpc_trainer.observe.facts import uses_of
from hpc_trainer.observe.telemetry import Device, Host, Sample, append_samples, newest_of_ranks
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_spec
from tests.unit.record.sweeps import SweepOnDisk

pytestmark = pytest.mark.usefixtures("no_slurm")
GPT = ("experiment=gpt_bytes", "cluster=slurm", "precision=bf16", "hardware.gpu_type=a100")
ONE, EIGHT = (*GPT, "hardware=gpu_x1"), (*GPT, "hardware=gpu_x8")
GB = 10**9


def _device(rank: int, **known: Any) -> Device:
    """A GPU that works hard, at its power limit, as healthy ones do."""
    usual: dict[str, Any] = {
        "uuid": f"GPU-{rank}", "name": "NVIDIA A100-SXM4-80GB", "utilisation": 0.97, "memory_used": 60 * GB,
        "memory_total": 80 * GB, "temperature_c": 61.0, "power_w": 390.0, "power_limit_w": 400.0, "sm_clock_mhz": 1290,
        "throttle": ("power_cap",),
    }  # fmt: skip
    return Device(**{**usual, **known})


def _plant(paths: RunPaths, ranks: int = 1, **of_rank: Callable[[int, int], Any]) -> None:
    """Sixty samples of each rank; `of_rank`: name of a figure -> its value by (rank, number of the sample)."""
    for rank in range(ranks):
        samples = [
            Sample(
                attempt=0, rank=rank, time=1e9 + 5 * number, elapsed_s=5.0 * number, node=f"n{rank // 8}", step=number,
                device=_device(
                    rank,
                    # In the first moment of a run nothing holds the clock back yet.
                    **({"sm_clock_mhz": 1410, "throttle": ()} if number < 3 else {})
                    | {key: value(rank, number) for key, value in of_rank.items()},
                ),
                host=Host(cpus=1.2, cpus_allowed=2.0, rss_bytes=2 * GB),
            )
            for number in range(60)
        ]  # fmt: skip
        append_samples(paths, samples)


def _memory(paths: RunPaths, activations: float, others: float, limit: float = 80.0) -> None:
    """As features/memory_report writes it."""
    write_json(paths.memory, {
        "weights": others * GB / 4, "gradients": others * GB / 4, "optimizer": others * GB / 2, "average": 0,
        "activations": activations * GB, "cache": 0, "fragmentation": 0.02, "host_peak": 2 * GB,
        "peak": (activations + others) * GB, "limit": limit * GB, "device": "NVIDIA A100-SXM4-80GB",
        "micro_batch_size": 8, "step": 10, "attempt": 0,
    })  # fmt: skip


def _run(tmp_path: Path, words: tuple[str, ...], plant: Callable[[RunPaths], None], wait: float = 0.01) -> list[Advice]:
    """The advice to a complete run of 200 steps of 0.3 s, each of which waited for its batch so long a share."""
    sweep = SweepOnDisk(tmp_path / "runs" / "s", [make_spec(*words)])
    sweep.start(executor="slurm", resumed=0)
    paths = sweep.run()
    (paths.folder / "telemetry").mkdir()
    lines = [{"step": step, "step_time_s": 0.3, "data_wait_s": 0.3 * wait} for step in range(10, 210, 10)]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plant(paths)
    sweep.end(state=RunState.COMPLETED, cause="done")
    sweep.done(eval_loss=0.5)
    status = read_status(sweep.paths, is_look=True)
    ((tuned,), notes) = advise_runs(status, [*status.specs])
    assert notes == []
    return list(tuned.advice)


BATCH = ("train.global_batch_size=256", "train.micro_batch_size=8")
FAULTS: list[tuple[str, tuple[str, ...], Callable[[RunPaths], None], str]] = [
    ("idle-ranks", ("train.command='sleep 9'", "cluster=slurm", "hardware=gpu_x8"),
     lambda paths: _plant(paths, 8, utilisation=lambda rank, _: 0.9 if rank < 3 else 0.0),
     "asked for 8 GPUs, used 3: nothing was done by rank 3, rank 4, rank 5, rank 6, rank 7. hardware.gpus_per_node=3"),
    ("host-bound", ONE, lambda paths: _plant(paths, utilisation=lambda _, number: 0.2 + 0.1 * (number % 3)),
     "train.compile=true train.compile_mode=reduce_overhead: up to 3.31x faster"),
    ("precision", (*ONE, "precision=fp32"), _plant, "computes in fp32 on a100, which has bf16. precision=bf16"),
    ("micro-batch", (*ONE, *BATCH),
     lambda paths: (_memory(paths, 4, 8), _plant(paths, utilisation=lambda _, number: 0.6))[1],
     "train.micro_batch_size=64 train.grad_accum_steps=4"),
    ("recompute", (*ONE, "train.recompute=full"), lambda paths: (_memory(paths, 12, 8), _plant(paths))[1],
     "train.recompute=none: about 1.33x faster"),
    ("held-back", EIGHT,
     lambda paths: _plant(paths, 8,
                          throttle=lambda rank, _: ("hw_thermal",) if rank == 5 else ("power_cap",),
                          sm_clock_mhz=lambda rank, _: 705 if rank == 5 else 1410),
     "the GPU of rank 5 on n0 is held back by heat or its power supply 100% of the time, and its clock at 50% of its "
     "highest. hardware.exclude=n0: up to 2x faster"),
    ("held-back", ONE, lambda paths: _plant(paths, power_limit_w=lambda *_: 150.0,
                                            sm_clock_mhz=lambda _, number: 1410 if number < 3 else 600),
     "at its power limit of 150 W"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "words", "plant", "said"), FAULTS, ids=[f"{fault[0]}-{i}" for i, fault in enumerate(FAULTS)]
)
def test_a_planted_fault_of_a_gpu_is_named(
    tmp_path: Path, rule: str, words: tuple[str, ...], plant: Callable[[RunPaths], None], said: str
) -> None:
    (found,) = _run(tmp_path, words, plant)
    assert found.rule == rule
    assert said in found.line


def test_a_gpu_that_waits_for_data_wants_more_workers(tmp_path: Path) -> None:
    advice = _run(tmp_path, ONE, lambda paths: _plant(paths, utilisation=lambda *_: 0.3), wait=0.7)
    (found,) = advice  # not host-bound: it is known what the GPU waits for
    assert (found.rule, found.set) == ("data-workers", ("data.num_workers=3",))


def test_a_program_that_drives_eight_gpus_and_uses_three_is_told_so(tmp_path: Path) -> None:
    words = ("train.command='sleep 9'", "train.command_per=node", "cluster=slurm", "hardware=gpu_x8")

    def plant(paths: RunPaths) -> None:
        for number in range(30):
            append_samples(paths, [
                Sample(attempt=0, rank=0, time=1e9 + number, elapsed_s=float(number), node="n0", step=None,
                       device=_device(gpu, utilisation=0.9 if gpu < 3 else 0.0),
                       host=Host(cpus=3.0, cpus_allowed=8.0, rss_bytes=GB) if gpu == 0 else None)
                for gpu in range(8)
            ])  # fmt: skip

    (found,) = _run(tmp_path, words, plant)
    assert found.line == (
        "idle-ranks: asked for 8 GPUs, used 3: nothing was done by GPU 3 of rank 0, GPU 4 of rank 0, GPU 5 of rank 0, "
        "GPU 6 of rank 0, GPU 7 of rank 0. hardware.gpus_per_node=3: about 62% fewer GPUs"
    )


@pytest.mark.parametrize("words", [ONE, EIGHT, (*ONE, *BATCH), (*ONE, "train.recompute=full")])
def test_healthy_gpus_are_told_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    ranks = 8 if "hardware=gpu_x8" in words else 1
    assert _run(tmp_path, words, lambda paths: (_memory(paths, 50, 10), _plant(paths, ranks))[1]) == []


def test_damaged_telemetry_is_no_fact(tmp_path: Path) -> None:
    def plant(paths: RunPaths) -> None:
        paths.telemetry_file(0, 0).write_text('{"time": 1, "device": {"utilisation": "none"}, "host": 7}\nnot json\n')
        paths.memory.write_text("[]")

    assert _run(tmp_path, ONE, plant) == []


def test_of_many_ranks_and_long_files_a_part_is_read(tmp_path: Path) -> None:
    """Files of 2,048 lines and of more than 64 ranks would take seconds: their ends tell enough."""
    paths = RunPaths(tmp_path / "r-0123456789")
    (paths.folder / "telemetry").mkdir(parents=True)
    host = Host(cpus=1.0, cpus_allowed=2.0, rss_bytes=GB)
    for rank in range(5):
        append_samples(paths, [
            Sample(attempt=1, rank=rank, time=1e9 + each, elapsed_s=float(each), node="n0", step=each,
                   device=_device(rank, sm_clock_mhz=1410 if each < 3 else 700), host=host)
            for each in range(1800)
        ])  # fmt: skip
    read = newest_of_ranks(paths, most_ranks=3)
    assert sorted({each.rank for each in read}) == [0, 2, 4]
    assert len(read) < 3 * 1500
    assert {(each.step or 0) for each in read} >= {0, 1, 2, 1780, 1799}
    assert [use.clock_share for use in uses_of(read)] == pytest.approx([0.5] * 3, abs=0.02)
    assert newest_of_ranks(RunPaths(tmp_path / "s-0123456789"), most_ranks=3) == []


def test_what_a_rank_takes_is_its_means_and_shares() -> None:
    host = Host(cpus=1.5, cpus_allowed=2.0, rss_bytes=GB)
    words: list[tuple[str, ...] | None] = [(), (), ("sw_thermal", "power_cap"), (), (), None]
    samples = [
        Sample(attempt=0, rank=0, time=1e9, elapsed_s=float(number), node="n0", step=number, host=host,
               device=_device(0, utilisation=number / 10, throttle=each))
        for number, each in enumerate(words)
    ]  # fmt: skip
    (use,) = uses_of(samples)
    assert use.utilisation == pytest.approx(0.35), "without the first two"
    assert use.throttle == pytest.approx({"power_cap": 1 / 3, "sw_thermal": 1 / 3}), "of those that tell"
    assert (use.cpus, use.most_cpus, use.cpus_allowed, use.most_rss) == (1.5, 1.5, 2.0, GB)


def test_a_short_run_is_not_called_idle_for_its_start_and_its_last_save() -> None:
    """Measured on an H100: 9 s of start, 8 s at full load, 3 s for the last save; a sample a second."""
    at_work = range(9, 18)
    samples = [
        Sample(
            attempt=0, rank=0, time=1e9 + number, elapsed_s=float(number), node="n0",
            step=min(150, 18 * max(0, number - 8)), device=_device(0, utilisation=1.0 if number in at_work else 0.0),
            host=None,
        )
        for number in range(21)
    ]  # fmt: skip
    (use,) = uses_of(samples)
    assert use.utilisation == 1.0


def test_a_program_that_tells_no_step_is_seen_after_its_start() -> None:
    samples = [
        Sample(attempt=0, rank=0, time=1e9, elapsed_s=float(number), node="n0", step=None, host=None,
               device=_device(0, utilisation=number / 10))
        for number in range(6)
    ]  # fmt: skip
    (use,) = uses_of(samples)
    assert (use.samples, use.utilisation) == (4, pytest.approx(0.35))
