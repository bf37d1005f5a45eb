"""A value of another type than its key's: the sentence says the rule, the value, and what to type instead."""

from __future__ import annotations

import re

import pytest

from hpc_trainer.config.store import DECLARED
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid

_APART = "Separate several values by commas, without brackets or spaces."
_DIGITS = "must be a whole number, written with digits alone."


@pytest.mark.few(7)
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
        ("seed=0..3", "must be a whole number. Use 'seed=range(0,4)' for 0 to 3."),
        ("seed=0-3", "must be a whole number. Use 'seed=range(0,4)' for 0 to 3."),
        ("optim.lr=fast", "must be a number. Use a value as optim.lr=0.001."),
        ("train.deterministic=maybe", "must be true or false. Use a value as train.deterministic=true."),
        ("optim.betas=0.9", "must be a list of numbers. Use 'optim.betas=[0.9,0.95]'."),
        ("search.rungs=$", "must be a list of whole numbers. Use 'search.rungs=[100,200]'."),
        ("replay.data=1e400", "must be a list of values. Use 'replay.data=[A,B]'."),
        ("cluster.setup=true", "must be a list of texts. Use 'cluster.setup=[A,B]'."),
        ("experiment_name=null", "must be one text. Use a value as experiment_name=train."),
        ("hardware.source=[1,x]", "must be one text. Use a value as hardware.source=NAME."),
        ("train.num_steps=null", "must be a whole number. Use a value as train.num_steps=200."),
        ("cluster.env=0.9", "must be names with values. Add them one by one: +cluster.env.NAME=VALUE."),
        ("schedule.name=0.9", "no such choice. Valid: constant, linear, cosine, wsd, step, one_cycle."),
        ("model=[mlp,cnn]", "is a list, but a run has one model. Use model=mlp,cnn for a run of each."),
        (
            "schedule=[cosine,linear]",
            "is a list, but a run has one schedule. Use schedule=cosine,linear for a run of each.",
        ),
    ],
)
def test_a_value_of_another_type(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        freeze_grid([word])
    assert str(error.value) in (f"{word} {message}", f"{word}: {message}")


def test_a_mapping_for_free_keys() -> None:
    with pytest.raises(ConfigError) as error:
        freeze_grid(["cluster.env={a:1}"])
    assert str(error.value) == "cluster.env.a: add a new key of cluster.env with +cluster.env.a=VALUE."


@pytest.mark.long  # 0.15 s a word
@pytest.mark.timeout(900)
@pytest.mark.parametrize("value", ["0.9", "[1,x]", "{a:1}", "null", "${nowhere}"])
def test_no_key_answers_with_raw_words_of_the_library(value: str) -> None:
    assert [each for name in DECLARED if _RAW.search(each := _said(f"{name}={value}"))] == []


_RAW = re.compile(
    r"not Optional|Cannot |Invalid |<enum|in struct|ListConfig|DictConfig|Key '|full_key|object_type|Config'"
)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sweep.zip=[1,x]", " must be a list of names with values. Use 'sweep.zip=[{optim.lr:[0.1,0.2],seed:[1,2]}]'."),
        ("sweep.zip=[[1]]", " must be a list of names with values. Use 'sweep.zip=[{optim.lr:[0.1,0.2],seed:[1,2]}]'."),
        ("sweep.blocks=[{axes:3}]", " must be a list of names with values. Use 'sweep.blocks=[{axes:{optim.lr:[0.1,"),
        ("train=3", ": train is a section. Set its keys one by one, as train.main=VALUE."),
        ("train.guard=null", ": train.guard is a section. Set its keys one by one, as train.guard.on_spike=VALUE."),
        ("seed.x=1", "seed.x: seed is a single value, without keys below it. Use seed=VALUE."),
        (
            "tracker=null",
            ": a choice of tracker must be a name. Did you mean none? Valid: mlflow, none, tensorboard, wandb.",
        ),
        ("++train.guard.nope=1", "train.guard.nope: no such key in train.guard. Valid: max_rollbacks, "),
        ("train.guard={nope:1}", "train.guard.nope: no such key in train.guard. Valid: max_rollbacks, "),
        ("+tracker=none", ": tracker already has a choice, which + cannot replace. Use tracker=none."),
        ("tracker@x=none", ": no choice was made for @x. Use tracker=none."),
        ("~optim.lr", ": a key cannot be removed. Set it instead, as optim.lr=VALUE."),
        ("~sead", ": there is no sead to remove. Did you mean seed?"),
        ("+cluster.env.A={b:1}", "cluster.env.A={b:1} must be one text. Use a value as +cluster.env.A=NAME."),
        ("seed=${sead}", ": the interpolation cannot be resolved: there is no key sead. Did you mean seed?"),
        (
            "seed=${oc.env:NO_SUCH}",
            ": the environment has no NO_SUCH. Set it, or give a default: ${oc.env:NO_SUCH,VALUE}",
        ),
        ("seed=${optim}", ": While dereferencing interpolation '${optim}': its value of type "),
        ("seed=${seed}", ": Recursive interpolation detected. Name one key with one value, as ${train.num_steps}."),
    ],
)
def test_what_was_answered_in_raw_words(word: str, message: str) -> None:
    said = _said(word)
    assert message in said
    assert word.lstrip("+").partition("=")[0] in said
    assert "\n" not in said


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
        f"{words[0]}: separate several values by single commas, without brackets or spaces. Use {fix}."
    )
    freeze_grid([fix])


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("hardware.time_limit_min=24h", "must be a whole number of minutes, without a unit. Use {key}=1440."),
        ("hardware.time_limit_min=1-00:00:00", "must be a whole number of minutes, without a unit. Use {key}=1440."),
        ("hardware.time_limit_min=30:00", "must be a whole number of minutes, without a unit. Use {key}=30."),
        ("hardware.time_limit_min=02:30:00", "must be a whole number of minutes, without a unit. Use {key}=150."),
        ("cluster.signal_lead_s=3min", "must be a whole number of seconds, without a unit. Use {key}=180."),
        ("hardware.mem_gb_per_gpu=64GB", "must be a number of GB, without a unit. Use {key}=64."),
        ("hardware.mem_gb_per_node=512000M", "must be a number of GB, without a unit. Use {key}=500."),
        ("hardware.mem_gb_per_node=1TiB", "must be a number of GB, without a unit. Use {key}=1024."),
        ("hardware.mem_gb_per_node=4 apples", "must be a number. Use a value as {key}=1."),
        ("hardware.num_nodes=2h", "must be a whole number. Use a value as {key}=1."),
    ],
)
def test_a_figure_with_a_unit_is_converted_in_the_message(line: str, rule: str) -> None:
    key = line.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        freeze_grid([line])
    assert rule.format(key=key) in str(caught.value)
