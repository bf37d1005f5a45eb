"""What `hardware check --run` measured, in a plan: the share of communication, the time of a checkpoint, and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.show_plan import expected_json, print_expected
from hpc_trainer.launch.expected import Expected, _size, _time, find_expected
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.grids import plan_grid
from hpc_trainer.launch.memory import Need
from hpc_trainer.record.ledger import append_spent, spent_so_far
from hpc_trainer.record.measured import Link, read_figures, reduced_bytes, write_measured
from tests.unit.record.builders import make_spec
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

DIGITS = ("cluster=slurm", "experiment=digits", "train.num_steps=1000", "checkpoint.every_steps=50")
GPT = ("cluster=slurm", "experiment=gpt_bytes", "checkpoint.every_steps=50")
MEASURED: dict[str, Any] = {
    "cluster": "fakecluster", "hardware": "gpu_x2", "day": "2026-11-20", "world_size": 2,
    "ranks": [{"rank": 0, "node": "n1"}, {"rank": 1, "node": "n1"}],
    "all_reduce": {"node": {"ranks": 2, "latency_s": 1e-5, "bus_bytes_per_s": 1e9}},
    "write_bytes_per_s": {"slowest_node": 2e6, "sum": 2e6}, "filesystem": "nfs4",
}  # fmt: skip
TWO_NODES = {
    "ranks": [{"rank": 0, "node": "n1"}, {"rank": 1, "node": "n2"}],
    "all_reduce": {"all": {"ranks": 2, "latency_s": 1e-5, "bus_bytes_per_s": 1e6}},
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    fake_slurm.answer("scontrol", "ClusterName             = fakecluster\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def _expected(*words: str, needs: tuple[Need, ...] = ()) -> Expected:
    (found,) = find_expected(plan_grid(freeze_grid(words)), needs)
    return found


def _earlier(runs: Path, *words: str, step_s: float = 0.01, **held: float) -> None:
    """An earlier run of 100 steps, with the memory that its ranks held."""
    (spec,) = freeze_grid(words).specs
    sweep = SweepOnDisk(runs / "before", [spec])
    sweep.submit()
    sweep.start()
    sweep.beat(step=100)
    append_spent(sweep.run(), 0, 100, spent_so_far([("step", 100 * step_s)], steps_done=100))
    sweep.run().memory.write_text(json.dumps({**held, "peak": 1e9, "device": "cpu"}))


def test_a_plan_without_a_measurement_says_nothing(runs: Path) -> None:
    assert find_expected(plan_grid(freeze_grid([*DIGITS, "hardware=gpu_x2"]))) == []
    write_measured("elsewhere", "gpu_x2", MEASURED)  # of another cluster
    write_measured("fakecluster", "gpu_x4", MEASURED)  # of another profile
    assert find_expected(plan_grid(freeze_grid([*DIGITS, "hardware=gpu_x2"]))) == []


def test_communication_and_checkpoint_of_a_training_that_ran_before(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*DIGITS, "hardware=gpu_x2", "train.eval_every_steps=0")
    write_measured("fakecluster", "gpu_x2", MEASURED)
    _earlier(runs, *words, weights=1e6, gradients=1e6, optimizer=2e6)
    found = _expected(*words)
    # An all-reduce of n bytes among two ranks moves n bytes: 1 MB at 1 GB/s, and the latency.
    assert found.reduce_s == pytest.approx(1e-3 + 1e-5)
    assert found.save_s == pytest.approx(3e6 / 2e6)  # weights and moments, not gradients
    assert found.between_saves_s == pytest.approx(50 * 0.01)
    reduce, save = found.lines
    assert "about 1.01 ms on 2 ranks, 10% of a step of 10 ms (by before/" in reduce
    assert "measured 1 GB/s among 2 ranks" in reduce
    assert save == (
        "a checkpoint of 3 MB takes about 1.5 s to write, each 50 steps (checkpoint.every_steps), which take 500 ms; "
        "measured 2 MB/s a node on nfs4. Saves take longer than the steps between them: use checkpoint.every=auto"
    )
    print_expected([found])
    assert "Expected on gpu_x2, by hardware check gpu_x2 --run, 2026-11-20:" in capsys.readouterr().out
    assert json.loads(json.dumps(expected_json([found])))[0]["reduce_s"] == found.reduce_s


def test_a_gpt_needs_no_earlier_run(runs: Path) -> None:
    write_measured("fakecluster", "gpu_x2", MEASURED)
    found = _expected(*GPT, "hardware=gpu_x2")
    assert found.step_s is None
    assert found.save_bytes == pytest.approx(3 * (found.reduce_bytes or 0))  # weights and two moments of AdamW
    assert "% of a step" not in found.lines[0]
    assert "on 2 ranks, less what computation hides" in found.lines[0]


def test_sizes_of_plan_memory_are_taken_for_any_model(runs: Path) -> None:
    write_measured("fakecluster", "gpu_x2", MEASURED)
    words = (*DIGITS, "hardware=gpu_x2")
    assert _expected(*words).lines == ()  # nothing is known of this model's size
    (spec,) = freeze_grid(words).specs
    need = Need(
        run_id=spec.run_id, axes={}, num_runs=1, gpu_type=None, parts={"gradients": 1e-3}, checkpoint_gb=4e-3
    )  # fmt: skip
    found = _expected(*words, needs=(need,))
    assert (found.reduce_bytes, found.save_s) == (pytest.approx(1e6), pytest.approx(2.0))


def test_links_between_nodes_must_be_measured_between_nodes(runs: Path) -> None:
    write_measured("fakecluster", "gpu_x2", MEASURED)
    words = (*GPT, "hardware=gpu_x2", "hardware.num_nodes=2")
    assert _expected(*words).reduce_s is None
    assert _expected(*words).lines[0] == (
        "the links between nodes were not measured. Type: hpc-trainer hardware check gpu_x2 --run"
    )
    write_measured("fakecluster", "gpu_x2", {**MEASURED, **TWO_NODES})
    found = _expected(*words)
    assert found.reduce_bytes is not None
    assert found.reduce_s == pytest.approx(1e-5 + 2 * 3 / 4 * found.reduce_bytes / 1e6)  # four ranks are planned
    one = _expected(*GPT, "hardware=gpu_x2").lines[0]
    assert one.startswith("the links within a node were not measured")


@pytest.mark.parametrize(("words", "writers"), [((), 1), (("parallel=fsdp",), 2)])
def test_a_divided_checkpoint_is_written_by_all_nodes(runs: Path, words: tuple[str, ...], writers: int) -> None:
    write_measured("fakecluster", "gpu_x2", {**MEASURED, **TWO_NODES})
    found = _expected(*GPT, "hardware=gpu_x2", "hardware.num_nodes=2", *words)
    assert found.save_bytes is not None
    assert found.save_s == pytest.approx(found.save_bytes / (2e6 * writers))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1e6, "1 MB"), (2.5e9, "2.5 GB"), (1e12, "1 TB"), (1e15, "1e+03 TB")],
)
def test_sizes_in_words(num_bytes: float, text: str) -> None:
    assert _size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.001, "1 ms"), (0.9994, "999 ms"), (1, "1 s"), (59.9, "59.9 s"), (60, "1 min")]
)
def test_times_in_words(seconds: float, text: str) -> None:
    assert _time(seconds) == text


def test_faults_of_the_measurement_are_repeated(runs: Path) -> None:
    faults = {"clocks": "+9.000 s at most. Tell the site", "internet": "no. Fetch models on the login node"}
    write_measured("fakecluster", "gpu_x2", {**MEASURED, "problems": faults})
    assert _expected(*DIGITS, "hardware=gpu_x2").lines == ("clocks: +9.000 s at most. Tell the site",)
    program = ("cluster=slurm", "train.command=/bin/true", "hardware=gpu_x2")  # nothing of ours downloads
    assert _expected(*program).lines[-1] == "internet: no. Fetch models on the login node"
    assert not any("internet" in line for line in _expected(*program, "+cluster.env.HF_HUB_OFFLINE='1'").lines)


@pytest.mark.parametrize(
    ("words", "num_bytes"),
    [
        ((), 4.0),
        (("parallel.comm_hook=bf16",), 2.0),
        (("parallel.comm_hook=powersgd",), None),
        (("parallel=post_local_sgd", "train.eval_every_steps=96"), None),
        (("parallel.zero1=true",), None),
        (("parallel=fsdp",), 6.0),  # two gatherings and one scattering of 4 bytes, each half an all-reduce
        (("parallel=fsdp", "parallel.reshard_after_forward=false"), 4.0),
        (("parallel=fsdp", "precision=bf16", "parallel.param_dtype=bf16"), 4.0),
        (("parallel=fsdp", "train.grad_accum_steps=2", "train.micro_batch_size=null"), 10.0),
        (("parallel=tp",), None),
    ],
)
def test_bytes_of_a_step(words: tuple[str, ...], num_bytes: float | None) -> None:
    spec = make_spec("cluster=slurm", "experiment=gpt_bytes", "hardware=gpu_x8", *words)
    assert reduced_bytes(spec.typed(), 1) == num_bytes


@pytest.mark.parametrize(
    "damage",
    [
        {"all_reduce": None}, {"all_reduce": {"node": None}}, {"all_reduce": {"node": {"ranks": 2}}},
        {"all_reduce": {"node": {"ranks": 2, "latency_s": 1e-5, "bus_bytes_per_s": 0}}},
    ],
)  # fmt: skip
def test_a_damaged_file_is_not_measured(damage: dict[str, Any], runs: Path) -> None:
    wrong = {"write_bytes_per_s": "fast", "ranks": 7, "problems": []}
    write_measured("fakecluster", "gpu_x2", {**MEASURED, **damage, **wrong})
    figures = read_figures("fakecluster", "gpu_x2")
    assert figures is not None
    assert (figures.links, figures.write_bytes_per_s, figures.problems) == ({}, None, {})
    assert read_figures(None, "gpu_x2") is None


def test_an_all_reduce_takes_as_nccl_tests_count() -> None:
    assert Link(8, 0.5, 100.0).seconds(100.0, 4) == pytest.approx(0.5 + 1.5)
