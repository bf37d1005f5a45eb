"""Registers the schemas with Hydra, and maps the `name` of a model, data set, task or optimizer to its dataclass."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpc_trainer.config.schema import data, model, optim, task
from hpc_trainer.config.schema.data.shipped import DataConfig
from hpc_trainer.config.schema.model.shipped import ModelConfig
from hpc_trainer.config.schema.train import TrainConfig

if TYPE_CHECKING:  # a rank reads frozen specs by the table below, and waits for neither library
    from omegaconf import DictConfig


def _variants(base: Any, *schemas: ModuleType) -> dict[str, type]:
    """The dataclasses of modules that are kinds of `base`, by their family, or by the name that each has where nobody
    sets it. `base` itself is one if it has a name.
    """
    found: list[Any] = [each for schema in schemas for each in vars(schema).values() if isinstance(each, type)]
    kinds = [each for each in found if issubclass(each, base)]
    return {getattr(kind, "family", None) or kind().name: kind for kind in kinds if kind().name != "???"}


def _modules(package: ModuleType) -> list[ModuleType]:
    """All of its files, what we ship without files of a person's first."""
    names = sorted((each.name for each in pkgutil.iter_modules(package.__path__)), key=lambda name: name != "shipped")
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


# group -> schema name -> dataclass. `conf/<group>/<choice>.yaml` names its schema in its defaults list.
VARIANTS: dict[str, dict[str, type]] = {
    "model": _variants(ModelConfig, *_modules(model)),
    "data": _variants(DataConfig, *_modules(data)),
    "task": _variants(task.TaskConfig, task),
    "optim": _variants(optim.OptimConfig, optim),
}


# Keys of the root that take names of the person's own, without `+`.
FREE_KEYS = frozenset({"params"})
_PROVIDER = "hpc_trainer"


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
    found = [store.repo.get("schema.yaml")]
    found += [
        store.repo.get(group, {}).get(f"{name}_schema.yaml") for group, names in VARIANTS.items() for name in names
    ]
    if all(getattr(each, "provider", None) == _PROVIDER for each in found):  # anew it takes 0.05 s
        return
    store.store(name="schema", node=root_schema(), provider=_PROVIDER)
    for group, variants in VARIANTS.items():
        for name, node in variants.items():
            store.store(group=group, name=f"{name}_schema", node=node, provider=_PROVIDER)


def variant_of(group: str, values: Mapping[str, Any]) -> type:
    """The dataclass of `group` that has the field names of `values`: the one that is built by the same `_target_`, then
    the one with the fewest others; of equals that of its name.

    Frozen specs hold plain values only; the field names tell the variants of a group apart. A spec that was frozen
    before a field existed lacks it, and has its default.

    Raises:
        KeyError: no variant has these fields.
    """
    fields = {name: {each.name for each in dataclasses.fields(node)} for name, node in VARIANTS[group].items()}
    fitting = [name for name, known in fields.items() if values.keys() <= known]
    if not fitting:
        raise KeyError(f"no {group} schema has the fields {sorted(values)}")
    target = values.get("_target_", "")

    def rank(name: str) -> tuple[bool, int, bool]:
        is_other = getattr(VARIANTS[group][name](), "_target_", "") != target
        return is_other, len(fields[name]), name != values.get("name")

    return VARIANTS[group][min(fitting, key=rank)]
