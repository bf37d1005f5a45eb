"""One small file of a sweep is damaged, in every way, and every verb is given: it costs that file's run at most."""

from __future__ import annotations

import itertools

import pytest

from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.seeds import chosen_seed
from tests.unit.api.damaged_sweeps import BYTES, KINDS, SUBSETS, Bed
from tests.unit.api.tries import VERBS, Tries, bed, expect_nothing_wrong

__all__ = ["bed"]

_SMALL, _FULL = 250, 12_000


def test_an_undamaged_sweep_is_shown_as_it_is(bed: Bed) -> None:
    status = read_status(bed.paths)
    assert status.faults == []
    assert not [run.cause for run in status.runs if run.state is RunState.UNKNOWN]
    tries = Tries(bed, 0)
    for verb in VERBS.values():
        verb(tries, "undamaged", "")
        bed.restore()
    assert tries.wrong == []


@pytest.mark.few(1)
def test_a_sample_of_damage(bed: Bed) -> None:
    tries = Tries(bed, chosen_seed())
    files, kinds, verbs = bed.files(), [*BYTES, *KINDS], list(VERBS)
    for _ in range(_SMALL // 2):
        tries.play(tries.chance.choice(files), tries.chance.choice(kinds), tries.chance.choice(verbs))
    expect_nothing_wrong(tries)


@pytest.mark.few(4)
@pytest.mark.parametrize("gone", SUBSETS, ids=" ".join)
def test_whichever_of_the_sweeps_files_are_gone_under_every_verb(bed: Bed, gone: tuple[str, ...]) -> None:
    tries = Tries(bed, 0)
    for verb in VERBS:
        tries.play(" ".join(gone), "gone", verb)
    expect_nothing_wrong(tries)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_damage_to_what_was_submitted(bed: Bed) -> None:
    """More often than among all files: what decides which element is which run, and whether it is sent again."""
    tries = Tries(bed, chosen_seed())
    files = ["submissions.jsonl", str(bed.paths.intent(bed.uuid).relative_to(bed.paths.folder))]
    for _ in range(2):
        for file, kind, verb in itertools.product(files, (*BYTES, *KINDS), VERBS):
            tries.play(file, kind, verb)
    expect_nothing_wrong(tries)


@pytest.mark.long
def test_damage_to_every_file_under_every_verb(bed: Bed) -> None:
    tries = Tries(bed, chosen_seed())
    table = [(file, kind, verb) for file in bed.files() for kind in (*BYTES, *KINDS) for verb in VERBS]
    tries.chance.shuffle(table)
    for file, kind, verb in table[: _FULL // 2]:
        tries.play(file, kind, verb)
    assert tries.counts["tries"] == _FULL // 2
    expect_nothing_wrong(tries)
