"""FSDP2 and ZeRO-1 take the step of one rank with the whole batch: losses, norm, weights, vote, evaluation.

With moments in host memory they take it to the bit of the step without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.parallel.shard_builders import KINDS
from tests.unit.training.ranks import has_long, run_child, said_by

pytestmark = pytest.mark.dist
Said = dict[str, list[dict[str, Any]]]
SAMPLE = ["single", "zero2", "fsdp2"]
"""What `make test` plays: each way to share, on two ranks."""


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Run the ranks of the kinds that are needed, which are all if a long test was chosen."""
    folder = tmp_path_factory.mktemp("steps")
    run_child(Path(__file__).with_name("sharded_step_child.py"), folder, *(KINDS if has_long(request) else SAMPLE))
    return said_by({kind: (KINDS[kind][0], None) for kind in KINDS}, folder)


SHARING = [pytest.param(kind, marks=() if kind in SAMPLE else pytest.mark.long) for kind in KINDS if kind != "single"]


@pytest.mark.parametrize("kind", SHARING)
def test_ranks_together_are_one_rank_with_the_whole_batch(said: Said, kind: str) -> None:
    (alone,) = said["single"]
    for each in said[kind]:
        assert each["steps"]["losses"] == pytest.approx(alone["steps"]["losses"], rel=1e-6)
        assert each["steps"]["norms"] == pytest.approx(alone["steps"]["norms"], rel=1e-5)
        assert each["steps"]["weights"] == said[kind][0]["steps"]["weights"]
        for name, expected in alone["steps"]["weights"].items():
            assert each["steps"]["weights"][name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", SHARING)
def test_averaged_weights_are_those_of_one_rank(said: Said, kind: str) -> None:
    (alone,) = said["single"]
    for each in said[kind]:
        assert each["steps"]["averaged"] == pytest.approx(alone["steps"]["averaged"], rel=1e-5)
        assert each["steps"]["average"] == said[kind][0]["steps"]["average"]
        assert each["steps"]["average"].keys() == alone["steps"]["average"].keys()
        for name, expected in alone["steps"]["average"].items():
            assert each["steps"]["average"][name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
            assert "frozen" in name or expected != alone["steps"]["weights"][name]


@pytest.mark.parametrize("kind", SHARING)
def test_averages_are_made_without_a_message(said: Said, kind: str) -> None:
    for each in said[kind]:
        assert each["messages"]["with"] == each["messages"]["without"] != {}


@pytest.mark.parametrize("kind", SHARING)
def test_one_wish_stops_all_ranks_at_the_same_step(said: Said, kind: str) -> None:
    assert [each["steps"]["stops"] for each in said[kind]] == [[False, False, True, False]] * KINDS[kind][0]


@pytest.mark.parametrize("kind", SHARING)
def test_an_overflow_on_one_rank_skips_the_step_on_all(said: Said, kind: str) -> None:
    for each in said[kind]:
        assert each["overflow"]["is_skipped"]
        assert each["overflow"]["scales"] == [2.0**13, 2.0**13, 2.0**14], "halved, and doubled after two good steps"


@pytest.mark.parametrize("kind", SHARING)
def test_moments_have_their_names_right_after_an_evaluation_too(said: Said, kind: str) -> None:
    """A run that is stopped in an evaluation is saved there."""
    (alone,) = said["single"]
    assert "model.blocks.0.wide.weight" in alone["steps"]["moments"]
    assert all(each["steps"]["moments"] == alone["steps"]["moments"] for each in said[kind])


@pytest.mark.parametrize("kind", SHARING)
def test_ranks_without_samples_take_part_in_an_evaluation(said: Said, kind: str) -> None:
    (alone,) = said["single"]
    for each in said[kind]:
        for found, expected in zip(each["steps"]["evaluations"], alone["steps"]["evaluations"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["zero2", "fsdp2"])
def test_with_moments_in_host_memory_it_is_the_same_step(said: Said, kind: str) -> None:
    for plain, offloaded in zip(said[kind], said[f"{kind}_offload"], strict=True):
        assert offloaded == plain, "losses, norms, weights and scales, in all their digits"
