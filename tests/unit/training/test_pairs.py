"""What the table of what goes with what takes trains: two steps of each pair of features, of every rank's own.

A sample in `make chosen`, or all pairs of the features that HPC_TRAINER_PAIRS names, as `lion,zero1`; all of them in
`make test-long`. Pairs that need a GPU train nowhere here: their refusals and
acceptance are looked at in tests/unit/config/table/test_declarations.py.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.rules.data_rules import of_steps
from hpc_trainer.record.metrics import read_metrics
from tests.unit.config.table import pairs
from tests.unit.training.built_parts import with_first_weights
from tests.unit.training.ranks import play_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(3600)]
SEED, SAMPLE = 14, 8
VARIABLE = "HPC_TRAINER_PAIRS"
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


def _train(folder: Path, ranks: int, chosen: dict[str, list[str]]) -> None:
    jobs: list[dict[str, Any]] = [
        {
            "name": name,
            "words": [*with_first_weights(folder / f"{name}.safetensors", words), "monitor.log_every_steps=1"],
            "attempt": 0,
            "stop_at": None,
        }
        for name, words in chosen.items()
    ]
    ends = play_jobs(folder, ranks, f"pairs-{ranks}", jobs)
    begun = [f"{name} ({' '.join(words)})" for name, words in chosen.items() if (folder / name).is_dir()]
    said = [f"{code}: {output[-3000:]}" for code, output in ends]
    assert all(code == 0 for code, _ in ends), "\n".join([*said, f"the pair is {begun[-1:]}"])
    for name in chosen:
        lines = read_metrics(folder / name / "metrics.jsonl")
        losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
        unknown = {key for line in lines for key in line if not key.startswith("eval_")} - {"step", "time", *of_steps()}
        assert unknown == set(), f"{name}: name them in the `logs` of its feature"
        assert sorted(losses) == [1, 2], name
        assert all(0 < loss < 20 for loss in losses.values()), (name, losses)


@pytest.mark.long
def test_a_sample_of_the_pairs_that_are_taken_trains(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    named = set(os.environ.get(VARIABLE, "").split(",")) - {""}
    assert named <= pairs.FEATURES.keys(), f"{VARIABLE}: {named - pairs.FEATURES.keys()} are no features"
    for ranks in (1, 2, 4) if named else (2,):
        taken = {name: words for name, words in _trainable(ranks).items() if not set(name.split("-")) & set(_SLOW)}
        of_named = [name for name in taken if named & set(name.split("-"))]
        chosen = of_named if named else random.Random(SEED).sample(sorted(taken), SAMPLE)
        if chosen:
            (tmp_path / str(ranks)).mkdir()
            _train(tmp_path / str(ranks), ranks, {name: taken[name] for name in chosen})


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "least"), [(1, 40), (2, 300), (4, 25)])
def test_every_pair_that_is_taken_trains(ranks: int, least: int, tmp_path: Path) -> None:
    taken = _trainable(ranks)
    assert len(taken) >= least
    _train(tmp_path, ranks, taken)
