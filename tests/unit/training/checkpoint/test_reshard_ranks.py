"""Any number of ranks and any strategy loads what any other saved: weights, moments and buffers, bit for bit."""

from __future__ import annotations

import functools
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.parallel.shard_builders import KINDS
from tests.unit.training.ranks import run_child

pytestmark = pytest.mark.dist
SAMPLE = ["single", "ddp2", "zero2", "fsdp2"]


def check_cell(folder: Path, source: str, goal: str) -> None:
    saved, loaded = (
        json.loads((folder / name).read_text()) for name in (f"saved-{source}.json", f"loaded-{source}-{goal}.json")
    )
    names = [name for name in saved["shared"] if "exp_avg" in name]
    assert len(names) == 2 * 15, "two moments of each of 15 weights"
    assert loaded["shared"] == saved["shared"]
    world_size, saved_by = KINDS[goal][0], KINDS[source][0]
    expected = saved["own"] if world_size == saved_by else saved["own"][:1] * world_size
    assert loaded["own"] == expected


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    run_child(Path(__file__).with_name("reshard_child.py"), folder, *SAMPLE)
    return folder


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    run_child(Path(__file__).with_name("reshard_child.py"), folder, *KINDS)
    return folder


@pytest.mark.parametrize(("source", "goal"), list(product(SAMPLE, SAMPLE)))
def test_sample(sample: Path, source: str, goal: str) -> None:
    check_cell(sample, source, goal)


@pytest.mark.long
@pytest.mark.parametrize(("source", "goal"), list(product(KINDS, KINDS)))
def test_matrix(matrix: Path, source: str, goal: str) -> None:
    check_cell(matrix, source, goal)


def _sizes(folder: Path, kind: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (folder / kind / "step-00000003").glob("*.safetensors")}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["zero2", "fsdp2"])
def test_moments_in_host_memory_are_written_alike(matrix: Path, kind: str) -> None:
    assert _sizes(matrix, f"{kind}_offload") == _sizes(matrix, kind)


def test_ranks_share_the_writing(sample: Path) -> None:
    """What is sharded lies in the files of its ranks, once; nothing else does."""
    sizes = functools.partial(_sizes, sample)
    assert set(sizes("ddp2")) == {"state.safetensors", "rank-000.safetensors", "rank-001.safetensors"}
    for kind in ("zero2", "fsdp2"):
        assert {"shard-000.safetensors", "shard-001.safetensors"} < set(sizes(kind))
        assert sizes(kind)["state.safetensors"] < sizes("ddp2")["state.safetensors"]
    manifest: dict[str, Any] = json.loads((sample / "fsdp2" / "step-00000003" / "manifest.json").read_text())
    assert len(manifest["sharded"]) == 4 * 15 + 2, (
        "15 weights, tied ones once, with two moments and an average; and the frozen one, with its average"
    )


@pytest.mark.long
def test_two_dimensional_meshes(tmp_path: Path) -> None:
    """HSDP, tensor parallel and FSDP over tensor parallel, each loaded into each other; checked by the child."""
    run_child(Path(__file__).with_name("mesh_child.py"), tmp_path)
    assert json.loads((tmp_path / "said.json").read_text())["cells"] == 5 * 5 * 6
