"""From typed to plain and back, for every model with every data set and optimizer."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from typing import Any

import pytest
from omegaconf import OmegaConf

from hpc_trainer.config.load import from_plain, to_plain
from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS, variant_of
from hpc_trainer.errors import ConfigError
from tests.unit.record.builders import make_config


def _variants(group: str) -> list[Any]:
    made = [node() for node in VARIANTS[group].values()]
    for each in made:
        if getattr(each, "_target_", "") == "???":
            each._target_ = "my.thing.Net"
            each.kwargs = {"width": 3, "names": ["a", None], "deep": {"x": 0.5}}
    return made


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("model", "data", "task", "optim"),
    [
        # Each choice once or more: those of a group meet each of another over the rows, not all in all.
        *itertools.islice(zip(*(itertools.cycle(_variants(group)) for group in VARIANTS), strict=False), 33),
    ],
    ids=lambda each: type(each).__name__.removesuffix("Config"),
)
def test_round_trip(model: Any, data: Any, task: Any, optim: Any) -> None:
    config = dataclasses.replace(make_config(), model=model, data=data, task=task, optim=optim)
    config.precision.compute_dtype = Dtype.fp16
    plain = json.loads(json.dumps(to_plain(config)))
    assert plain == OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    back = from_plain(plain)
    assert back == config
    assert [type(getattr(back, group)) for group in VARIANTS] == [type(model), type(data), type(task), type(optim)]
    assert to_plain(back) == plain


def test_a_variant_is_told_by_its_fields() -> None:
    for group, variants in VARIANTS.items():
        for node in variants.values():
            assert variant_of(group, dataclasses.asdict(node())) is node


def test_variants_of_the_same_fields_are_told_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = VARIANTS["optim"]["adamw"]
    twin = dataclasses.make_dataclass("TwinConfig", [("name", str, "twin")], bases=(known,), kw_only=True, slots=True)
    monkeypatch.setitem(VARIANTS, "optim", {"twin": twin, **VARIANTS["optim"]})
    assert variant_of("optim", dataclasses.asdict(twin())) is twin
    assert variant_of("optim", dataclasses.asdict(known())) is known


def test_a_spec_of_before_some_fields_is_of_the_kind_that_its_target_builds() -> None:
    """A gpt had fewer fields once than a vit has now, which has all of these."""
    fields = ("name", "_target_", "num_layers", "num_heads", "embed_dim", "dropout")
    older = {name: value for name, value in to_plain(TrainConfig(model=GptConfig()))["model"].items() if name in fields}
    assert len(older) == len(fields)
    assert variant_of("model", older) is GptConfig


def _plain() -> dict[str, Any]:
    return copy.deepcopy(to_plain(make_config()))


@pytest.mark.parametrize(
    ("section", "key", "value", "word"),
    [
        ("train", "new_key", 1, "new_key"),
        ("model", "new_key", 1, "new_key"),
        ("train", "num_steps", "many", "many"),
        ("precision", "compute_dtype", "fp6", "fp6"),
    ],
)
def test_a_frozen_configuration_of_another_version_is_refused(section: str, key: str, value: Any, word: str) -> None:
    plain = _plain()
    plain[section][key] = value
    with pytest.raises(ConfigError, match=f"frozen configuration does not fit(.|\n)*{word}"):
        from_plain(plain)


def test_a_frozen_configuration_without_a_section_is_refused() -> None:
    plain = _plain()
    del plain["optim"]
    with pytest.raises(ConfigError, match="frozen configuration does not fit"):
        from_plain(plain)


def test_plain_values_hold_no_enum_and_no_dataclass() -> None:
    def leaves(tree: Any) -> list[Any]:
        if isinstance(tree, dict):
            return [leaf for value in tree.values() for leaf in leaves(value)]
        return [leaf for value in tree for leaf in leaves(value)] if isinstance(tree, list) else [tree]

    assert {type(leaf) for leaf in leaves(_plain())} <= {str, int, float, bool, type(None)}
    assert isinstance(from_plain(_plain()), TrainConfig)
