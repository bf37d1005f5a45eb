"""Whatever words a person types, a grid is made of them or one sentence says what is wrong: never a traceback."""

from __future__ import annotations

import random

import pytest

from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid
from tests.unit.config.compose.completion_fuzz import Words

pytestmark = pytest.mark.usefixtures("no_slurm")


def _refusal(words: list[str]) -> str | None:
    try:
        freeze_grid(words)
    except ConfigError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"a traceback instead of a sentence: {words}") from error
    return None


def _play(seed: int, count: int) -> None:
    num_right = 0
    for number in range(count):
        words = Words(random.Random(f"{seed}/{number}")).make()
        said = _refusal(words)
        assert said is None or said.strip(), (seed, number, words)
        num_right += said is None
    print(f"seed {seed}: {count} command lines, {num_right} of them right")


@pytest.mark.long
def test_no_words_lead_to_a_traceback() -> None:
    _play(20, 40)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_no_words_lead_to_a_traceback_in_many_tries(seed: int) -> None:
    _play(seed, 1000)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "words",
    [
        ["++cluster.setup=[[[]]]", "cluster=slurm"], ["+cluster.env={a:{b:{}}}"], ["optim.betas=[[0.5],0.9]"],
        ["~debug=shuffle(a,b)"], ["trust=[[x]]"], ["seed=range(0,10,0)"], ["optim.lr=interval(1,2),3"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_words_that_led_to_one(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        freeze_grid(words)
