"""A value of another type than its key's: the sentence says the rule, the value, and what to type instead."""

from __future__ import annotations

import pytest

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
        ("model=[mlp,cnn]", "is a list, and a run has one model. Use model=mlp,cnn for several."),
        ("schedule=[cosine,linear]", "is a list, and a run has one schedule. Use schedule=cosine,linear for several."),
    ],
)
def test_a_value_of_another_type(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        freeze_grid([word])
    assert str(error.value) == f"{word} {message}"


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
