"""Figures that were measured on a cluster: where they are kept, which of them count, and what they predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.record.measured import (
    Figures,
    Link,
    is_on_each_rank,
    measured_path,
    read_figures,
    read_measured,
    reduced_bytes,
    write_measured,
)
from tests.unit.record.builders import make_config

LINK = {"ranks": 4, "latency_s": 1e-5, "bus_bytes_per_s": 1e9}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "state"


def test_the_figures_of_a_profile_are_kept_by_cluster(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_measured("lab", "site/a100_x4") is None
    path = write_measured("lab/x", "site/a100_x4", {"day": "2026-11-20"})
    assert path == measured_path("lab/x", "site/a100_x4") == state / "hpc_trainer/hardware/lab_x/site__a100_x4.json"
    assert json.loads(path.read_text()) == read_measured("lab/x", "site/a100_x4") == {"day": "2026-11-20"}
    assert write_measured("lab/x", "site/a100_x4", {"day": "2026-11-21"}) == path
    assert read_measured("lab/x", "site/a100_x4") == {"day": "2026-11-21"}
    monkeypatch.setenv("XDG_STATE_HOME", "")
    assert measured_path("lab", "cpu") == tmp_path / "home/.local/state/hpc_trainer/hardware/lab/cpu.json"


def test_all_figures_are_read() -> None:
    write_measured("lab", "gpu", {
        "day": "2026-11-20",
        "ranks": [{"node": "n1"}, {"node": "n1"}, {"node": "n2"}],
        "all_reduce": {"node": LINK, "across": LINK | {"ranks": 2}},
        "write_bytes_per_s": {"slowest_node": 2, "sum": 3},
        "filesystem": "nfs4",
        "problems": {"GPUs": "one is slow"},
    })  # fmt: skip
    assert read_figures("lab", "gpu") == Figures(
        hardware="gpu", day="2026-11-20", num_nodes=2, links={"node": Link(4, 1e-5, 1e9), "across": Link(2, 1e-5, 1e9)},
        write_bytes_per_s=2.0, filesystem="nfs4", problems={"GPUs": "one is slow"},
    )  # fmt: skip
    assert read_figures(None, "gpu") is None
    assert read_figures("other", "gpu") is None


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"ranks": "two", "all_reduce": [], "write_bytes_per_s": 3, "problems": "none", "filesystem": None},
        {"ranks": [3], "all_reduce": {"node": 3}, "write_bytes_per_s": {"slowest_node": 0}},
        {"all_reduce": {"node": LINK | {"ranks": 0}}, "write_bytes_per_s": {"slowest_node": -1}},
        {"all_reduce": {"node": LINK | {"latency_s": 0}}, "write_bytes_per_s": {"slowest_node": "2"}},
        {"all_reduce": {"node": LINK | {"bus_bytes_per_s": None}}, "write_bytes_per_s": {"slowest_node": True}},
    ],
)
def test_a_figure_that_is_none_counts_as_not_measured(damage: dict[str, Any]) -> None:
    write_measured("lab", "gpu", damage)
    assert read_figures("lab", "gpu") == Figures(hardware="gpu", day="on an unknown day", num_nodes=1)


def test_which_link_ranks_share() -> None:
    node, across, everybody = Link(8, 1.0, 1.0), Link(2, 2.0, 2.0), Link(16, 3.0, 3.0)
    figures = Figures(hardware="gpu", day="d", num_nodes=2, links={"node": node, "across": across, "all": everybody})
    assert [figures.link_on(nodes) for nodes in (1, 2, 3)] == [node, everybody, everybody]
    assert Figures(hardware="gpu", day="d", num_nodes=2, links={"across": across}).link_on(2) == across
    assert Figures(hardware="gpu", day="d", num_nodes=2, links={"across": across}).link_on(1) is None
    assert figures.source == "hardware check gpu --run, d"


def test_the_time_of_an_all_reduce_and_of_a_write() -> None:
    assert Link(4, 0.5, 1e9).seconds(2e9, 4) == 0.5 + 2 * 3 / 4 * 2
    assert Link(4, 0.5, 1e9).seconds(2e9, 1) == 0.5
    figures = Figures(hardware="gpu", day="d", num_nodes=2, write_bytes_per_s=10.0)
    assert [figures.write_s(60, writers) for writers in (0, 1, 2, 3)] == [6.0, 6.0, 3.0, 3.0]
    assert Figures(hardware="gpu", day="d", num_nodes=2).write_s(60, 1) is None


_TP, _PP = {"parallel__tensor_parallel": 2}, {"parallel__pipeline_parallel": 2}


@pytest.mark.parametrize(
    ("overrides", "changes", "on_each", "weight_bytes"),
    [
        (("parallel.strategy=ddp",), {}, True, 4),
        (("parallel.strategy=ddp",), _TP, False, None),
        (("parallel.strategy=ddp",), _PP, False, None),
        (("parallel.strategy=ddp", "parallel.zero1=true"), {}, False, None),
        (("parallel.strategy=ddp", "parallel.comm_hook=bf16"), {}, True, 2),
        (("parallel.strategy=ddp", "parallel.comm_hook=fp16"), {}, True, 2),
        (("parallel.strategy=ddp", "parallel.comm_hook=powersgd"), {}, True, None),
        (("parallel.strategy=fsdp",), _TP, False, None),
        (("parallel.strategy=fsdp",), {"parallel__data_parallel_replicate": 2}, False, None),
        # Weights are gathered twice, or once, and gradients are scattered once: half of an all-reduce each.
        (("parallel.strategy=fsdp",), {}, False, (2 * 4 + 4) / 2),
        (("parallel.strategy=fsdp", "parallel.reshard_after_forward=false"), {}, False, (4 + 4) / 2),
        (("parallel.strategy=fsdp", "parallel.param_dtype=bf16"), {}, False, (2 * 2 + 4) / 2),
    ],
)
def test_what_a_step_sends(
    overrides: tuple[str, ...], changes: dict[str, Any], on_each: bool, weight_bytes: float | None
) -> None:
    config = make_config("cluster=local", "hardware=cpu_x2", *overrides, **changes)
    assert is_on_each_rank(config) is on_each
    assert reduced_bytes(config, 1000) == (None if weight_bytes is None else 1000 * weight_bytes)
