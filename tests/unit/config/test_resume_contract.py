"""The verdicts of the resume contract are those that the page promises."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.resume_contract import (
    FACTS,
    compare,
    default_facts,
    effect_of,
    flatten,
    lines_of,
    refusal,
)
from hpc_trainer.config.schema.key import Effect
from hpc_trainer.config.store import KEYS
from tests.unit.record.builders import make_config


def test_facts_are_no_keys() -> None:
    assert not {name.partition(".")[0] for name in FACTS} & KEYS.keys()


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("seed", Effect.incompatible), ("model.hidden_dim", Effect.incompatible), ("model.dropout", Effect.schedule),
        ("optim.lr", Effect.schedule), ("optim.name", Effect.incompatible), ("data.num_workers", Effect.safe),
        ("data.seq_len", Effect.incompatible), ("train.num_steps", Effect.schedule), ("cluster.env.X", Effect.safe),
        ("versions.torch", Effect.schedule), ("versions.python", Effect.safe), ("dataset.digest", Effect.incompatible),
        ("params.dim", Effect.incompatible), ("world_size", Effect.schedule), ("code.my_lab", Effect.schedule),
        ("train.something_new", Effect.incompatible), ("nobody.knows", Effect.incompatible),
        ("seedling", Effect.incompatible), ("optimistic", Effect.incompatible), ("checkpointed", Effect.incompatible),
    ],
)  # fmt: skip
def test_the_longest_name_counts_and_unknown_keys_are_assumed_to_be_the_worst(key: str, effect: Effect) -> None:
    assert effect_of(key) is effect


def _facts(*overrides: str, **changes: Any) -> dict[str, Any]:
    return to_plain(make_config(*overrides, **changes))


def test_equal_facts_do_not_differ() -> None:
    assert compare(_facts(), _facts()) == []


def test_the_worst_comes_first_and_is_refused_with_each_line_and_the_one_key() -> None:
    found = compare(
        {**_facts(), "dataset": {"num_samples": 1437}},
        {**_facts(seed=3, optim__lr=0.5, sweep_name="other"), "dataset": {"num_samples": 1400}},
    )
    assert [(each.key, each.effect) for each in found] == [
        ("dataset.num_samples", Effect.incompatible), ("seed", Effect.incompatible),
        ("optim.lr", Effect.schedule), ("sweep_name", Effect.safe),
    ]  # fmt: skip
    message = refusal(found, "checkpoints/step-00000020")
    assert message is not None
    assert "  dataset.num_samples: 1437 -> 1400\n  seed: 0 -> 3\n" in message
    assert message.endswith("checkpoint.allow_changes=[dataset.num_samples,seed]")
    assert "optim.lr" not in message
    assert "begin anew (--fresh, or another sweep_name)" in message
    other = refusal(found, "checkpoints/step-00000020", is_own=False)
    assert other is not None
    assert "begin anew (without checkpoint.resume_from)" in other, "with it, the next start is refused too"


def test_what_is_allowed_goes_on_with_a_warning() -> None:
    was, now = (
        {**_facts(), "dataset": {"digest": "a", "num_samples": 4}},
        {**_facts(seed=3), "dataset": {"digest": "b"}},
    )
    assert refusal(compare(was, now, allow=["dataset"]), "x") is not None
    found = compare(was, now, allow=["dataset", "seed"])
    assert refusal(found, "x") is None
    (line,) = lines_of(found)
    assert line.startswith("WARNING: resumes despite incompatible changes")
    assert "dataset.num_samples: 4 -> (none)" in line
    assert refusal(compare(was, now, allow=["dataset", "see"]), "x") is not None, "a name covers whole words"


def test_more_steps_are_harmless_where_the_learning_rate_does_not_know_the_end() -> None:
    for name, effect in (("constant", Effect.safe), ("cosine", Effect.schedule)):
        was, now = (_facts(f"schedule={name}", train__num_steps=steps) for steps in (10, 20))
        assert [each.effect for each in compare(was, now)] == [effect]
    both = compare(_facts("schedule=constant"), _facts("schedule=cosine", train__num_steps=7))
    assert {each.effect for each in both} == {Effect.schedule}


def test_a_key_that_came_later_is_no_difference_at_its_default() -> None:
    now, config = _facts(), make_config()
    was = {name: value for name, value in now.items() if name != "seed"}
    assert compare(was, now, defaults=default_facts(config)) == []
    (found,) = compare(was, _facts(seed=1), defaults=default_facts(config))
    assert str(found) == "seed: (none) -> 1"
    assert flatten(default_facts(config)).keys() == flatten(now).keys()
