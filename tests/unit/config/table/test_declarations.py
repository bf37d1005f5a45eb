"""The table of what goes with what: its words can be read and typed, the docs show it, and each pair is as it says.

HPC_TRAINER_UPDATE_GOLDEN=1 writes docs/reference/what_goes_with_what.md anew: read the difference before keeping it.
What is taken trains in tests/unit/training/test_pairs.py.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.key import RULED, declared
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.config.table import declarations
from hpc_trainer.config.table.choice import defaults_of, holds, is_there, keys_of, reader
from hpc_trainer.config.table.feature import Feature, Row
from tests.composed import composed
from tests.unit.config.table import pairs
from tests.unit.config.table.page import page

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "reference" / "what_goes_with_what.md"
ROWS = [(feature, row) for feature in pairs.FEATURES.values() for row in (*feature.needs, *feature.excludes)]
_WORD = re.compile(r"[a-z_]+(\.[a-z_]+)*=\S+")
_TABLES = re.compile(r" does not go with | needs .*, and this is ")

_OF_VALUES = re.compile(r" must |applies each gradient at once|shares weights out among two data-parallel ranks")


def _has(key: str) -> bool:
    """True of a key, or property, of one of the kinds that its section can be of."""
    section, _, rest = key.partition(".")
    kinds = VARIANTS.get(section, {}).values() or [type(getattr(TrainConfig(), section))]
    if not rest:
        return section in VARIANTS or reader(key)(TrainConfig()) is not None
    first, _, nested = rest.partition(".")
    return any(hasattr(kind, first) and (not nested or hasattr(getattr(kind(), first), nested)) for kind in kinds)


def test_a_row_speaks_of_keys_that_there_are_in_a_clause() -> None:
    assert len(ROWS) > 100
    for feature, row in ROWS:
        for choice in (feature.on, row.what, row.when or feature.on):
            assert all(_has(key) for key in keys_of(choice)), choice
        assert row.why[0].islower() or row.why.split()[0] in ("DDP", "FSDP", "XLA"), row.why
        assert not row.why.endswith("."), row.why


def test_what_rows_advise_can_be_typed() -> None:
    """Words of groups are files, words of keys are keys; what a computed advice says tests of its feature look at."""
    plain = to_plain(TrainConfig())
    ways = [feature.without for feature in pairs.FEATURES.values()] + [
        row.use for _, row in ROWS if isinstance(row.use, str)
    ]
    words = [word for way in ways for word in way.replace(",", " ").split() if _WORD.fullmatch(word)]
    assert len(words) > 50
    for word in words:
        key, _, value = word.partition("=")
        if "." in key:
            assert _has(key), word
            assert value in ("true", "false", "null") or key.split(".")[0] in plain
        else:
            assert (ROOT / "conf" / key / f"{value}.yaml").is_file(), word


def test_its_example_is_taken_somewhere_and_its_off_turns_it_off() -> None:
    for name, feature in pairs.FEATURES.items():
        ground = pairs.home(feature)
        assert ground is not None, (name, [pairs.problems(each, feature) for each in pairs.GROUNDS])
        off = pairs.without(ground, feature)
        assert off is not None, name
        assert not feature.is_on(off), name


def test_each_pair_stands_once() -> None:
    """Two rows of one pair would be two lines for one mistake."""
    said = [{feature.on, row.what} for feature, row in ROWS if not row.when]
    assert [each for index, each in enumerate(said) if each in said[:index]] == []


@pytest.mark.long
@pytest.mark.parametrize("every", [4, 1])
def test_each_pair_is_taken_or_refused_with_a_reason(every: int) -> None:
    """On some ground, or on none. A refusal that neither has by itself is a row's, or says what a value must be."""
    taken, refused = [], []
    for one, other in list(pairs.pairs())[::every]:
        if pairs.home(one, other):
            taken.append((one, other))
            continue
        for ground in pairs.GROUNDS:
            both, alone = pairs.problems(ground, one, other), [pairs.problems(ground, each) for each in (one, other)]
            if both is None or None in alone:
                continue
            assert both, "no home, and yet nothing against it"
            new = set(both).difference(*(each or () for each in alone))
            assert all(_TABLES.search(line) or _OF_VALUES.search(line) for line in new), new
            assert all(". Use " in line for line in new), new
            if () == alone[0] == alone[1]:
                assert any(_TABLES.search(line) for line in new) or "hsdp" in (one.name, other.name), new
                refused.append((one, other))
    assert len(taken) > 400 / every
    assert len({(one.name, other.name) for one, other in refused}) > 60 / every


def test_a_row_refuses_what_it_says() -> None:
    """Without it there is one line less: no hand-written rule says the same."""
    for feature, row in ROWS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            _check_refusal(feature, row, monkeypatch)


def _check_refusal(feature: Feature, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pairs.breaking(feature, row)
    before = list(find_problems(config))
    mine = [line for line in before if row.why in line and _TABLES.search(line)]
    assert len(mine) == 1, (feature.name, row.what, before)
    less = dataclasses.replace(
        feature,
        needs=tuple(each for each in feature.needs if each is not row),
        excludes=tuple(each for each in feature.excludes if each is not row),
    )
    others = tuple(less if each is feature else each for each in declarations.declarations())
    monkeypatch.setattr(declarations, "declarations", lambda: others)
    assert [line for line in before if line not in mine] == list(find_problems(config))


def test_a_key_with_a_rule_of_its_own_is_in_the_table_or_among_its_sections_values() -> None:
    """`RULED` of parallel/ means: a row says with what it has an effect."""
    kind = type(TrainConfig().parallel)
    ruled = [
        each.name for each in dataclasses.fields(kind) if (said := declared(kind, each.name)) and said.needs is RULED
    ]
    spoken = {key for feature in pairs.FEATURES.values() if feature.needs for key in keys_of(feature.on)}
    assert len(ruled) > 5
    assert [name for name in ruled if f"parallel.{name}" not in spoken] == []


def test_the_page_is_current() -> None:
    text = page(declarations.declarations())
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN") == "1":
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "HPC_TRAINER_UPDATE_GOLDEN=1 writes it anew: read what changed"


def test_choices_of_the_cores_keys_are_those_of_features() -> None:
    by_name = {feature.name: feature for feature in declarations.features()}
    for choice, name in declarations.CARRIED_OUT.items():
        assert by_name[name].on in (choice, "train.recompute=full|selective"), name


def test_a_choice_whose_feature_was_deleted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(["precision=fp8", "hardware=gpu_x1"])
    left = tuple(feature for feature in declarations.features() if feature.name != "float8")
    monkeypatch.setattr(declarations, "features", lambda: left)
    monkeypatch.setattr(declarations, "_not_installed", declarations._not_installed.__wrapped__)
    said = "precision=fp8 needs the feature float8, and its folder hpc_trainer/features/float8 is missing. "
    assert any(line.startswith(said) for line in declarations.feature_problems(config))


def test_a_choice_of_a_key_that_is_not_installed_is_never_made() -> None:
    assert not is_there("train.gone")
    for text in ("train.gone", "train.gone=1", "train.gone!=1", "train.gone>1"):
        assert not holds(TrainConfig(), text)
    assert defaults_of("train.gone or train.compile") == "train.compile=false"
    assert is_there("model.width")
    assert is_there("train.guard.on_spike")
