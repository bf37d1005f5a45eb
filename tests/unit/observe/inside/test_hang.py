"""Which rank never came to which collective, from records of every kind of end."""

from __future__ import annotations

import dataclasses

import pytest

from hpc_trainer.observe.flight import Flight
from hpc_trainer.observe.hang import join, seconds, size
from tests.unit.observe.inside.flights import entered, flight

IN_812 = "the 812th collective (all-reduce, 4.19 MB, step 41)"
IN_A_LOOP = {rank: flight(rank, 812, is_open=True) for rank in (0, 1, 2)}


def _joined(*found: Flight) -> str | None:
    return join({each.rank: each for each in found}).says


CASES: list[tuple[str, tuple[Flight, ...], str | None]] = [
    (
        "one waits for data",
        (*IN_A_LOOP.values(), flight(3, 811, kind="data_wait", frame="train.py:7 in load")),
        f"rank 3 on node03 never entered {IN_812}, in which ranks 0, 1, 2 waited: it waited for data for 312 s, at "
        "train.py:7 in load.",
    ),
    (
        "one has failed",
        (*IN_A_LOOP.values(), flight(3, 811, error="ValueError", frame="data.py:9 in read")),
        f"rank 3 on node03 never entered {IN_812}, in which ranks 0, 1, 2 waited: it ended with ValueError, at "
        "data.py:9 in read.",
    ),
    (
        "one is many steps behind",
        (*IN_A_LOOP.values(), flight(3, 806, kind="save_stall")),
        None,  # nobody can be in the 807th: the records do not fit each other
    ),
    (
        "one was killed",
        tuple(IN_A_LOOP.values()),
        f"rank 3 left no record that can be read: "
        "killed, lost with the node, with Python's lock held, or damaged. ranks 0, 1, 2 waited in "
        f"{IN_812}.",
    ),
    (
        "all are in the same",
        (*IN_A_LOOP.values(), flight(3, 812, is_open=True)),
        f"all 4 ranks are in {IN_812}: the network, or the library that moves the data, is stuck.",
    ),
    ("nobody waits", tuple(flight(rank, 811) for rank in range(4)), None),
    (
        "one rank alone",
        (flight(0, 0, world=1, kind="evaluation"),),
        "rank 0 on node00: it was in an evaluation for 312 s.",
    ),
    ("one rank alone has failed", (flight(0, 0, world=1, error="ValueError"),), None),  # `why` has the error
]  # fmt: skip


@pytest.mark.parametrize(("flights", "says"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_sentence(flights: tuple[Flight, ...], says: str | None) -> None:
    assert _joined(*flights) == says


@pytest.mark.parametrize(
    ("flights", "rank"),
    [
        ((*IN_A_LOOP.values(), flight(3, 811, kind="data_wait")), 3),
        (tuple(IN_A_LOOP.values()), 3),
        ((*IN_A_LOOP.values(), flight(3, 812, is_open=True)), None),
        ((IN_A_LOOP[0],), None),
        ((flight(0, 0, world=1),), 0),
    ],
)
def test_the_rank_to_look_at(flights: tuple[Flight, ...], rank: int | None) -> None:
    assert join({each.rank: each for each in flights}).rank == rank


def test_no_records_say_nothing() -> None:
    assert join({}).says is None


def test_ranks_whose_code_does_not_agree() -> None:
    other = dataclasses.replace(entered(812, is_open=True), name="broadcast", shape="long[1]")
    strange = dataclasses.replace(flight(3, 811), collectives=(*flight(3, 811).collectives, other))
    says = _joined(*IN_A_LOOP.values(), strange)
    assert says == (
        f"rank 0 on node00 is in {IN_812}, and rank 3 on node03 in the same place in broadcast of long[1]: the "
        "ranks run different code."
    )


def test_who_waits_for_another_is_not_to_blame() -> None:
    """Rank 2 waits for rank 3 in a group of theirs; 0 and 1 wait for both of them."""
    apart = entered(7, is_open=True, group="shard (5)")
    second = dataclasses.replace(flight(2, 811), collectives=(*flight(2, 811).collectives, apart))
    third = dataclasses.replace(
        flight(3, 811, kind="data_wait"), collectives=(*flight(3, 811).collectives, entered(6, group="shard (5)"))
    )
    says = _joined(flight(0, 812, is_open=True), flight(1, 812, is_open=True), second, third)
    assert says is not None
    assert says.startswith("rank 3 on node03 never entered the")
    assert "it waited for data for 312 s" in says


def test_messages_between_two_ranks_are_no_place_in_the_count() -> None:
    received = dataclasses.replace(entered(9000, is_open=True), is_p2p=True, name="recv 0<-1")
    waiting = dataclasses.replace(flight(0, 811, world=2), collectives=(*flight(0, 811).collectives, received))
    assert _joined(waiting, flight(1, 811, world=2)) is None


def test_each_rank_has_a_line() -> None:
    found = join({0: flight(0, 812, is_open=True), 3: flight(3, 811, kind="data_wait")})
    assert list(found.lines) == [
        f"rank 0 on node00 after step 40: it was in a step for 312 s; in {IN_812}, for 312 s",
        "rank 3 on node03 after step 40: it waited for data for 312 s; last the 811th collective (all-reduce, 4.19 MB, "
        "step 41)",
    ]
    many = join({rank: flight(rank, 812, is_open=True, world=512) for rank in range(512)})
    assert len(many.lines) == 7
    assert "506 more ranks" in many.lines[-1]


@pytest.mark.parametrize(
    ("number", "words"), [(8, "8 bytes"), (340_012, "340 kB"), (4_200_000, "4.2 MB"), (8e9, "8 GB")]
)
def test_sizes(number: int, words: str) -> None:
    assert size(int(number)) == words


@pytest.mark.parametrize(("number", "words"), [(0.412, "0.41 s"), (9.96, "10 s"), (311.7, "312 s"), (-1.0, "0 s")])
def test_seconds(number: float, words: str) -> None:
    assert seconds(number) == words
