"""Lion under ZeRO-1, FSDP2, HSDP and tensor parallel: one rank's bits, no message, and any way's saves."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.unit.features.lion.lion_ways import KINDS
from tests.unit.training.ranks import run_child, said_by

pytestmark = [pytest.mark.dist, pytest.mark.long, pytest.mark.timeout(600)]


def _kinds(*left_out: str) -> list[str]:
    return [kind for kind in KINDS if kind not in left_out]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lion")
    run_child(Path(__file__).with_name("sharded_child.py"), path, *KINDS)
    return path


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return said_by(KINDS, folder)


@pytest.mark.parametrize("kind", _kinds())
def test_given_gradients_give_the_bits_of_one_rank(said: dict[str, list[dict[str, Any]]], kind: str) -> None:
    """Also after a step that all ranks skip; each rank has all momenta, or its share of ZeRO-1's."""
    assert len(said[kind]) == KINDS[kind][0]
    for each in said[kind]:
        assert each["differ"] == []
    num_weights = said[kind][0]["num_weights"]
    held = [each["num_momenta"] for each in said[kind]]
    assert sum(held) == num_weights if kind == "zero2" else held == [num_weights] * len(held)


@pytest.mark.parametrize("kind", _kinds("zero2"))
def test_a_step_sends_nothing(said: dict[str, list[dict[str, Any]]], kind: str) -> None:
    assert all(each["counts"] == [0, 0, 0] for each in said[kind])


@pytest.mark.parametrize(("source", "goal"), list(product(KINDS, KINDS)))
def test_any_way_loads_what_any_other_saved(
    folder: Path, said: dict[str, list[dict[str, Any]]], source: str, goal: str
) -> None:
    saved = said[source][0]["saved"]
    assert "/optimizer/state/model.blocks.1.mlp_in.weight/exp_avg" in saved
    assert json.loads((folder / f"loaded-{goal}.json").read_text())[source] == saved
