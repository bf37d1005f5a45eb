"""Tensor parallel, FSDP over it, and HSDP take the steps of one rank: losses, norm, vote, guard, scaler, saves."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.parallel.mesh_builders import KINDS, TOLERANCE
from tests.unit.training.ranks import has_long, run_child, said_by

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1000)]
Said = dict[str, list[dict[str, Any]]]
# In `make test` the first of each sort; the others with the long tests.
SAMPLE = ["single", "tp"]


def _kinds(*left_out: str) -> list[Any]:
    return [
        pytest.param(kind, marks=[] if kind in SAMPLE else pytest.mark.long) for kind in KINDS if kind not in left_out
    ]


def _pairs() -> list[Any]:
    return [
        pytest.param(source, goal, marks=[] if {source, goal} <= set(SAMPLE) and goal != "tp" else pytest.mark.long)
        for source, goal in product(KINDS, KINDS)
    ]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the ranks of the kinds that are needed, which are all if a long test was chosen."""
    path = tmp_path_factory.mktemp("mesh")
    run_child(Path(__file__).with_name("mesh_step_child.py"), path, *(KINDS if has_long(request) else SAMPLE))
    return path


@pytest.fixture(scope="module")
def said(folder: Path) -> Said:
    return said_by(KINDS, folder)


@pytest.mark.parametrize("kind", _kinds("single"))
def test_the_curve_is_that_of_one_rank(said: Said, kind: str) -> None:
    alone = said["single"][0]["steps"]
    assert alone["losses"][0] > alone["losses"][-1]
    for each in said[kind]:
        assert each["steps"]["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
        assert each["steps"]["norms"] == pytest.approx(alone["norms"], rel=TOLERANCE)
        assert each["steps"]["norms"] == said[kind][0]["steps"]["norms"], "the same bits on all ranks"
        assert each["steps"]["evaluation"] == pytest.approx(alone["evaluation"], rel=TOLERANCE)


@pytest.mark.parametrize("kind", _kinds("single"))
def test_one_wish_stops_all_ranks_at_the_same_step(said: Said, kind: str) -> None:
    assert [each["steps"]["stops"] for each in said[kind]] == [[False, False, True, False, False]] * KINDS[kind][0]


@pytest.mark.parametrize("kind", _kinds("single", "hsdp"))
def test_an_overflow_in_one_rank_s_part_skips_the_step_on_all(said: Said, kind: str) -> None:
    """Of a weight that is not the first: torch agrees as the first one is placed."""
    assert [each["overflow"] for each in said[kind]] == [[2.0**13, 2.0**13, 2.0**14]] * KINDS[kind][0]


@pytest.mark.parametrize("kind", _kinds("single", "hsdp"))
def test_a_gradient_that_is_no_number_on_one_rank_is_skipped_by_all(said: Said, kind: str) -> None:
    expected = {"is_same": True, "has_moved": True, "total": 1}
    assert [each["not_finite"] for each in said[kind]] == [expected] * KINDS[kind][0]


@pytest.mark.parametrize("kind", _kinds("single"))
def test_moments_in_host_memory_change_no_bit(said: Said, kind: str) -> None:
    assert [each["offloaded"] for each in said[kind]] == [[True, True, True]] * KINDS[kind][0]


@pytest.mark.long
def test_dropout_is_alike_on_tensor_parallel_neighbours_and_on_no_others(said: Said) -> None:
    """Of the same samples a rank's loss tells the masks apart."""
    first, second = (each["randomness"]["none"] for each in said["tp"])
    assert first == second, "loss, norm and the state of the random stream"
    places = [each["randomness"]["none"] for each in said["fsdp_tp"]]
    assert places[0] == places[1]
    assert places[2] == places[3]
    assert places[0][2] != places[2][2], "other data-parallel ranks have streams of their own"


def test_recomputed_layers_draw_the_same_numbers_again(said: Said) -> None:
    for each in said["tp"]:
        assert each["randomness"]["full"] == each["randomness"]["none"]
        assert each["randomness"]["selective"] == each["randomness"]["none"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "scope"), [("tp", "blocks"), ("tp_ddp", "blocks"), ("fsdp_tp", "blocks"), ("tp", "model")]
)
def test_compiled_layers_take_the_same_steps(said: Said, kind: str, scope: str) -> None:
    for each in said[kind]:
        plain, compiled = each["compiled"]["None"]["plain"], each["compiled"][scope]["plain"]
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)
        assert compiled["norms"] == pytest.approx(plain["norms"], rel=TOLERANCE)
        assert compiled["graphs"] == 1, "three layers of one shape, or all as one"
        assert each["compiled"][scope]["dropout"]["losses"] != plain["losses"]
    neighbours = zip(said[kind][::2], said[kind][1::2], strict=True)
    for one, other in neighbours:
        assert one["compiled"][scope]["dropout"] == other["compiled"][scope]["dropout"], "drawn alike"


@pytest.mark.parametrize("kind", _kinds("single"))
def test_averaged_weights(said: Said, kind: str) -> None:
    """Each rank averages its parts: together they are one rank's, and so is an evaluation with them."""
    alone = said["single"][0]["steps"]
    assert len(alone["average"]) > 10
    for each in (one["steps"] for one in said[kind]):
        assert each["average"].keys() == alone["average"].keys()
        for name, average in alone["average"].items():
            assert each["average"][name] == pytest.approx(average, rel=1e-4, abs=2e-4), name
        assert each["averaged"] == pytest.approx(alone["averaged"], rel=TOLERANCE)
        assert each["averaged"]["eval_loss"] != each["evaluation"]["eval_loss"]
        assert each["again"] == each["evaluation"], "the same bits: the weights came back"


@pytest.mark.parametrize(("source", "goal"), _pairs())
def test_any_mesh_loads_what_any_other_saved(folder: Path, said: Said, source: str, goal: str) -> None:
    """Weights and moments, bit for bit; weights have one name each, those of one rank."""
    saved = said[source][0]["steps"]["saved"]
    assert json.loads((folder / f"loaded-{goal}.json").read_text())[source] == saved
    assert saved.keys() == said["single"][0]["steps"]["saved"].keys()
    assert "/optimizer/state/model.blocks.0.attention.query_key_value.weight/exp_avg" in saved
