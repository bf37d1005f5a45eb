"""Fused SGD, and RAdam, under FSDP2: the steps of one rank with whole weights, and none where the device says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.ranks import run_child

pytestmark = [pytest.mark.dist, pytest.mark.long]
NAMES = ["nesterov", "momentum", "plain", "radam"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("sgd")
    run_child(Path(__file__).with_name("sharded_sgd_child.py"), folder, "single", "fsdp2")
    names = {"single": ["single-0"], "fsdp2": ["fsdp2-0", "fsdp2-1"]}
    return {kind: [json.loads((folder / f"{each}.json").read_text()) for each in names[kind]] for kind in names}


@pytest.mark.parametrize("name", NAMES)
def test_parts_step_as_the_whole(said: dict[str, list[Any]], name: str) -> None:
    ((alone, _),) = said["single"]
    for steps, _ in said["fsdp2"]:
        assert steps[name][0]["is_fused"] is (None if name == "radam" else True)
        for key, expected in alone[name][0]["weights"].items():
            assert steps[name][0]["weights"][key] == pytest.approx(expected, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_the_device_calls_bad_changes_no_bit(said: dict[str, list[Any]], name: str) -> None:
    for steps, _ in said["fsdp2"]:
        without, with_skipped = steps[name]
        assert with_skipped["is_kept"] == [True, True]
        assert with_skipped["weights"] == without["weights"]


def test_an_overflow_on_one_rank_skips_the_step_on_all(said: dict[str, list[Any]]) -> None:
    for ranks in said.values():
        assert [changed for _, changed in ranks] == [[True, False, True]] * len(ranks)
