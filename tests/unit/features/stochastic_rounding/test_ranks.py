"""Ranks with copies round alike, and ranks with parts as the whole: the bits of one rank, for given gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.features.stochastic_rounding.ways import KINDS
from tests.unit.training.ranks import run_child, said_by

pytestmark = [pytest.mark.dist, pytest.mark.long, pytest.mark.timeout(600)]
Said = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("rounded")
    run_child(Path(__file__).with_name("ranks_child.py"), folder)
    return said_by(KINDS, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_given_gradients_give_the_bits_of_one_rank(said: Said, kind: str) -> None:
    """Of weights whose rows do not divide by the ranks, tied ones, and one that is frozen."""
    assert len(said[kind]) == KINDS[kind][0]
    for each in said[kind]:
        assert each["weights"] == said["single"][0]["weights"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_bf16_and_moments_are_not(said: Said, kind: str) -> None:
    """The stop vote too where FSDP takes it with weights."""
    for each in said[kind]:
        assert each["formats"] == ["torch.bfloat16"] + ["torch.float32"] * ("sdp" not in kind)
        assert each["moments"] == ["torch.float32"]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_learn_and_ranks_stay_together(said: Said, kind: str) -> None:
    alone = said["single"][0]["losses"]
    assert alone[0] - alone[-1] > 0.02
    for each in said[kind]:
        assert each["losses"] == pytest.approx(alone, rel=0.03)
        assert each["after"] == said[kind][0]["after"]
