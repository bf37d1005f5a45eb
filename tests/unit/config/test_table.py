"""The table of what goes with what: its words can be read, the docs show it, and all pairs do what it says.

HPC_TRAINER_UPDATE_GOLDEN=1 writes docs/reference/what_goes_with_what.md anew: read the difference before keeping it.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from hpc_trainer.config.choice import holds, keys_of, reader
from hpc_trainer.config.feature import Feature, Row
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table import features
from hpc_trainer.config.table_page import page
from hpc_trainer.config.validate import find_problems
from tests.unit.runs.builders import make_config

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "what_goes_with_what.md"
FEATURES = {each.name: each for each in features()}
ROWS = [(feature, row) for feature in features() for row in (*feature.needs, *feature.excludes)]
# Two nodes of two ranks: every way to share a model has room there, and a text model has what the others have not.
GROUND = (
    "experiment=gpt_bytes", "cluster=slurm", "hardware=testbed_x4", "train.num_steps=40", "train.global_batch_size=16",
    "train.eval_every_steps=0", "model.num_layers=2",
)  # fmt: skip
ALONE = ("experiment=digits", "cluster=local", "hardware=cpu_x1", "train.num_steps=40")


def _name(feature: Feature, row: Row) -> str:
    return f"{feature.name}-{row.what}"


def _words(*features: Feature) -> list[str]:
    """What one types for all of them; of two words for one key the later one."""
    words = dict(
        word.split("=", 1) for word in (*GROUND, *(word for each in features for word in each.example.split()))
    )
    if any("bf16" in each.example and "fp32" in each.off for each in features):
        words.setdefault("precision", "bf16")
    return [f"{key}={value}" for key, value in words.items()]


@pytest.mark.parametrize(("feature", "row"), ROWS, ids=list(itertools.starmap(_name, ROWS)))
def test_a_row_speaks_of_keys_that_there_are(feature: Feature, row: Row) -> None:
    config = TrainConfig()
    for key in (*keys_of(feature.on), *keys_of(row.what), *keys_of(row.when or feature.on)):
        reader(key)(config)
    assert row.why[0].islower() or row.why.split()[0] in ("DDP", "FSDP", "XLA")
    assert not row.why.endswith(".")


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_its_example_turns_it_on_and_off(name: str) -> None:
    feature = FEATURES[name]
    config = make_config(*_words(feature))
    assert holds(config, feature.on)
    assert not holds(make_config(*GROUND), feature.on)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(sorted(FEATURES), 2)))
def test_a_pair_is_refused_with_both_named_or_taken(one: str, other: str) -> None:
    """A refusal that is the table's names what one typed for both, whatever else is wrong on this ground."""
    first, second = FEATURES[one], FEATURES[other]
    config = make_config(*_words(first, second))
    if not (first.is_on(config) and second.is_on(config)):
        return  # two values of one key
    problems = list(find_problems(config))
    alone = {line for each in (first, second) for line in find_problems(make_config(*_words(each)))}
    for line in set(problems) - alone:
        assert "does not go with" in line or "needs" in line or "must" in line or "takes" in line, line
        assert ". Use " in line


def test_the_page_is_current() -> None:
    text = page(features())
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN") == "1":
        PAGE.write_text(text)
    assert PAGE.read_text() == text
