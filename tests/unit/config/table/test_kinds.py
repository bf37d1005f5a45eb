"""Rows speak of sorts of models and data sets: each of ours says of what sort it is, and a new one needs no list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.model import ModelConfig, Trait
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.config.table.choice import split
from hpc_trainer.config.table.declarations import declarations
from hpc_trainer.config.table.feature import datasets, models


@dataclass(kw_only=True, slots=True)
class TowerConfig(ModelConfig):
    family: ClassVar[str | None] = "tower"
    traits: ClassVar[frozenset[Trait] | None] = frozenset({Trait.reads_images, Trait.batch_norm})
    name: str = "tower_small"
    dropout: float = 0.1


@dataclass(kw_only=True, slots=True)
class LettersConfig(DataConfig):
    is_text: ClassVar[bool | None] = True
    name: str = "letters"


def test_a_new_model_is_in_the_rows_of_its_traits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS["model"], "tower", TowerConfig)
    assert models(having=[Trait.reads_images])().endswith("|tower")
    assert models(having=[Trait.batch_norm])() == "model=resnet|mobilenet_v3|tower"
    assert models(without=[Trait.blocks], having=[Trait.batch_norm])() == "model=tower"
    assert "tower" not in models(without=[Trait.batch_norm])()
    assert models(key="dropout")().endswith("|tower")
    assert models(having=[Trait.channel_groups], also=["custom"])().endswith("|vit|custom")


def test_of_a_model_of_ones_own_no_row_says_anything() -> None:
    for trait in Trait:
        both = f"{models(having=[trait])()}|{models(without=[trait])()}".replace("model=", "").split("|")
        assert {"custom", "hf"}.isdisjoint(both)


def test_a_new_data_set_is_in_the_rows_of_its_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS["data"], "letters", LettersConfig)
    assert datasets(of_text=True)().endswith("|letters")
    assert "letters" not in datasets(of_text=False)()


def test_each_data_set_says_if_it_is_text() -> None:
    silent = sorted(name for name, kind in VARIANTS["data"].items() if kind.is_text is None)
    assert silent == ["custom", "hf_dataset"], "give the dataclass of each other one `is_text = True` or `False`"


def test_no_row_lists_models_by_hand() -> None:
    """Whoever adds one would have to find them all: `models(..)` (config/table/feature.py) tells their sort."""
    made = {models(having=has, without=lacks)() for has in _SORTS for lacks in _SORTS}
    made |= {models(key="dropout")(), models(having=[Trait.channel_groups], also=["custom"])()}
    lists = {
        part
        for feature in declarations()
        for choice in (feature.on, *(row.what for row in (*feature.needs, *feature.excludes)))
        for way in choice.split(" or ")
        for part in way.split(" & ")
        if part and split(part)[0] == "model" and "|" in split(part)[2]
    }
    assert len(lists) > 5
    assert lists - made == set()


_SORTS = [(), *((trait,) for trait in Trait)]
