"""Registers the schemas with Hydra, and maps the `name` of a model, data set or optimizer to its dataclass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hpc_trainer.config.schema import data, model, optim
from hpc_trainer.config.schema.train import TrainConfig

if TYPE_CHECKING:  # a rank reads frozen specs by the table below, and waits for neither library
    from omegaconf import DictConfig

# group -> schema name -> dataclass. `conf/<group>/<choice>.yaml` names its schema in its defaults list.
VARIANTS: dict[str, dict[str, type]] = {
    "model": {
        "mlp": model.MlpConfig,
        "cnn": model.CnnConfig,
        "resnet": model.ResnetConfig,
        "gpt": model.GptConfig,
        "custom": model.CustomModelConfig,
    },
    "data": {
        "digits": data.DigitsConfig,
        "synthetic_images": data.SyntheticImagesConfig,
        "synthetic_tokens": data.SyntheticTokensConfig,
        "text_bytes": data.TextBytesConfig,
        "custom": data.CustomDataConfig,
    },
    "optim": {
        "sgd": optim.SgdConfig,
        "adamw": optim.AdamwConfig,
        "muon": optim.MuonConfig,
        "custom": optim.CustomOptimConfig,
    },
}


# Keys of the root that take names of the person's own, without `+`.
FREE_KEYS = frozenset({"params"})


def root_schema() -> DictConfig:
    """The typed root; everything in it is closed against new names but `FREE_KEYS`, once Hydra closes the root."""
    from omegaconf import DictConfig, OmegaConf

    root = OmegaConf.structured(TrainConfig)
    assert isinstance(root, DictConfig)
    for key in FREE_KEYS:
        OmegaConf.set_struct(root[key], False)
    return root


def register_schemas() -> None:
    """Makes the schemas known to Hydra under the names that `conf/` uses. Safe to call again."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="schema", node=root_schema(), provider="hpc_trainer")
    for group, variants in VARIANTS.items():
        for name, node in variants.items():
            store.store(group=group, name=f"{name}_schema", node=node, provider="hpc_trainer")


def variant_of(group: str, keys: set[str]) -> type:
    """The dataclass of `group` that has these field names, and the fewest others.

    Frozen specs hold plain values only; the field names tell the variants of a group apart. A spec that was frozen
    before a field existed lacks it, and has its default.

    Raises:
        KeyError: no variant has these fields.
    """
    others = {
        node: {each.name for each in dataclasses.fields(node)} - keys
        for node in VARIANTS[group].values()
        if keys <= {each.name for each in dataclasses.fields(node)}
    }
    if not others:
        raise KeyError(f"no {group} schema has the fields {sorted(keys)}")
    return min(others, key=lambda node: len(others[node]))
