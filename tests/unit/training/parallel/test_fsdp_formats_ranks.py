"""What FSDP2 gathers, reduces and keeps: messages of a step, losses beside fp32's, votes, saves, resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.parallel.fsdp_ways import NUM_BLOCKS, NUM_STEPS, WAYS, WISH
from tests.unit.training.parallel.mesh_builders import ACCUM
from tests.unit.training.ranks import run_child

pytestmark = [pytest.mark.dist, pytest.mark.long, pytest.mark.timeout(1000)]
Said = dict[str, list[dict[str, Any]]]
TOLERANCE = {"bf16": 2e-3, "fp16": 5e-4}
"""Of losses before the first step that a loss scaler skips, relative, beside the run that gathers and reduces fp32."""
NEW = ["fp32_reduced", "fp32_kept", "bf16_gathered", "bf16_reduced", "bf16_kept", "fp16_reduced", "hsdp", "fsdp_tp"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("formats")
    for world_size in (2, 4):
        run_child(Path(__file__).with_name("fsdp_formats_child.py"), folder, str(world_size))
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(way[0])]
        for name, way in WAYS.items()
    }


@pytest.mark.parametrize("name", NEW)
def test_losses_are_near_those_of_fp32_messages(said: Said, name: str) -> None:
    _, parallel, dtype = WAYS[name]
    usual = said["bf16_four" if name in ("hsdp", "fsdp_tp") else dtype.value][0]
    low = {parallel.param_dtype.value, parallel.reduce_dtype.value} - {"fp32"}
    bad = [step for step in range(1, NUM_STEPS) if said[name][0]["scales"][step] < said[name][0]["scales"][step - 1]]
    end = bad[0] if bad else NUM_STEPS
    assert end >= WISH
    for each in said[name]:
        found, expected = each["losses"][:end], usual["losses"][:end]
        assert found == pytest.approx(expected, rel=max((TOLERANCE[dtype] for dtype in low), default=0.0))
        assert not low or found != expected, "other formats round otherwise"
        assert each["losses"] == said[name][0]["losses"]
        assert each["norms"] == said[name][0]["norms"]
        assert each["evaluation"] == pytest.approx(usual["evaluation"], rel=5e-3)


@pytest.mark.parametrize("name", list(WAYS))
def test_what_a_step_gathers_and_reduces(said: Said, name: str) -> None:
    """Per micro-batch all that belongs to no block once, each block forward and backward; gradients once a step."""
    _, parallel, _ = WAYS[name]
    words = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    gathers = ACCUM * (1 + NUM_BLOCKS * (2 if parallel.reshard_after_forward else 1))
    expected = {
        f"gather {words[parallel.param_dtype.value]}": gathers,
        f"reduce {words[parallel.reduce_dtype.value]}": 1 + NUM_BLOCKS,
    }
    for each in said[name]:
        # After an evaluation the first pass finds whole what that has left so.
        assert each["messages"][1] == expected
        assert each["messages"][-1] == expected


@pytest.mark.parametrize("name", list(WAYS))
def test_one_wish_stops_all_ranks_at_the_same_step(said: Said, name: str) -> None:
    for each in said[name]:
        assert each["stops"] == [step == WISH for step in range(NUM_STEPS)]
    if name.startswith("fp16"):
        assert said[name][0]["scales"][WISH] > 65504, "the vote's gradient is infinite in fp16"


@pytest.mark.parametrize("name", list(WAYS))
def test_a_resumed_run_has_the_same_bits(said: Said, name: str) -> None:
    """Saved in fp32 right after an evaluation."""
    for each in said[name]:
        assert each["resumed"]["losses"] == each["losses"][NUM_STEPS // 2 :]
        assert each["resumed"]["end"] == each["end"]
        whole = {name: value for name, value in each["end"].items() if value.startswith("torch.")}
        tensors = [value for name, value in whole.items() if name != "/ema/n_averaged"]
        assert len(tensors) > 4 * 12 * NUM_BLOCKS, "weights, two moments, averages"
        assert all(value.startswith("torch.float32") for value in tensors)


@pytest.mark.parametrize(("name", "usual"), [("fp32_kept", "fp32"), ("bf16_kept", "bf16_gathered")])
def test_weights_that_stay_whole_change_no_bit(said: Said, name: str, usual: str) -> None:
    assert said[name][0]["losses"] == said[usual][0]["losses"]
    assert said[name][0]["end"] == said[usual][0]["end"]
