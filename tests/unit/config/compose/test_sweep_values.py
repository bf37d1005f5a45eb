"""Sweeps of Hydra's grammar that a grid cannot step through, and words that a space has parted: what to do instead."""

from __future__ import annotations

import shlex

import pytest

from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.errors import ConfigError
from tests.composed import composed, expand

pytestmark = pytest.mark.usefixtures("no_slurm")


def _message(*words: str) -> str:
    with GridComposer() as composer, pytest.raises(ConfigError) as caught:
        expand(composer, words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "use"),
    [
        ("optim.lr=interval(1e-4,1e-1)", "Use values, as optim.lr=0.0001,0.001,0.01,0.1, or add search=random"),
        ("optim.lr=interval(-1,2)", "Use values, as optim.lr=-1,0,1,2, or add search=random"),
        ("seed=interval(0,5)", "Use values, as seed=0,2,3,5, or add search=random"),
        ("optim.lr=tag(interval(0,0))", "Use values, as optim.lr=0, or add search=random"),
        ("tracker=interval(1,2)", "Use values, as tracker=mlflow,none,tensorboard,wandb, or add search=random"),
        ("optim.lr=interval(1,2),3", "List all values, as optim.lr=1,2,3."),
        ("seed=range(1,3),range(4,6)", "range() cannot be one of several values."),
        ("seed=range(0,10,0)", "a STEP other than 0. Use range(1,4)."),
        ("seed=range(0,inf)", "takes finite numbers"),
        (
            "seed=range(0,1e9)",
            "this range has about 1e+09 values, and a sweep takes at most 100,000. Use a larger step",
        ),
        ("seed=range(0,9000000000)", "at most 100,000"),
        ("seed=range(5,1)", "an axis needs at least one value."),
    ],
)
def test_what_is_no_list_of_values(word: str, use: str) -> None:
    message = _message(word)
    assert message.startswith(word)
    assert use in message


@pytest.mark.parametrize(
    ("words", "whole"),
    [
        (["optim.lr=1e-3,", "3e-3"], "optim.lr=1e-3,3e-3"),
        (["optim.lr=1e-3", ",", "3e-3"], "optim.lr=1e-3,3e-3"),
        (["optim.lr", "=", "1e-3"], "optim.lr=1e-3"),
        (["optim.betas=[0.9,", "0.95]"], "'optim.betas=[0.9,0.95]'"),
        (["model=mlp", "seed=range(1,", "3)"], "'seed=range(1,3)'"),
    ],
)
def test_a_space_makes_two_words(words: list[str], whole: str) -> None:
    assert _message(*words).endswith(f"arguments. Write {whole} without spaces.")


def test_a_space_in_one_word_is_fine() -> None:
    with GridComposer() as composer:
        assert [point.axes for point in expand(composer, ["optim.lr=1e-3, 3e-3"])] == [
            {"optim.lr": "0.001"}, {"optim.lr": "0.003"},
        ]  # fmt: skip


@pytest.mark.parametrize(
    "value", ['mail -s "$HPC_TRAINER_NOTIFY_TEXT" anna', "cat > /tmp/x.$EVENT", "say 'done'; \\date", "'a' b"]
)
def test_a_text_that_needs_quotes_of_its_own(value: str) -> None:
    """The shell takes the outer quotes away."""
    message = _message(f"notify.command={value}")
    assert message.startswith(f"notify.command={value}: Hydra's grammar does not accept this text")
    typed = shlex.split(message.partition("quotes of its own: ")[2].removesuffix("."))
    assert composed(typed).notify.command == value


@pytest.mark.parametrize("word", ["optim.lr", "3", "optim.lr=foo(1)", "seed=choice()", "optim.lr=,"])
def test_a_word_that_is_no_override_is_named(word: str) -> None:
    message = _message("model=mlp", word)
    assert message.startswith(f"{word}: Hydra's grammar does not accept this override: ")
    assert message.endswith("An override has the form KEY=VALUE, as optim.lr=1e-3. Put a value with spaces in quotes.")


@pytest.mark.parametrize(
    "value", ["interval()", "interval(1)", "tag(log,interval(1e-4))", "uniform(0,1)", "loguniform(1e-4,1)"]
)
def test_a_range_without_bounds_or_in_the_words_of_another_tool_gets_our_form(value: str) -> None:
    assert _message(f"optim.lr={value}") == (
        f"optim.lr={value}: a range of a search has a lowest and a highest value. Use optim.lr=interval(LOW,HIGH), or "
        "over orders of magnitude optim.lr=tag(log,interval(LOW,HIGH))."
    )


@pytest.mark.parametrize(
    "word", ["snapshot=-0.0", "data=[1,null]", "+experiment=[[[]]]", "snapshot=['???']", "model=3", "+snapshot=null"]
)
def test_a_choice_is_a_name(word: str) -> None:
    message = _message(word)
    assert message.startswith(f"{word}: a choice of ")
    assert "Valid: " in message
