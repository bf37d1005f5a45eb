"""Runs on a person's files (tokens, arrays, tables, Hugging Face data sets) that were stopped have the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.data import test_arrays, test_tokens
from tests.unit.data import test_hf as test_hf_dataset
from tests.unit.data import test_tables as test_table

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

BASE = (
    "experiment=digits", "train.eval_every_steps=0", "monitor.log_every_steps=5", "monitor.heartbeat_every_s=0",
    "train.num_steps=120", "train.global_batch_size=8", "checkpoint.every_steps=100000",
)  # fmt: skip
SOURCES = ("tokens", "arrays", "table", "hf_dataset")
LOADING = (
    "hardware=cpu_x2 data.num_workers=2",
    "hardware=cpu_x1 data.num_workers=0",
    "hardware=cpu_x2 hardware.tasks_per_node=4 data.num_workers=1",
)


def _words(source: str, folder: Path) -> Iterator[str]:
    yield f"data={source}"
    if source == "tokens":
        first, other = test_tokens.prepare(folder / "a"), test_tokens.prepare(folder / "b", 500, 60)
        yield from ("model=gpt", "model.num_layers=1", "model.embed_dim=16", "model.num_heads=2", "model.dropout=0.1")
        yield from ("+data.sources={" + f"{first}: 1, {other}: 3" + "}", "data.seq_len=8")
        return
    yield from ("model=mlp", "model.hidden_dim=16")
    if source == "arrays":
        yield f"data.path={test_arrays.save(folder / 'a')}"
    elif source == "table":
        yield from (f"data.path={test_table.save(folder / 'a.csv')}", "data.target=price", "task=regression")
    else:
        yield f"data.path={test_hf_dataset.save(folder / 'a')}"


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("loading", LOADING)
def test_stopped_by_a_signal(local: LocalDriver, tmp_path: Path, source: str, loading: str) -> None:
    words = [*BASE, *_words(source, tmp_path), *loading.split()]
    process = local.start("train", *words, "sweep_name=stopped")
    local.wait_for_step("stopped", 10)
    local.signal_rank("stopped", signal.SIGUSR2)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1, output + errors
    (end,) = local.events("stopped", "end")
    assert 10 <= end["saved_step"] < 120

    assert local.train(*words, "sweep_name=stopped")["state"] == "COMPLETED"
    assert [record["step"] for record in local.events("stopped", "resume")] == [0, end["saved_step"]]
    local.train(*words, "sweep_name=undisturbed")
    assert local.final_state("stopped") == local.final_state("undisturbed")
    assert local.metrics("stopped", "loss") == local.metrics("undisturbed", "loss")
    assert local.metrics("stopped", "eval_loss") == local.metrics("undisturbed", "eval_loss")
