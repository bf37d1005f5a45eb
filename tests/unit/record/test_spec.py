"""Frozen runs: written once, read back the same, refused when changed or writable by others."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.schema.cluster import GpuRequest
from hpc_trainer.errors import ConfigError, RunStateError, UntrustedFileError
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.spec import (
    OtherShape,
    append_specs,
    claim_spec,
    drawn_names,
    find_axes,
    join_shapes,
    leaves,
    lost_spec,
    number_text,
    read_drawn,
    read_spec,
    read_specs,
    typed_axes,
)
from hpc_trainer.slurm.shape import shape_of
from tests.unit.record.builders import make_config, make_spec, make_specs


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    (tmp_path / "sweep").mkdir()
    return SweepPaths(tmp_path / "sweep")


def test_round_trip(paths: SweepPaths) -> None:
    specs = [
        *make_specs(3),
        make_spec("experiment=gpt_bytes", "hardware=gpu_x16", "cluster=slurm"),
        make_spec("experiment=resnet_synthetic", axes={"optim.lr": "0.1", "model.name": "'x y'"}),
    ]
    append_specs(paths, specs[:2])
    append_specs(paths, specs[2:])
    assert list(read_specs(paths).values()) == specs
    assert [read_spec(paths, spec.run_id) for spec in specs] == specs
    assert len(paths.specs.read_text().splitlines()) == len(specs)
    for spec in specs:
        assert read_spec(paths, spec.run_id).typed().seed == spec.config["seed"]


def test_a_run_whose_spec_is_lost_asks_for_the_least() -> None:
    shape = lost_spec("cnn-0123456789").shape
    assert (shape.num_nodes, shape.world_size, shape.gpus_per_node, shape.cpus_per_task) == (1, 1, 0, 1)


def test_who_has_the_loop() -> None:
    shared, own = make_spec(), make_spec("train.main=jobs.own_loop.main", "trust=[jobs]")
    program = make_spec("train.command='sh -c true'")
    assert [(spec.is_program, spec.is_own_loop) for spec in (shared, own, program)] == [
        (False, False),
        (False, True),
        (True, True),
    ]


def test_no_sweep_has_no_specs(paths: SweepPaths) -> None:
    assert read_specs(paths) == {}
    with pytest.raises(RunStateError, match="holds no run x"):
        read_spec(paths, "x")


def test_a_run_that_is_not_there(paths: SweepPaths) -> None:
    (spec,) = make_specs(1)
    append_specs(paths, [spec])
    with pytest.raises(RunStateError, match="holds no run other"):
        read_spec(paths, "other")
    with pytest.raises(RunStateError, match="holds no run"):
        read_spec(paths, spec.run_id[:-1])


def test_a_changed_spec_is_refused_by_its_digest(paths: SweepPaths) -> None:
    (spec,) = make_specs(1)
    append_specs(paths, [spec])
    record = json.loads(paths.specs.read_text())
    del record["crc"]
    record["config"]["optim"]["lr"] = 0.002
    paths.specs.write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=rf"{spec.run_id}: the frozen configuration was changed after submission"):
        read_spec(paths, spec.run_id).typed()


def test_a_changed_line_is_refused_by_its_checksum(paths: SweepPaths) -> None:
    (spec,) = make_specs(1)
    append_specs(paths, [spec])
    text = paths.specs.read_text()
    assert '"partition": null' in text
    paths.specs.write_text(text.replace('"partition": null', '"partition": "no"'))
    faults = Faults()
    assert read_specs(paths, faults) == {}
    assert faults == [
        "specs.jsonl line 1 cannot be read: its checksum belongs to another text (if you have edited the line, remove "
        "its last key, crc); no other line has its run"
    ]
    assert read_spec(paths, spec.run_id) == spec, "the copy tells what was frozen"
    paths.specs_copy.unlink()
    with pytest.raises(RunStateError, match=r"no run .* that can be read. specs.jsonl line 1 .*checksum"):
        read_spec(paths, spec.run_id)


def test_a_spec_of_another_version_costs_its_own_run(paths: SweepPaths) -> None:
    (spec,) = make_specs(1)
    append_specs(paths, [spec])
    record = json.loads(paths.specs.read_text())
    del record["crc"]
    record["shape"]["new_field"] = 1
    paths.specs.write_text(json.dumps(record) + "\n")
    other = make_spec(seed=7)
    append_specs(paths, [other])
    faults = Faults()
    assert list(read_specs(paths, faults)) == [other.run_id]
    assert [fault.split(" (")[0] for fault in faults] == [
        "specs.jsonl line 1 cannot be read: it is of another version, or damaged"
    ]
    paths.specs_copy.write_bytes(paths.specs.read_bytes())
    with pytest.raises(RunStateError, match="another version"):
        read_spec(paths, spec.run_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "a/b"}, {"run_id": 7}, {"digest": 7}, {"axes": ["seed"]}, {"axes": {"seed": 0}}, {"overrides": [7]},
        {"overrides": None}, {"shape.num_nodes": 0}, {"shape.tasks_per_node": -1}, {"shape.cpus_per_task": 0},
        {"shape.time_limit_min": 0}, {"shape.ranks_per_task": 0}, {"shape.ranks_per_task": "1"},
        {"shape.gpus_per_node": -1}, {"config.train.num_steps": -1}, {"config.train.num_steps": "9"},
        {"config.train.main": 7}, {"config.hardware.name": ""}, {"config.hardware.name": None},
        {"config.cluster.executor": None}, {"config.cluster.setup": "x"}, {"config.cluster.python": 3},
        {"config.local.max_parallel": "1"}, {"config.paths.group_readable": "no"}, {"others": [{"hardware": "x"}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_line_without_a_checksum_must_have_values_that_a_submit_writes(
    paths: SweepPaths, changes: dict[str, Any]
) -> None:
    (spec,) = make_specs(1)
    append_specs(paths, [spec])
    record = json.loads(paths.specs.read_text())
    del record["crc"]
    paths.specs.write_text(json.dumps(record) + "\n")
    assert read_specs(paths) == {spec.run_id: spec}, "lines of earlier versions have none"
    for key, value in changes.items():
        *sections, name = key.split(".")
        owner = record
        for section in sections:
            owner = owner[section]
        owner[name] = value
    paths.specs.write_text(json.dumps(record) + "\n")
    faults = Faults()
    assert read_specs(paths, faults) == {}
    assert len(faults) == 1
    assert "it is of another version, or damaged" in faults[0]


def test_a_spec_written_before_gpu_request_existed_is_read(paths: SweepPaths) -> None:
    """The line is one that the version before wrote."""
    line = (Path(__file__).resolve().parents[2] / "golden/specs/before_gpu_request.jsonl").read_text()
    assert "gpu_request" not in line
    paths.specs.write_text(line)
    paths.specs.chmod(0o600)
    (old,) = read_specs(paths).values()
    assert old.shape.gpu_request == "gpus_per_node"
    assert old.typed().hardware.gpu_request is GpuRequest.gpus_per_node
    new = make_spec("hardware=gpu_x8", "cluster=slurm")
    assert (old.run_id, old.digest, old.shape) == (new.run_id, new.digest, new.shape)


def test_specs_that_others_may_write_are_refused(paths: SweepPaths) -> None:
    (spec,) = make_specs(1)
    append_specs(paths, [spec])
    paths.specs.chmod(0o666)
    with pytest.raises(UntrustedFileError, match="chmod go-w"):
        read_specs(paths)
    with pytest.raises(UntrustedFileError, match="chmod go-w"):
        read_spec(paths, spec.run_id)


def test_the_newest_spec_of_a_run_counts_for_the_worker_too(paths: SweepPaths) -> None:
    """A run submitted again with a longer time limit has two lines; the worker must not take the old one."""
    old, new = make_spec(hardware__time_limit_min=10), make_spec(hardware__time_limit_min=600)
    assert old.run_id == new.run_id
    append_specs(paths, [old])
    append_specs(paths, [new])
    assert read_specs(paths)[new.run_id] == new
    assert read_spec(paths, new.run_id) == new


def test_a_torn_line_does_not_stop_the_worker(paths: SweepPaths) -> None:
    (spec,) = make_specs(1)
    append_specs(paths, [spec])
    whole = paths.specs.read_bytes()
    paths.specs.write_bytes(whole[: len(whole) // 2])
    append_specs(paths, [spec])
    assert read_spec(paths, spec.run_id) == spec
    assert list(read_specs(paths)) == [spec.run_id]


@pytest.mark.parametrize(
    ("minutes", "given", "lead_s"), [(60, None, 120), (8, None, 120), (4, None, 60), (1, None, 15), (60, 300, 300)]
)
def test_the_warning_comes_early_enough(minutes: int, given: int | None, lead_s: int) -> None:
    config = make_config(hardware__time_limit_min=minutes, cluster__signal_lead_s=given)
    assert shape_of(config).signal_lead_s == lead_s


def test_shapes_of_the_profiles() -> None:
    shape = make_spec("hardware=gpu_x16", "cluster=slurm").shape
    assert (shape.num_nodes, shape.tasks_per_node, shape.gpus_per_node, shape.cpus_per_task) == (2, 8, 8, 8)
    assert shape.world_size == 16
    assert shape.gpu_hours == 16.0
    assert make_spec("hardware=cpu_x2").shape.gpu_hours == 0


def test_the_configuration_of_a_spec_is_read_when_somebody_looks_into_it(paths: SweepPaths) -> None:
    specs = make_specs(20)
    append_specs(paths, specs)
    tracemalloc.start()
    found = read_specs(paths)
    before = tracemalloc.get_traced_memory()[0]
    for spec in found.values():
        dict(spec.config)
    assert tracemalloc.get_traced_memory()[0] > 2 * before, "the configurations were in memory before"
    tracemalloc.stop()
    assert [(spec.num_steps, spec.hardware) for spec in found.values()] == [
        (spec.config["train"]["num_steps"], spec.config["hardware"]["name"]) for spec in specs
    ]
    assert [spec.typed() for spec in found.values()] == [spec.typed() for spec in specs]


def test_a_file_that_was_changed_since_a_spec_was_found_in_it_is_said(paths: SweepPaths) -> None:
    append_specs(paths, make_specs(1))
    (spec,) = read_specs(paths).values()
    paths.specs.write_text("")
    with pytest.raises(RunStateError, match="was changed while it was read"):
        spec.typed()


def test_a_drawn_run_is_claimed_once_and_read_with_the_facts_of_its_draw(paths: SweepPaths) -> None:
    first, second = make_specs(2)
    assert drawn_names(paths, Faults()) == []
    assert claim_spec(paths, 7, second, {"b": 2})
    assert claim_spec(paths, 3, first, {"a": 1})
    assert not claim_spec(paths, 3, second, {"a": 3})
    (paths.drawn / "note.txt").touch()
    names = drawn_names(paths, Faults())
    assert names == ["000003.jsonl", "000007.jsonl"]
    assert [read_drawn(paths.drawn / name) for name in names] == [(first, {"a": 1}), (second, {"b": 2})]
    assert read_spec(paths, second.run_id) == second
    (paths.drawn / names[0]).write_text("{\n")
    faults = Faults()
    assert read_drawn(paths.drawn / names[0], faults) is None
    assert len(faults) == 1
    assert read_drawn(paths.drawn / names[0]) is None
    (paths.drawn / names[1]).chmod(0o666)
    with pytest.raises(UntrustedFileError):
        read_drawn(paths.drawn / names[1])


def test_each_item_of_a_hardware_list_is_a_run_of_its_own() -> None:
    (plain,) = make_specs(1)
    assert plain.on(0) is plain
    assert (plain.on_each(), plain.hardware_names) == ([plain], plain.hardware)
    large = make_spec("hardware=cpu_x2", seed=0)
    other = OtherShape(hardware="cpu_x2", shape=large.shape, sections={"hardware": large.config["hardware"]})
    both = dataclasses.replace(plain, others=(other,))
    second = dataclasses.replace(
        plain, hardware="cpu_x2", shape=large.shape, config={**plain.config, "hardware": large.config["hardware"]}
    )
    assert both.on_each() == [plain, second]
    assert both.hardware_names == f"first:{plain.hardware},cpu_x2"
    with pytest.raises(RunStateError, match="its spec has no hardware number 2"):
        both.on(2)
    here = dataclasses.replace(plain.shape, partition="gpu")
    again = dataclasses.replace(plain, others=(OtherShape(hardware=plain.hardware, shape=here, sections={}),))
    assert again.hardware_names == f"first:{plain.hardware}:{plain.shape.partition or 'default'},{plain.hardware}:gpu"


def test_the_leaves_of_a_configuration() -> None:
    tree = {"a": {"b": 1, "c": {}}, "d": [1], "e": {"f": {"g": None}}}
    assert list(leaves(tree)) == [("a.b", 1), ("a.c", {}), ("d", [1]), ("e.f.g", None)]
    assert list(leaves(tree, without={"e", "b"})) == [("a.b", 1), ("a.c", {}), ("d", [1])]


@pytest.mark.parametrize(
    ("pool", "per_gpu"),
    [(None, 1), ({}, 1), ({"jobs": None, "per_gpu": 4}, 1), ({"jobs": 2}, 1), ({"jobs": 2, "per_gpu": 4}, 4)],
)
def test_runs_share_a_gpu_only_in_a_pool(pool: dict[str, int] | None, per_gpu: int) -> None:
    spec = make_spec("cluster=slurm", "hardware=gpu_x2", hardware__time_limit_min=60)
    spec.config["pool"] = pool
    assert (spec.per_gpu, spec.gpu_hours) == (per_gpu, 2 / per_gpu)


def test_equal_shapes_of_a_hardware_list_are_kept_once() -> None:
    first, second = make_spec("hardware=cpu_x1", seed=0), make_spec("hardware=cpu_x2", seed=0)
    joined = join_shapes([first, second, first, second])
    assert joined.on(0) == first
    (other,) = joined.others
    assert (other.hardware, other.shape, set(other.sections)) == ("cpu_x2", second.shape, {"hardware", "train"})
    assert joined.on(1) == dataclasses.replace(first, hardware="cpu_x2", shape=second.shape, config=second.config)
    assert join_shapes([first]) == first


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e10, "1e10"), (300_000.0, "300000"), (99_999.0, "99999.0"), (100_000.0, "100000"), (-1e6, "-1e6"),
        (1_234_567.0, "1234567"), (0.001, "0.001"), (1e-5, "1e-05"), (1e16, "1e+16"), (1_000_000.5, "1000000.5"),
    ],
)  # fmt: skip
def test_large_whole_numbers_are_shown_as_they_are_typed(value: float, text: str) -> None:
    assert number_text(value) == text
    assert float(text) == value


def test_numbers_of_a_table_are_those_of_the_configuration() -> None:
    spec = make_spec(axes={"optim.lr": "1e-3", "model": "mlp", "seed": "0"}, optim__lr=0.001)
    row = find_axes([spec])[spec.run_id]
    assert typed_axes(spec, row) == {"optim.lr": 0.001, "model": "mlp", "seed": 0}
