"""A rank tells what its memory holds after its first steps, and where it was not enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.errors import TooLargeError
from hpc_trainer.features.memory.estimate import estimate
from hpc_trainer.features.memory_report.memory_report import MemoryReportAbility
from hpc_trainer.record.reading import read_json
from hpc_trainer.runtime.devices import is_out_of_memory, profile_bytes
from hpc_trainer.training.data.order import BatchSizes
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper, build_scaler
from tests.unit.training.built_parts import building_of
from tests.unit.training.train_here import config_of, train_here

WORDS = ("model=cnn", "train.num_steps=6", "monitor.log_every_steps=2", "train.ema_decay=0.9")


def test_the_report_is_what_the_objects_hold_and_what_was_estimated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(*WORDS, "hardware.mem_gb_per_node=3")
    run = train_here(config, tmp_path)
    told = read_json(run.paths.memory) or {}
    expected = estimate(config)
    for name in ("weights", "gradients", "optimizer"):
        assert told[name] == getattr(expected, name), name
    assert told["average"] == expected.average + 8, "and its own counter"
    assert (told["step"], told["attempt"], told["micro_batch_size"], told["device"]) == (2, 0, 64, "cpu")
    assert (told["activations"], told["cache"], told["fragmentation"]) == (None, None, None)
    assert told["peak"] == told["host_peak"] >= 0.5 * psutil.Process().memory_info().rss
    assert told["limit"] == 3 * 2**30
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory of a rank")]
    assert len(lines) == 1, "once an attempt"
    assert "weights" in lines[0]
    assert lines[0].endswith("of 3.22 GB")


@pytest.mark.parametrize("at", [0, 3])
def test_an_end_for_want_of_memory_has_figures(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    micro_batch, steps = Stepper._micro_batch, list[int]()

    def ends(stepper: Stepper, state: Any, *arguments: Any) -> torch.Tensor:
        share = micro_batch(stepper, state, *arguments)
        steps.append(state.step)
        if state.step == at:
            raise torch.OutOfMemoryError("CUDA out of memory. (test)")
        return share

    monkeypatch.setattr(Stepper, "_micro_batch", ends)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_here(config_of(*WORDS), tmp_path)
    told = caught.value.memory  # type: ignore[attr-defined]
    assert (told["micro_batch_size"], told["step"], told["limit"]) == (64, at, None)
    assert told["weights"] == told["gradients"] > 0
    assert (told["optimizer"] > 0) == (at > 0), "no state before the first update"


def test_other_errors_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(stepper: Stepper, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Stepper, "_micro_batch", broken)
    with pytest.raises(RuntimeError, match="shapes") as caught:
        train_here(config_of(*WORDS), tmp_path)
    assert not hasattr(caught.value, "memory")


def test_the_end_of_memory_is_known_by_each_of_its_names() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)  # the CPU allocator's own words, of this torch
    assert is_out_of_memory(caught.value)
    wrapped = RuntimeError("in a module of mine")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    for error in (MemoryError(), TooLargeError("x"), wrapped, RuntimeError("CUDNN_STATUS_ALLOC_FAILED")):
        assert is_out_of_memory(error)
    for other in (RuntimeError("out of range"), ValueError("can't"), None):
        assert not is_out_of_memory(other)


@pytest.mark.parametrize(
    ("keys", "gib"),
    [
        ({"mem_gb_per_node": 8.0, "tasks_per_node": 4}, 2.0), ({"mem_gb_per_cpu": 2.0, "cpus_per_task": 3}, 6.0),
        ({"mem_gb_per_gpu": 5.0, "gpus_per_node": 2}, 5.0), ({}, None),
    ],
)  # fmt: skip
def test_the_profile_gives_each_rank_its_share(keys: dict[str, Any], gib: float | None) -> None:
    found = profile_bytes(HardwareConfig(**keys))
    assert found == (None if gib is None else int(gib * 2**30))


def test_moments_in_host_memory_are_none_of_the_gpu_s() -> None:
    """Else what is left of the peak, the activations, would be too little."""
    model = torch.nn.Linear(6, 5, device="meta")  # as a GPU, it has not the host's memory
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(5, 6)
    optimizer.state[model.bias]["momentum_buffer"] = torch.zeros(5, device="meta")
    state = TrainState(model=model, optimizer=optimizer, scaler=build_scaler(PrecisionConfig(), "cpu"))
    config = config_of(*WORDS)
    report = MemoryReportAbility(config)
    report.on_state(state, model, building_of(config, sizes=BatchSizes.of(4, 1), abilities=[]))
    assert report._held() == {"weights": 4 * 35, "gradients": 4 * 35, "optimizer": 4 * 5}
