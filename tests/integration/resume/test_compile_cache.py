"""The first run of a sweep compiles; its other runs and its restarts do not, and have the same bits."""

from __future__ import annotations

import re
import shutil
import signal
import sys

import pytest

from tests.integration.conftest import LocalDriver

_WORDS = (
    "cluster=local", "experiment=digits", "model=mlp", "train.compile=true", "train.num_steps=400",
    "train.eval_every_steps=150", "monitor.log_every_steps=1", "checkpoint.every_steps=100000",
)  # fmt: skip
_LINE = re.compile(r"first step ([\d.]+) s after .*; (\d+) graphs, (\d+) from the cache, (\d+) made")


def _counts(local: LocalDriver, sweep: str) -> list[tuple[int, int, int]]:
    """(graphs, those from the cache, those made) of each attempt, once it has taken its first step."""
    logs = sorted((local.run_folder(sweep) / "logs").glob("attempt-*.rank-0.log"))
    found = [_LINE.search(path.read_text()) for path in logs]
    seconds = [each[1] for each in found if each]
    sys.stdout.write(f"{sweep}: seconds to the first step {seconds}\n")
    return [tuple(map(int, each.groups()[1:])) for each in found if each]  # type: ignore[misc]


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_other_runs_and_restarts_compile_nothing_and_have_the_same_bits(local: LocalDriver) -> None:
    local.run("train", *_WORDS, "sweep_name=cold", timeout_s=900)
    (cold,) = _counts(local, "cold")
    assert cold[0] > 0
    assert cold[2] > 0, "the first run compiles"
    archives = local.folder / "runs" / "cold" / "compile_cache"
    assert [path.suffix for path in archives.iterdir()] == [".cache"]

    shutil.copytree(archives, local.folder / "runs" / "warm" / "compile_cache")
    process = local.start("train", *_WORDS, "sweep_name=warm")
    local.wait_for_step("warm", 20, timeout_s=600)
    local.signal_rank("warm", signal.SIGUSR2)
    process.communicate(timeout=300)
    local.run("train", *_WORDS, "sweep_name=warm", timeout_s=600)
    assert len(local.events("warm", "resume")) == 2
    counts = _counts(local, "warm")
    assert len(counts) == 2
    for graphs, cached, made in counts:
        assert (graphs, made) == (cold[0], 0)
        assert cached >= 1
    assert local.final_state("warm") == local.final_state("cold")
    for key in ("loss", "eval_loss", "grad_norm"):
        assert local.metrics("warm", key) == local.metrics("cold", key)
