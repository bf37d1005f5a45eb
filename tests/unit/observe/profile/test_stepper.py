"""`monitor.profile_steps`: the window, what it leaves behind, and that an attempt's own warm-up passes first."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_trainer.observe.profiler import ProfiledStepper
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_group import RankGroup
from tests.unit.record.builders import make_config
from tests.unit.training.world_child import compose, play

WORDS = ["experiment=digits", "model=mlp", "model.hidden_dim=16", "train.global_batch_size=16", "train.num_steps=14",
         "train.eval_every_steps=0", "schedule.warmup_steps=0", "monitor.log_every_steps=1",
         "monitor.profile_warmup_steps=4", "monitor.profile_steps=3"]  # fmt: skip


def _steps_in(paths: RunPaths) -> int:
    trace = json.loads(gzip.decompress(paths.profile_trace.read_bytes()))
    names = [str(each.get("name")) for each in trace["traceEvents"] if each.get("ph") == "X"]
    assert any(name.startswith("aten::addmm") for name in names)
    return len([name for name in names if name.startswith("ProfilerStep#")])


def test_a_resumed_run_is_watched_after_its_own_warm_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, config = RunPaths(tmp_path / "run"), compose(WORDS, 1)
    assert play(config, paths.folder, RankGroup(), 0, 2) == "stopped"
    assert not paths.profile_trace.exists()  # stopped in the warm-up
    assert play(config, paths.folder, RankGroup(), 1, 8) == "stopped"
    assert paths.profile_table.read_text().startswith("profile: steps 7 to 8,")  # of the window what there was
    assert play(config, paths.folder, RankGroup(), 2, None) == "done"
    text = paths.profile_table.read_text()
    assert text.startswith("profile: steps 13 to 14,")  # it ended in the window
    assert _steps_in(paths) >= 2
    for words in ("waiting for data: ", "the main thread idle: ", "operators a step", "advice: ", "Self CPU"):
        assert words in text
    assert "profile: steps 13 to 14" in capsys.readouterr().out
    assert len([path for path in paths.folder.iterdir() if path.is_file()]) <= 12


class Slow:
    """A stepper of a product, that takes its batch as the real one does."""

    device = torch.device("cpu")
    grad_accum_steps = 1

    def step(self, state: Any, batches: Iterator[Any], **words: Any) -> str:
        next(batches)
        weight = torch.ones(64, 64)
        (weight @ weight).sum()
        state.step += 1
        return "result"


def _watch(tmp_path: Path, num_steps: int, *, fails_at: int | None = None, **changes: int) -> RunPaths:
    config = make_config(**{"monitor__profile_steps": 3, "monitor__profile_warmup_steps": 2, **changes})
    paths, state = RunPaths(tmp_path), SimpleNamespace(step=100)

    def batches() -> Iterator[Any]:
        for number in itertools.count():
            time.sleep(0.1)  # more than a busy machine adds to the product
            if number == fails_at:
                raise ValueError("no data")
            yield number

    steps = {"warmup_steps": config.monitor.profile_warmup_steps, "num_steps": config.monitor.profile_steps}
    watched, source = ProfiledStepper(Slow(), config, paths, **steps), batches()
    assert watched.grad_accum_steps == 1
    try:
        for _ in range(num_steps):
            assert watched.step(state, source, lr=0.1, wish_to_stop=False) == "result"
    finally:
        watched.close()
    return paths


def test_the_window_and_the_wait_for_data(tmp_path: Path) -> None:
    lines = _watch(tmp_path, 9).profile_table.read_text().splitlines()
    assert lines[0].startswith("profile: steps 103 to 105,")
    assert any("data.num_workers=1 hardware.cpus_per_task=2 (now 0" in line for line in lines)
    share = float(lines[1].removeprefix("profile: waiting for data: ").partition("%")[0])
    assert share > 50
    assert any("waiting for a batch" in line or "Python" in line for line in lines)


def test_from_the_second_step_on(tmp_path: Path) -> None:
    paths = _watch(tmp_path, 4, monitor__profile_warmup_steps=1)
    assert paths.profile_table.read_text().startswith("profile: steps 102 to 104,")


def test_an_error_in_the_window_is_the_errors_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data"):
        _watch(tmp_path, 9, fails_at=4)
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_full_disk_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.txt").mkdir()
    _watch(tmp_path, 6)
    assert "WARNING: the profile could not be written" in capsys.readouterr().out
