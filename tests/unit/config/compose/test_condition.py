"""Conditions: what they mean, what they refuse, and that nothing in them is ever executed."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.compose.condition import PointValues, read_condition
from hpc_trainer.errors import ConfigError
from tests.unit.record.builders import make_config

_VALUES: dict[str, Any] = {
    "model": "mlp", "optim.lr": 0.01, "hardware": "gpu_x8", "seed": 3, "empty": None, "flag": True, "betas": [0.9, 0.99]
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model == 'mlp' and optim.lr > 1e-3", True), ("model == 'cnn' or seed != 3", False), ("not flag", False),
        ("hardware in ['gpu_x8', 'gpu_x16']", True), ("seed not in (1, 2)", True), ("1 < seed <= 3", True),
        ("seed * 2 + 1 == 7", True), ("seed % 2 == 0", False), ("-seed < 0", True), ("seed / 2 == 1.5", True),
        ("empty == null", True), ("empty < 1 or empty > 1", False), ("empty + 1 == null", True), ("flag == true", True),
        ("'x' in empty", False), ("betas == [0.9, 0.99]", True), ("'gpu' in hardware", True), ("  seed == 3  ", True),
        ("seed // 2 == 1 and seed - 1 == 2", True), ("false or flag", True),
    ],
)  # fmt: skip
def test_what_a_condition_means(text: str, expected: bool) -> None:
    assert read_condition(text).holds(_VALUES.__getitem__) is expected


def test_the_names_are_those_that_are_asked_for() -> None:
    assert read_condition("model == 'mlp' and optim.lr > seed and true").names == {"model", "optim.lr", "seed"}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('id')", "seed.__class__()", "[x for x in seed]", "(lambda: 1)()",
        "seed if flag else 1", "betas[0] == 1", "f'{seed}' == '3'", "seed := 3", "seed = 3", "", "seed ==", "seed is 3",
        "2 ** 9 == 1", "seed << 3 == 1", "{1: 2} == 1", "'a'.upper() == 'A'", "b'x' == 1", "1j == 1",
        "seed == 1; flag",
        "(" * 400 + "seed" + ")" * 400, "x" * 1001, "a\0b", "await seed", "*seed", "... == 1",
    ],
)  # fmt: skip
def test_all_else_is_refused_unread(text: str) -> None:
    with pytest.raises(ConfigError, match="condition"):
        read_condition(text)


@pytest.mark.parametrize(
    "text", ["model < 3", "seed", "seed + 1", "model * 1000000000 == 'x'", "seed and flag", "1 / (seed - 3) == 1",
             "not seed", "flag + 1 == 2", "1 in seed"]
)  # fmt: skip
def test_values_that_do_not_fit_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"condition .*: "):
        read_condition(text).holds(_VALUES.__getitem__)


@pytest.mark.parametrize("sign", ["-", "not "])
def test_however_deep_a_condition_is_it_ends_in_an_answer(sign: str) -> None:
    texts = (
        sign * depth + ("(seed == 3)" if sign == "not " else "seed == 3")
        for depth in range(50, 1000 // len(sign) - 10, 100)
    )
    answers = [_answer(text) for text in texts]
    assert answers[0] is True, "an even number of signs changes nothing"
    for answer in answers:
        assert answer is True or "condition" in str(answer)


def _answer(text: str) -> bool | str:
    try:
        return read_condition(text).holds(_VALUES.__getitem__)
    except ConfigError as error:
        return str(error)


def test_values_of_a_composed_point() -> None:
    config = make_config("model=cnn", "+cluster.env.A=b")
    values = PointValues(config, lambda: {"model": "cnn", "experiment": None, "optim": "adamw"})
    assert values("model") == "cnn"
    assert values("experiment") is None
    assert values("model.num_channels") == 32
    assert values("precision.compute_dtype") == "fp32"
    assert values("cluster.env.A") == "b"
    assert values("cluster.env.B") is None
    assert values("optim.momentum") is None, "a key of another optimizer"
    assert values("seed") == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [("optim.lrr", "Did you mean optim.lr?"), ("modl", "Did you mean model?"), ("train", "is a section.*train.num_st")],
)
def test_a_wrong_name_is_answered_by_the_nearest(name: str, message: str) -> None:
    values = PointValues(make_config(), lambda: {"model": "mlp", "optim": "adamw"})
    with pytest.raises(ConfigError, match=message):
        values(name)
