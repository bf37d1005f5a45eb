"""Packing of a pool: places by GPUs, cores and memory, slots by runs, and refusals with the nearest that fits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.schema.cluster import BudgetConfig
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.known import Known
from hpc_trainer.launch.plan import SweepPlan, build_plan
from hpc_trainer.launch.pools import pack, slot_shape
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.slurm.limits import Limits, NodeGroup, Partition, SubmitCap
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_spec, make_specs

_NODE = NodeGroup(
    partition="p", num_nodes=4, cpus=64, memory_mb=512_000, gpus={"a100": 4}, features=frozenset()
)  # fmt: skip
_LIMITS = Limits(partitions={"p": Partition(name="p", is_default=True)}, nodes=(_NODE,))


def _runs(count: int = 8, **changes: Any) -> list[RunSpec]:
    settings = {
        "hardware__gpus_per_node": 1, "hardware__cpus_per_gpu": 8, "hardware__mem_gb_per_node": 60.0,
        "hardware__mem_gb_per_gpu": None, "pool__jobs": 2,
    }  # fmt: skip
    return make_specs(count, "cluster=slurm", "hardware=gpu_x1", **{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "per_node"),
    [
        ({}, 4),  # by the GPUs
        ({"hardware__cpus_per_gpu": 32}, 2),
        ({"hardware__mem_gb_per_node": 200.0}, 2),
        ({"pool__jobs": 8}, 1),  # a place without a run would be paid for
        ({"pool__jobs": 3}, 3),
    ],
)
def test_auto_takes_as_many_places_as_the_node_and_the_runs_need(changes: dict[str, Any], per_node: int) -> None:
    packing = pack(_runs(8, **{"pool__per_node": "auto", **changes}), _LIMITS)
    assert (packing.per_node, packing.problems) == (per_node, ())


def test_a_slot_asks_for_all_of_its_places_as_one_task() -> None:
    run = _runs(1)[0].shape
    shape = slot_shape(run, 3)
    assert (shape.gpus_per_node, shape.cpus_per_task, shape.mem_gb_per_node) == (3, 24, 180.0)
    assert (shape.tasks_per_node, shape.ranks_per_task, shape.num_nodes) == (1, 1, 1)
    two_ranks = dataclasses.replace(run, tasks_per_node=2, gpus_per_node=2)
    assert slot_shape(two_ranks, 2).cpus_per_task == 2 * 2 * 8


_SHARED: dict[str, Any] = {"pool__per_gpu": 2, "hardware__cpus_per_gpu": 4}


def test_runs_that_share_a_gpu_keep_their_own_cores_and_memory() -> None:
    packing = pack(_runs(8, pool__per_node=4, **_SHARED), _LIMITS)
    assert (packing.per_node, packing.per_gpu, packing.problems) == (4, 2, ())
    shape = packing.shape
    assert (shape.gpus_per_node, shape.cpus_per_task, shape.mem_gb_per_node) == (2, 16, 240.0)
    by_gpu = _runs(8, hardware__mem_gb_per_node=None, hardware__mem_gb_per_gpu=30.0)[0].shape
    assert slot_shape(by_gpu, 4, 2).mem_gb_per_gpu == 60.0


@pytest.mark.parametrize(
    ("changes", "per_node"),
    [
        ({"hardware__mem_gb_per_node": 10.0}, 8),  # four GPUs of two places
        ({"hardware__mem_gb_per_node": 10.0, "pool__per_gpu": 4}, 16),
        ({}, 8),
        ({"hardware__mem_gb_per_node": 100.0}, 4),  # room for five: a GPU is not requested for one place
        ({"pool__jobs": 6}, 6),  # as many as its runs, on whole GPUs
    ],
)
def test_auto_counts_the_places_on_each_gpu(changes: dict[str, Any], per_node: int) -> None:
    packing = pack(_runs(32, **{**_SHARED, "pool__per_node": "auto", **changes}), _LIMITS)
    assert (packing.per_node, packing.problems) == (per_node, ())
    unknown = pack(_runs(16, **{**_SHARED, "pool__per_node": "auto"}), Limits())
    assert (unknown.per_node, unknown.shape.gpus_per_node) == (2, 1)


def test_with_one_place_a_slot_has_the_places_of_one_gpu_and_the_plan_says_so() -> None:
    packing = pack(_runs(8, **_SHARED), _LIMITS)
    assert (packing.per_node, packing.shape.gpus_per_node, packing.problems) == (2, 1, ())
    assert packing.notes == ("pool.per_gpu=2: each slot has 2 places on one GPU, as pool.per_node is 1.",)


def test_more_runs_on_a_gpu_than_the_node_has_cores_for_are_refused_with_the_most_that_fit() -> None:
    (problem,) = pack(_runs(pool__per_gpu=2, hardware__cpus_per_gpu=64), _LIMITS).problems
    assert problem == (
        "pool.per_gpu=2: a node of partition (the default) has room for 1 such run(s), each with 1/2 GPU, 64 CPU(s), "
        "61440 MB. Use pool.per_gpu=1, or fewer cores or less memory for a run."
    )
    (problem,) = pack(_runs(24, pool__per_gpu=2, pool__per_node=10), _LIMITS).problems
    assert problem.endswith("has room for 8 such run(s), each with 1/2 GPU, 8 CPU(s), 61440 MB. "
                            "Use pool.per_node=8 or auto.")  # fmt: skip


def test_a_shared_gpu_counts_once_in_what_a_plan_may_take(tmp_path: Path) -> None:
    runs = _runs(20, pool__per_node=4, hardware__time_limit_min=60, **_SHARED)
    assert _plan(tmp_path / "s", runs).gpu_hours_max == 4.0, "two slots of two GPUs"
    assert (runs[0].gpu_hours, runs[0].shape.gpu_hours) == (0.5, 1.0)
    grid = dataclasses.replace(make_grid(tmp_path / "s", runs), budget=BudgetConfig(max_gpu_hours=11.5))
    active = {spec.run_id: RunState.RUNNING for spec in grid.specs[:19]}
    problems = build_plan(grid, Known(states=active), limits=_LIMITS).problems
    assert problems == (), "half a GPU for each of 19 runs at work, and a slot of two GPUs for the last"


def test_what_does_not_fit_is_refused_with_the_nearest_that_does() -> None:
    (problem,) = pack(_runs(pool__per_node=6), _LIMITS).problems
    assert problem == (
        "pool.per_node=6: a node of partition (the default) has room for 4 such run(s), each with 1 GPU(s), 8 CPU(s), "
        "61440 MB. Use pool.per_node=4 or auto."
    )
    (problem,) = pack(_runs(hardware__num_nodes=2), _LIMITS).problems
    assert "Use hardware.num_nodes=1 (1 instead of 2 ranks), or leave out pool.jobs." in problem


def test_a_list_of_hardware_is_refused_with_the_first_of_it(tmp_path: Path) -> None:
    words = ("hardware=first:gpu_x1,gpu_x2", "parallel.elastic=true", "pool.jobs=2", "cluster=slurm")
    grid = freeze_grid(["experiment=digits", f"paths.runs_dir={tmp_path}", *words])
    (problem,) = build_plan(grid, limits=_LIMITS).problems
    assert problem == (
        "pool.jobs: hardware=first:gpu_x1,gpu_x2 lets the first job that starts execute a run, but in a pool slots "
        "take "
        "runs. Use hardware=gpu_x1, or leave out pool.jobs."
    )


def test_more_slots_than_the_runs_need_are_not_asked_for() -> None:
    packing = pack(_runs(5, pool__jobs=9, pool__per_node=2), _LIMITS)
    assert packing.slots == 3
    assert packing.notes == ("pool.jobs=9: 3 slot(s) are enough for 5 run(s), 2 a slot.",)


def _plan(folder: Path, runs: list[RunSpec], limits: Limits = _LIMITS) -> SweepPlan:
    return build_plan(make_grid(folder, runs), limits=limits)


def test_a_pool_is_one_array_of_its_slots_whatever_the_number_of_runs(tmp_path: Path) -> None:
    limits = dataclasses.replace(_LIMITS, max_array_size=4)
    (array,) = _plan(tmp_path / "s", _runs(20), limits).arrays
    assert (array.num_elements, array.parallelism, len(array.specs)) == (2, 2, 20)
    plan = _plan(tmp_path / "s", _runs(20, hardware__time_limit_min=60), limits)
    assert plan.gpu_hours_max == 2.0, "of two slots, not of twenty runs"


def test_a_pool_takes_the_room_that_there_is_and_its_runs_wait_if_there_is_none(tmp_path: Path) -> None:
    def capped(used: int) -> Limits:
        return dataclasses.replace(_LIMITS, job_cap=SubmitCap(name="MaxJobCount", limit=10, used=used))

    runs = _runs(20, pool__jobs=4)
    (array,) = _plan(tmp_path / "s", runs, capped(8)).arrays
    assert array.num_elements == 2
    plan = _plan(tmp_path / "s", runs, capped(10))
    assert (plan.arrays, len(plan.waiting)) == ((), 20)


def test_the_pool_is_no_part_of_what_a_run_is() -> None:
    alone, in_pool = (make_spec("cluster=slurm", pool__jobs=jobs) for jobs in (None, 4))
    assert alone.run_id == in_pool.run_id
    assert _runs(1)[0].run_id == _runs(1, pool__per_gpu=4, pool__mps="off")[0].run_id


def test_cores_of_this_machine_may_be_shared_by_more_places_than_there_are() -> None:
    packing = pack(make_specs(9, "cluster=local", pool__jobs=1, pool__per_node=9), Limits())
    assert (packing.per_node, packing.problems) == (9, ())


def test_a_budget_of_jobs_counts_slots_and_not_the_runs_that_they_work_through(tmp_path: Path) -> None:
    grid = dataclasses.replace(make_grid(tmp_path / "s", _runs(20)), budget=BudgetConfig(max_jobs=2))
    assert build_plan(grid, limits=_LIMITS).problems == ()
    active = {spec.run_id: RunState.RUNNING for spec in grid.specs[:19]}
    (problem,) = build_plan(grid, Known(states=active), limits=_LIMITS).problems
    assert "this grid would have 3 jobs" in problem, "two slots at work, and one for the run that is left"


def test_what_is_not_known_of_a_node_bounds_no_place() -> None:
    auto: dict[str, Any] = {"pool__per_node": "auto"}
    unknown = pack(_runs(8, **auto), Limits())
    assert (unknown.slots, unknown.per_node) == (2, 1)
    assert unknown.notes == ("pool.per_node=auto: what a node has is not known, so each slot has 1 place.",)
    assert pack(_runs(8, **auto), _LIMITS).notes == ()
    no_memory = dataclasses.replace(_LIMITS, nodes=(dataclasses.replace(_NODE, memory_mb=1),))
    assert pack(_runs(8, **auto), no_memory).per_node == 4
    assert pack(_runs(8, hardware__mem_gb_per_node=None, **auto), _LIMITS).per_node == 4
    others = (*_LIMITS.nodes, *(dataclasses.replace(_NODE, partition=name, cpus=8) for name in ("a", "z")))
    larger = (*others, *(dataclasses.replace(_NODE, partition=name, gpus={"a100": 8}) for name in ("a", "z")))
    assert pack(_runs(16, **auto), dataclasses.replace(_LIMITS, nodes=larger)).per_node == 4


def test_places_are_of_the_type_of_gpu_that_the_runs_ask_for() -> None:
    nodes = (dataclasses.replace(_NODE, gpus={"a100": 3, "h100": 1}),)
    limits = dataclasses.replace(_LIMITS, nodes=nodes)
    auto: dict[str, Any] = {"pool__per_node": "auto"}
    assert pack(_runs(16, **auto), limits).per_node == 4
    assert pack(_runs(16, hardware__gpu_type="a100", **auto), limits).per_node == 3
    assert pack(_runs(16, hardware__gpu_type="v100", **auto), limits).per_node == 1
