"""A value of another type than its key's: the sentence says the rule, the value, and what to type instead."""

from __future__ import annotations

import re

import pytest

from hpc_trainer.config.keys import DEFAULTS
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid

_APART = "Several values are parted by commas, without brackets or spaces."
_DIGITS = "must be a whole number, written with digits alone."


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.lr=[1e-3,2e-3]", f"must be one number. {_APART} Use optim.lr=1e-3,2e-3."),
        ("optim.lr=1e-3 2e-3", f"must be a number. {_APART} Use optim.lr=1e-3,2e-3."),
        ("seed=1 2", f"must be a whole number. {_APART} Use seed=1,2."),
        ("train.num_steps=1e3", f"{_DIGITS} Use train.num_steps=1000."),
        ("train.micro_batch_size=8.0", f"{_DIGITS} Use train.micro_batch_size=8."),
        ("train.num_steps=2.7", "must be a whole number. Use train.num_steps=3."),
        ("train.num_steps=inf", "must be a whole number. Use train.num_steps=200."),
        ("train.num_steps=nan", "must be a whole number. Use train.num_steps=200."),
        ("train.num_steps=10k", "must be a whole number. Use a value as train.num_steps=200."),
        ("optim.lr=fast", "must be a number. Use a value as optim.lr=0.001."),
        ("train.deterministic=maybe", "must be true or false. Use train.deterministic=true."),
        ("optim.betas=0.9", "must be a list. Use 'optim.betas=[0.9,0.95]'."),
        ("cluster.setup=true", "must be a list. Use 'cluster.setup=[A,B]'."),
        ("experiment_name=null", "must be one text. Use a value as experiment_name=train."),
        ("hardware.source=[1,x]", "must be one text. Use a value as hardware.source=NAME."),
        ("train.num_steps=null", "must be a whole number. Use a value as train.num_steps=200."),
        ("cluster.env=0.9", "must be names with values. Add them one by one: +cluster.env.NAME=VALUE."),
        ("schedule.name=0.9", "no such choice. Valid: constant, linear, cosine, wsd, step, one_cycle."),
        ("model=[mlp,cnn]", "is a list, and a run has one model. Use model=mlp,cnn for several."),
        ("schedule=[cosine,linear]", "is a list, and a run has one schedule. Use schedule=cosine,linear for several."),
    ],
)
def test_a_value_of_another_type(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        freeze_grid([word])
    assert str(error.value) in (f"{word} {message}", f"{word}: {message}")


def test_a_mapping_for_free_keys() -> None:
    with pytest.raises(ConfigError) as error:
        freeze_grid(["cluster.env={a:1}"])
    assert str(error.value) == "cluster.env.a: a new key of cluster.env is added with +cluster.env.a=VALUE."


@pytest.mark.long  # 0.15 s a word
@pytest.mark.timeout(900)
@pytest.mark.parametrize("value", ["0.9", "[1,x]", "{a:1}", "null"])
def test_no_key_answers_with_raw_words_of_the_library(value: str) -> None:
    said = [_said(f"{name}={value}") for name in DEFAULTS]
    raw = [each for each in said if re.search(r"not Optional|Cannot |Invalid |<enum|in struct|ListConfig", each)]
    assert raw == ["configuration: Cannot assign int to Dict[str, Any]"] * (value == "[1,x]")  # sweep.zip


def _said(word: str) -> str:
    try:
        freeze_grid([word])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["optim.lr=1e-3,"], "optim.lr=1e-3"),
        (["optim.lr=1e-3,", "seed=1"], "optim.lr=1e-3"),
        (["seed=,1,,2,"], "seed=1,2"),
        (["optim.lr=(1e-3,2e-3)"], "optim.lr=1e-3,2e-3"),
        (["optim.lr=1e-3;2e-3"], "optim.lr=1e-3,2e-3"),
        (["model=mlp,"], "model=mlp"),
    ],
)
def test_commas_and_brackets_that_the_grammar_does_not_read(words: list[str], fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        freeze_grid(words)
    assert str(error.value) == (
        f"{words[0]}: several values are parted by single commas, without brackets or spaces. Use {fix}."
    )
    freeze_grid([fix])
