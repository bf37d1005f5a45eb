"""Conditions on columns: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.where import column_named, parse_where

ROW = {
    "optim.lr": 0.01, "seed": 3, "state": "COMPLETED", "eval_loss": 0.5, "flag": True, "activation": "null",
    "val/top-1": 0.7, "odd name": 1, "nan": math.nan, "text": 'a"b\'c', "none": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("optim.lr>1e-3", True), ("optim.lr > 1e-2", False), ("optim.lr>=.01", True), ("1e-3<optim.lr", True),
        ('state=="COMPLETED"', True), ("state='FAILED'", False), ("state!='FAILED'", True), ("seed=3", True),
        ("seed == 3.0", True), ("seed == '3'", False), ("seed in [1, 2, 3]", True), ("seed in (1,2)", False),
        ("seed not in [1]", True), ("not seed in [1]", True), ("not seed == 3", False),
        ("seed==1 or seed==2 or seed==3", True), ("seed==3 and optim.lr>1 or eval_loss<1", True),
        ("seed==3 and (optim.lr>1 or eval_loss>1)", False), ("not (seed==3 and optim.lr>1)", True),
        ("flag==true", True), ("flag == False", False), ("flag == 1", False), ("activation==null", True),
        ("activation != null", False), ("none == null", True), ("none < 1", False), ("none > 1", False),
        ("none == 1", False), ("absent == null", True), ("absent > 1", False), ("val/top-1>=0.7", True),
        ("`odd name`==1", True), ("nan<1", False), ("nan>=1", False), ("nan==nan", False), ("state>1", False),
        ("eval_loss<seed", True), (r"""text=='a"b\'c'""", True), ("seed>-1", True), ("seed<+4", True),
        ("state in ['FAILED', 'COMPLETED']", True), ("flag > 0", False),
    ],
)  # fmt: skip
def test_a_condition_holds_or_not(text: str, holds: bool) -> None:
    assert parse_where(text).holds(ROW) is holds


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("", "at the end"), ("seed", "at the end there should be =="), ("seed ==", "at the end"),
        ("seed == 3 and", "at the end"), ("seed == 3 seed", "at 'seed' there should be and, or, or the end"),
        ("(seed == 3", r"at the end there should be \)"), ("seed == 3)", r"at '\)'"), ("seed === 3", "at '= 3'"),
        ("seed & 1", "at '& 1'"), ("seed in 3", r"at '3' there should be \("), ("seed in []", r"at '\]'"),
        ("__import__('os').system('true')", r"at \"\.system"), ("seed == 3; 1", "at '; 1'"), ("'open", r"at \"'open\""),
        ("seed == lambda: 1", "at"), ("and == 1", "at 'and"), ("3abc == 1", "at '3abc"), ("1 < 2 < 3", "at '< 3'"),
        ("$HOME == 1", r"at '\$HOME"), ("\x00", "at"), ("seed = [1]", r"at '\[1\]'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_grammar_is_refused_at_its_place(text: str, at: str) -> None:
    with pytest.raises(ConfigError, match=rf"--where .*{at}"):
        parse_where(text)


def test_a_wrong_name_gets_the_nearest_column_and_unquoted_text_is_told_apart() -> None:
    columns = ["run_id", "optim.lr", "state", "eval_loss"]
    with pytest.raises(ConfigError, match=r"there is no column optim\.lrr\. Did you mean optim\.lr\? Columns: run_id"):
        parse_where("optim.lrr > 1").fitted_to(columns)
    with pytest.raises(ConfigError, match=r'there is no column COMPLETED\. .*Put text in quotes: "COMPLETED"\.'):
        parse_where("state == COMPLETED").fitted_to(columns)
    parse_where("state == 'x' and eval_loss < 1").fitted_to(columns)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("OPTIM.LR", "optim.lr"), ("lr", "optim.lr"), ("LR", "optim.lr"), ("RUN", "run_id"), ("wall", "wall_s"),
        ("attempts", "attempt"), ("loss", "loss"), ("seed", None), ("best", None),
    ],
)  # fmt: skip
def test_a_heading_is_a_name_of_its_column_if_it_can_mean_only_one(name: str, column: str | None) -> None:
    columns = ["run_id", "optim.lr", "wall_s", "attempt", "loss", "a.seed", "b.seed", "loss.best", "eval_loss.best"]
    assert column_named(name, columns) == column
    condition = parse_where(f"{name} == 1")
    if column is None:
        with pytest.raises(ConfigError, match=f"there is no column {name}"):
            condition.fitted_to(columns)
    else:
        fitted = condition.fitted_to(columns)
        assert (fitted.names, fitted.holds({column: 1}), fitted.holds({column: 2})) == ({column}, True, False)


def test_deep_nesting_is_refused_and_no_crash() -> None:
    for text in ("(" * 5_000 + "seed==3" + ")" * 5_000, "not " * 5_000 + "seed==3"):
        with pytest.raises(ConfigError, match="nested deeper than 50 levels"):
            parse_where(text)
    assert parse_where(" or ".join(["seed==3"] * 2_000)).holds(ROW)


@given(st.text(alphabet="ab.1e-'\"()[]<>=!, nortid`\\\n", max_size=40))
def test_any_text_is_a_condition_or_a_clear_error(text: str) -> None:
    row: dict[str, Any] = {"a": 1, "b": "x"}
    try:
        holds = parse_where(text).holds(row)
    except ConfigError:
        return
    assert holds in (True, False)
