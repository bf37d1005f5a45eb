"""train.micro_batch_size takes a number, null or auto; and what auto does not go with is said before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import from_plain, to_plain
from hpc_trainer.config.mesh import divisors
from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.schema.train import TrainConfig
from tests.unit.record.builders import make_config


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    """What comes of each word on the command line."""
    with GridComposer() as composer:
        return {
            word: composer.compose_point([f"train.micro_batch_size={word}"]).config.train.micro_batch_size
            for word in ("auto", "8", "'8'", "null", "${train.global_batch_size}", "Auto")
        }


def test_the_command_line_takes_words_and_numbers(composed: dict[str, Any]) -> None:
    expected = {"auto": "auto", "8": 8, "'8'": 8, "null": None, "${train.global_batch_size}": 64, "Auto": "Auto"}
    assert composed == expected
    assert all(type(composed[word]) is type(value) for word, value in expected.items())


def _valid(*words: str, **changes: Any) -> TrainConfig:
    config = make_config("cluster=local", *words, **changes)
    validate(config)
    return config


def test_auto_stays_until_the_run_knows_and_survives_the_freezer() -> None:
    config = _valid(train__micro_batch_size="auto")
    assert (config.train.micro_batch_size, config.train.grad_accum_steps) == ("auto", None)
    assert (config.train.is_batch_auto, config.train.given_micro_batch_size) == (True, None)
    assert from_plain(to_plain(config)).train == config.train
    assert _valid().train.given_micro_batch_size == 64


def test_auto_is_a_run_of_its_own_and_its_margin_counts_once_it_is_set() -> None:
    kinds: list[dict[str, Any]] = [{}, {"train__micro_batch_size": "auto"}, {"train__micro_batch_size": 32},
             {"train__micro_batch_size": "auto", "train__memory_margin": 0.2}]  # fmt: skip
    digests = [config_digest(to_plain(_valid(**changes))) for changes in kinds]
    assert len(set(digests)) == len(kinds)


MISTAKES: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((), {"train__micro_batch_size": "abc"}, "train.micro_batch_size='abc' must be a number ≥ 1, auto or null"),
    ((), {"train__micro_batch_size": 0}, "train.micro_batch_size=0 must be at least 1"),
    ((), {"train__grad_accum_steps": 2}, "not go with train.grad_accum_steps=2: it also chooses that number. Use "),
    ((), {"train__logical_ranks": 4}, "train.logical_ranks=4: those promise the same bits on any hardware"),
    ((), {"train__main": "mine.main", "trust": ["mine"]}, "train.main=mine.main: it is part of the shared loop"),
    ((), {"train__memory_margin": 1.0}, "train.memory_margin=1 must be in [0, 1)"),
    ((), {"train__memory_margin": -0.1}, "train.memory_margin=-0.1 must be in [0, 1)"),
    (("hardware=cpu_x2",), {"train__global_batch_size": 65}, "train.global_batch_size=65 must be a multiple of"),
]


@pytest.mark.parametrize(("words", "changes", "message"), MISTAKES, ids=[case[2][:40] for case in MISTAKES])
def test_a_mistake_is_named(words: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    config = make_config("cluster=local", *words, **{"train__micro_batch_size": "auto", **changes})
    problems = "\n".join(find_problems(config))
    assert message in problems
    if "micro_batch_size" not in "".join(changes):
        assert not list(find_problems(make_config("cluster=local", *words, train__micro_batch_size="auto")))


def test_divisors_are_all_and_in_order() -> None:
    assert divisors(1) == [1]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(49) == [1, 7, 49]
