"""Box arithmetic against numpy's own slicing, on random tensors, cuts and parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_trainer.training.checkpoint.trees import Box, find_fault, runs


def cut(sizes: list[list[int]]) -> list[Box]:
    """All boxes of the grid whose cells have these lengths along each dimension."""
    boxes = [Box((), ())]
    for lengths in sizes:
        starts = np.cumsum([0, *lengths]).tolist()
        boxes = [
            Box((*box.offsets, start), (*box.lengths, length))
            for box in boxes
            for start, length in zip(starts, lengths, strict=False)
        ]
    return boxes


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(*box, strict=True))


def part(array: Any, box: Box) -> Any:
    return array[slices(box)]


GRIDS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=4)


@st.composite
def inner_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    lengths = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return Box(offsets, lengths)


@given(st.data(), GRIDS)
def test_any_part_is_put_together_from_any_pieces(data: st.DataObject, sizes: list[list[int]]) -> None:
    pieces, shape = cut(sizes), tuple(map(sum, sizes))
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    wanted = data.draw(inner_boxes(shape))
    goal = np.full(wanted.numel, -1)
    for piece in pieces:
        source = part(whole, piece).reshape(-1)
        shared = piece.overlap(wanted)
        if shared is None:
            continue
        last = -1
        for there, here, count in runs(piece, wanted, shared):
            assert there > last, "files are read forwards"
            last = there + count - 1
            assert (goal[here : here + count] == -1).all(), "nothing is read twice"
            goal[here : here + count] = source[there : there + count]
    assert np.array_equal(goal.reshape(wanted.lengths), part(whole, wanted))


@given(st.data(), GRIDS)
def test_an_overlap_is_what_numpy_finds(data: st.DataObject, sizes: list[list[int]]) -> None:
    shape = tuple(map(sum, sizes))
    left, right = (data.draw(inner_boxes(shape)) for _ in range(2))
    marks = np.zeros((2, *shape), dtype=bool)
    for number, box in enumerate((left, right)):
        marks[(number, *slices(box))] = True
    both = marks.all(axis=0)
    shared = left.overlap(right)
    assert both.sum() == (shared.numel if shared else 0)
    if shared:
        assert part(both, shared).all()
    assert shared == right.overlap(left)


def test_rows_that_are_whole_in_both_are_one_run() -> None:
    whole = Box.whole((8, 3, 4))
    assert list(runs(whole, Box((2, 0, 0), (4, 3, 4)), Box((2, 0, 0), (4, 3, 4)))) == [(24, 0, 48)]
    columns = Box((0, 1, 0), (8, 2, 4))
    assert len(list(runs(whole, columns, columns))) == 8
    assert list(runs(Box.whole(()), Box.whole(()), Box.whole(()))) == [(0, 0, 1)]


@given(GRIDS)
def test_a_grid_has_no_fault(sizes: list[list[int]]) -> None:
    assert find_fault(tuple(map(sum, sizes)), cut(sizes)) is None


@given(st.data(), st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3))
def test_any_change_of_a_grid_is_a_fault(data: st.DataObject, sizes: list[list[int]]) -> None:
    boxes, shape = cut(sizes), tuple(map(sum, sizes))
    index, dim = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, len(shape) - 1))
    offsets, lengths = (list(values) for values in boxes[index])
    change = data.draw(st.sampled_from(["gone", "twice", "moved", "longer", "shorter", "flat", "negative"]))
    if change == "gone":
        del boxes[index]
    elif change == "twice":
        boxes.append(boxes[index])
    elif change == "flat":
        boxes[index] = Box(tuple(offsets[1:]), tuple(lengths[1:]))
    else:
        offsets[dim] += {"moved": 1, "negative": -shape[dim] - 1}.get(change, 0)
        lengths[dim] += {"longer": 1, "shorter": -1}.get(change, 0)
        boxes[index] = Box(tuple(offsets), tuple(lengths))
    assert find_fault(shape, boxes) is not None


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (2, 3))], "elements together"),
        ([Box((0, 0), (2, 4)), Box((1, 0), (2, 4))], "overlaps"),
        ([Box((0, 0), (4, 5))], "outside"),
        ([Box((0,), (4,))], "dimensions"),
        ([], "elements together"),
    ],
)
def test_faults_are_named(boxes: list[Box], words: str) -> None:
    assert words in (find_fault((4, 4), boxes) or "")
