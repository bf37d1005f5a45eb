"""What the table of what goes with what takes trains: two steps of each pair of features, of every rank's own.

A sample in `make test`; all of them in `make test-long`. Pairs that need a GPU train nowhere here: their refusals and
acceptance are looked at in tests/unit/config/table/test_declarations.py.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hpc_trainer.config.load import plain_value
from hpc_trainer.runs.metrics_log import read_metrics
from hpc_trainer.training.build import build_dataset, build_model, build_task
from tests.composed import composed
from tests.unit.config.table import pairs
from tests.unit.training.ranks import play_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(3600)]
SEED, SAMPLE = 14, 8
_SLOW = ("compile", "recompute_budget")
"""Some ten seconds a pair: in the sample's place the compiler's own tests train."""


def _trainable(ranks: int) -> dict[str, list[str]]:
    """Of those whose first ground has so many ranks on this machine, by name: what one types."""
    found = {}
    for one, other in pairs.pairs():
        ground = pairs.home(one, other)
        if ground is not None and ground.is_cpu and ground.ranks == ranks:
            found[f"{one.name}-{other.name}"] = pairs.words(ground, one, other)
    return found


def _begun(path: Path, words: list[str]) -> list[str]:
    """With a file of the model's own weights, where they say one."""
    others = [word for word in words if not word.startswith("init_from.path=")]
    if others == words:
        return words
    config = composed([*others, "cluster=local"])
    torch.manual_seed(SEED)
    model = build_model(config, build_dataset(config, "train", build_task(config)))
    safetensors.torch.save_file(model.state_dict(), path)
    # Of a file nobody knows what it was trained on: the data themselves stand for the old ones.
    values = [f"{key}: {json.dumps(value)}" for key, value in plain_value(config.data).items() if value is not None]
    replayed = [f"replay.data=[{{{', '.join(values)}}}]"] if config.replay.share is not None else []
    return [*others, f"init_from.path={path}", *replayed]


def _train(folder: Path, ranks: int, chosen: dict[str, list[str]]) -> None:
    jobs: list[dict[str, Any]] = [
        {
            "name": name,
            "words": [*_begun(folder / f"{name}.safetensors", words), "monitor.log_every_steps=1"],
            "attempt": 0,
            "stop_at": None,
        }
        for name, words in chosen.items()
    ]
    ends = play_jobs(folder, ranks, f"pairs-{ranks}", jobs)
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-3000:]}" for code, output in ends)
    for name in chosen:
        losses = {
            line["step"]: line["loss"] for line in read_metrics(folder / name / "metrics.jsonl") if "loss" in line
        }
        assert sorted(losses) == [1, 2], name
        assert all(0 < loss < 20 for loss in losses.values()), (name, losses)


def test_a_sample_of_the_pairs_that_are_taken_trains(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    taken = {name: words for name, words in _trainable(2).items() if not set(name.split("-")) & set(_SLOW)}
    chosen = random.Random(SEED).sample(sorted(taken), SAMPLE)
    _train(tmp_path, 2, {name: taken[name] for name in chosen})


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "least"), [(1, 40), (2, 300), (4, 25)])
def test_every_pair_that_is_taken_trains(ranks: int, least: int, tmp_path: Path) -> None:
    taken = _trainable(ranks)
    assert len(taken) >= least
    _train(tmp_path, ranks, taken)
