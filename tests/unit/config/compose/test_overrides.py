"""The commonest overrides are read without Hydra's parser, and mean the same."""

from __future__ import annotations

import dataclasses

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_trainer.config.compose.overrides import UnusualOverrideError, parse_common, read_line

_PARSER = OverridesParser.create()
_NUMBERS = st.from_regex(r"[-+]?[0-9_]{0,4}(\.[0-9_]{0,3})?([eE][-+]?[0-9]{0,3})?", fullmatch=True)
_WORDS = st.from_regex(r"[A-Za-z_0-9.+-]{1,8}", fullmatch=True)
_VALUES = st.sampled_from(["null", "True", "FALSE", "NaN", "-inf", "", " 1", "1 ", "1\n", "é", "٣", "-", "a b"])
_KEYS = st.sampled_from(["a", "optim.lr", "a-b", "x.0", "$x", "a/b", "_", "é", "a.", " a", "model@x", "+a", "~a"])


@settings(max_examples=400)
@given(_KEYS, _NUMBERS | _WORDS | _VALUES)
def test_a_common_override_means_what_hydra_reads(key: str, value: str) -> None:
    text = f"{key}={value}"
    mine = parse_common(text)
    if mine is not None:
        (theirs,) = _PARSER.parse_overrides([text])
        assert mine == dataclasses.replace(theirs, config_loader=None)
        assert type(mine.value()) is type(theirs.value())


@pytest.mark.parametrize("text", ["seed=3", "optim.lr=1e-3", "optim.lr=0.25", "model=cnn", "a.b.c=-7", "x=a-b_c"])
def test_numbers_and_words_need_no_parser(text: str) -> None:
    assert parse_common(text) is not None


@pytest.mark.parametrize("text", ["seed=null", "a=true", "a=1,2", "a='1'", "a=[1]", "a=${b}", "+a=1", "a=1_0", "a=inf"])
def test_all_else_is_left_to_hydra(text: str) -> None:
    assert parse_common(text) is None


@pytest.mark.parametrize("text", ["seed=1,2", "hydra.verbose=true", "hydra/job_logging=none", "hydra={a:1}"])
def test_overrides_that_only_hydra_itself_can_take(text: str) -> None:
    with pytest.raises(UnusualOverrideError):
        read_line(text, _PARSER.parse_overrides, lambda key: False)


@pytest.mark.parametrize(
    ("text", "is_scalar", "is_local"),
    [
        ("optim.lr=1", True, True), ("seed=1", True, True), ("optim.lr=null", True, True),
        ("optim.betas=[1,2]", False, True), ("optim={lr:1}", False, True), ("+cluster.env.A=1", False, True),
        ("~cluster.env.A", False, True), ("cluster.env.A=1", False, True), ("trust=[a]", False, False),
        ("optim.lr=${seed}", False, True), ("optim={lr:${seed}}", False, True), ("optim.name='???'", False, True),
        ("~optim", False, False), ("optim.betas.0=1", False, False), ("optim.name=$\\{seed\\}", False, True),
        ("optim={name:[$\\{seed\\}]}", False, True),
    ],
)  # fmt: skip
def test_how_far_an_override_reaches(text: str, is_scalar: bool, is_local: bool) -> None:
    line = read_line(text, _PARSER.parse_overrides, lambda key: False)
    assert (line.is_scalar, line.is_local) == (is_scalar, is_local)
    assert line.follows == (frozenset({"seed"}) if "seed}" in text or "seed\\}" in text else frozenset())
