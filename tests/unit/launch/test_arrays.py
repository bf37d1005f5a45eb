"""Arrays of legal size, as many as there is room for; array_parallelism over all of them."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_trainer.launch.arrays import ActiveArray, ArrayPlan, Fitted, fit
from hpc_trainer.slurm.limits import Limits, SubmitCap
from tests.unit.record.builders import make_specs

SPECS = make_specs(60, "cluster=slurm")
GPU_SPECS = make_specs(5, "cluster=slurm", "hardware=gpu_x1")


def _array(count: int, parallelism: int = 256) -> ArrayPlan:
    specs = tuple(SPECS[:count])
    return ArrayPlan(hardware="cpu_x1", shape=specs[0].shape, specs=specs, parallelism=parallelism)


def _limits(room: int | None = None, size: int | None = None) -> Limits:
    caps = {} if room is None else {"normal": (SubmitCap(name="GrpSubmitJobs of QOS normal", limit=room + 7, used=7),)}
    return Limits(max_array_size=size, qos_caps=caps)


def _sizes(fitted: Fitted) -> list[int]:
    return [len(array.specs) for array in fitted.now]


def test_without_limits_nothing_is_cut() -> None:
    fitted = fit([_array(60)], Limits())
    assert (_sizes(fitted), fitted.waiting, fitted.binding) == ([60], (), ())


def test_chunks_of_max_array_size_in_order() -> None:
    fitted = fit([_array(60)], _limits(size=21))
    assert _sizes(fitted) == [21, 21, 18]
    assert [spec for array in fitted.now for spec in array.specs] == SPECS
    assert fitted.binding == ("MaxArraySize is 21: 60 runs on cpu_x1 are 3 arrays",)
    tasks = dataclasses.replace(_limits(size=1001), max_array_tasks=25)
    assert _sizes(fit([_array(60)], tasks)) == [25, 25, 10]


def test_what_has_no_room_waits_and_one_job_is_kept_for_the_top_up() -> None:
    fitted = fit([_array(60)], _limits(room=15, size=21))
    assert _sizes(fitted) == [14]
    assert list(fitted.waiting) == SPECS[14:]
    assert fitted.binding == ("GrpSubmitJobs of QOS normal is 22, 7 in use",)
    assert _sizes(fit([_array(15)], _limits(room=15))) == [15], "all fit: no top-up job, nothing kept"
    none = fit([_array(3)], _limits(room=0))
    assert (none.now, len(none.waiting)) == ((), 3)
    one = fit([_array(3)], _limits(room=1))
    assert (_sizes(one), one.keeps_room) == ([1], False), "a run rather than a top-up job without runs"
    two = fit([_array(3)], _limits(room=2))
    assert (_sizes(two), two.keeps_room) == ([1], True)


def test_shapes_share_the_room_of_a_common_limit() -> None:
    gpu = ArrayPlan(hardware="gpu_x1", shape=GPU_SPECS[0].shape, specs=tuple(GPU_SPECS), parallelism=256)
    fitted = fit([_array(4), gpu], _limits(room=8))
    assert [(array.hardware, len(array.specs)) for array in fitted.now] == [("cpu_x1", 4), ("gpu_x1", 3)]
    assert list(fitted.waiting) == GPU_SPECS[3:]


def test_parallelism_is_shared_by_the_chunks() -> None:
    assert [array.parallelism for array in fit([_array(60, 8)], _limits(size=20)).now] == [3, 3, 2]
    assert [array.parallelism for array in fit([_array(60)], _limits(size=21)).now] == [21, 21, 18]


def test_fewer_at_once_than_chunks_makes_them_follow_each_other() -> None:
    fitted = fit([_array(60, 2)], _limits(size=15))
    assert [(array.parallelism, array.behind) for array in fitted.now] == [(1, None), (1, None), (1, 2), (1, 2)]


def test_arrays_of_one_hardware_share_whatever_their_shape() -> None:
    longer = make_specs(6, "cluster=slurm", hardware__time_limit_min=90)
    other = ArrayPlan(hardware="cpu_x1", shape=longer[0].shape, specs=tuple(longer), parallelism=8)
    assert [array.parallelism for array in fit([_array(6, 8), other], Limits()).now] == [4, 4]


def test_what_is_at_work_counts() -> None:
    active = ActiveArray(job_id="7", hardware="cpu_x1", parallelism=5, num_active=3)
    (array,) = fit([_array(10, 8)], Limits(), [active]).now
    assert (array.parallelism, array.after) == (5, ())
    most = ActiveArray(job_id="7", hardware="cpu_x1", parallelism=8, num_active=7)
    (array,) = fit([_array(6, 8)], Limits(), [most]).now
    assert (array.parallelism, array.after) == (6, ("7",)), "all of it later rather than one at a time for good"
    (array,) = fit([_array(10, 3)], Limits(), [active]).now
    assert (array.parallelism, array.after) == (3, ("7",)), "begins when the other has ended"
    (array,) = fit([_array(10, 3)], Limits(), [dataclasses.replace(active, hardware="gpu_x1")]).now
    assert (array.parallelism, array.after) == (3, ()), "another shape has its own"


def test_half_of_the_places_is_enough_to_begin_now() -> None:
    half = ActiveArray(job_id="7", hardware="cpu_x1", parallelism=4, num_active=9)
    (array,) = fit([_array(10, 8)], Limits(), [half]).now
    assert (array.parallelism, array.after) == (4, ())


def test_thousands_at_work_are_not_all_named() -> None:
    """sbatch takes the dependency as one argument, which Linux bounds by 128 KiB."""
    many = [
        ActiveArray(job_id=str(10_000_000 + number), hardware="cpu_x1", parallelism=1, num_active=1)
        for number in range(20_000)
    ]
    (array,) = fit([_array(10, 8)], Limits(), many).now
    assert len(":".join(array.after)) < 100_000
    assert array.after[-1] == many[-1].job_id


@settings(max_examples=200)
@given(
    st.integers(1, 60),
    st.integers(1, 70),
    st.one_of(st.none(), st.integers(0, 70)),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_nothing_is_lost_and_no_limit_is_passed(
    count: int, parallelism: int, room: int | None, size: int | None
) -> None:
    fitted = fit([_array(count, parallelism)], _limits(room, size))
    assert [*(spec for array in fitted.now for spec in array.specs), *fitted.waiting] == SPECS[:count]
    submitted = sum(_sizes(fitted))
    kept = bool(fitted.waiting) and fitted.keeps_room
    assert room is None or submitted + kept <= max(room, 1)
    assert not fitted.waiting or submitted == max(0, (room or 0) - kept), "all the room is used"
    assert all(size is None or each <= size for each in _sizes(fitted))
    first = [array for array in fitted.now if array.behind is None]
    assert sum(array.parallelism for array in first) <= parallelism
    assert all(array.parallelism <= len(array.specs) for array in fitted.now)
