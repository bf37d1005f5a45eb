"""Every schema and every key by its name, and the registration of the schemas with Hydra.

A group such as `model` has several schemas: the `name` of a choice decides which dataclass its section is.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpc_trainer.config.schema import data, model, optim, task
from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.key import Declared, Key, declared_keys
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.domains import contributions

if TYPE_CHECKING:  # a rank reads frozen specs by VARIANTS, and waits for neither Hydra nor OmegaConf
    from omegaconf import DictConfig


def _variants(base: Any, *schemas: ModuleType) -> dict[str, type]:
    """Return the dataclasses of modules that derive from `base`, by their family, or else by their default `name`.

    `base` itself is included if it has a name.
    """
    classes: list[Any] = [value for schema in schemas for value in vars(schema).values() if isinstance(value, type)]
    kinds = [kind for kind in classes if issubclass(kind, base)]
    return {getattr(kind, "family", None) or kind().name: kind for kind in kinds if kind().name != "???"}


def _modules(package: ModuleType) -> list[ModuleType]:
    """Return all modules of a package: `shipped` first, then the other files."""
    names = sorted((file.name for file in pkgutil.iter_modules(package.__path__)), key=lambda name: name != "shipped")
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


# group -> schema name -> dataclass. `conf/<group>/<choice>.yaml` names its schema in its defaults list.
VARIANTS: dict[str, dict[str, type]] = {
    "model": _variants(model.ModelConfig, model),
    "data": {**_variants(DataConfig, data), **{kind().name: kind for kind in contributions("data_sets")}},
    "task": _variants(task.TaskConfig, task),
    "optim": _variants(optim.OptimConfig, optim),
}


# Keys of the root that take names of the user's own, without `+`.
FREE_KEYS = frozenset({"params"})
_PROVIDER = "hpc_trainer"


def root_schema() -> DictConfig:
    """Return the typed root. Only `FREE_KEYS` take new names in it, once Hydra closes the root."""
    from omegaconf import DictConfig, OmegaConf

    root = OmegaConf.structured(TrainConfig)
    assert isinstance(root, DictConfig)
    for key in FREE_KEYS:
        OmegaConf.set_struct(root[key], False)
    return root


def register_schemas() -> None:
    """Register the schemas with Hydra under the names that `conf/` uses; another call changes nothing."""
    from hydra.core.config_store import ConfigNode, ConfigStore

    store = ConfigStore.instance()
    nodes = [store.repo.get("schema.yaml")]
    nodes += [
        store.repo.get(group, {}).get(f"{name}_schema.yaml") for group, names in VARIANTS.items() for name in names
    ]
    if all(getattr(node, "provider", None) == _PROVIDER for node in nodes):  # registering again takes 0.05 s
        return

    def stored(name: str, schema: Any, group: str | None = None) -> ConfigNode:
        return ConfigNode(name=name, node=schema, group=group, package=None, provider=_PROVIDER)

    # Not by `store.store`, which makes and copies all of them.
    store.repo["schema.yaml"] = stored("schema.yaml", root_schema())
    for group, variants in VARIANTS.items():
        files = {f"{name}_schema.yaml": _LateSchema(kind) for name, kind in variants.items()}
        store.repo.setdefault(group, {}).update({name: stored(name, late, group) for name, late in files.items()})


class _LateSchema:
    """Schema of a group in Hydra's store, which OmegaConf makes when Hydra first copies it to use it.

    Most grids use one of each group, and to make all of them takes 0.06 s.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._made: DictConfig | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DictConfig:
        from omegaconf import OmegaConf

        if self._made is None:
            self._made = OmegaConf.structured(self._kind)
        return copy.deepcopy(self._made, memo)


def variant_of(group: str, values: Mapping[str, Any]) -> type:
    """Return the dataclass of `group` that has the field names of `values`.

    Of several, one with the same `_target_` comes first, then the one with the fewest other fields, then the one of
    that `name`. Frozen specs hold plain values only, so the field names tell the variants of a group apart. A spec that
    was frozen before a field existed lacks it; the field then has its default.

    Raises:
        KeyError: no variant has these fields.
    """
    fields = {name: {field.name for field in dataclasses.fields(node)} for name, node in VARIANTS[group].items()}
    fitting = [name for name, names in fields.items() if values.keys() <= names]
    if not fitting:
        raise KeyError(f"no {group} schema has the fields {sorted(values)}")
    target = values.get("_target_", "")

    def rank(name: str) -> tuple[bool, int, bool]:
        is_other = getattr(VARIANTS[group][name](), "_target_", "") != target
        return is_other, len(fields[name]), name != values.get("name")

    return VARIANTS[group][min(fitting, key=rank)]


ALL_KEYS = declared_keys(TrainConfig, variants=VARIANTS)
"""Every section and key, a section before its keys; a key of several variants of a group once for each variant."""
DECLARED: dict[str, Declared] = {declared.name: declared for declared in ALL_KEYS}
"""Keys and sections by name; a key of several variants has the declaration of the last one."""
KEYS: dict[str, Key] = {name: declared.key for name, declared in DECLARED.items()}
"""Metadata by name; variants of a group agree on the metadata of a key that they share."""


def declared_at(key: str) -> Declared | None:
    """Return the declared key or section that contains `key`: `optim.betas` for `optim.betas[1]`; None without one."""
    while key and key not in DECLARED:
        key = re.sub(r"(\[[^\[]*\]|(^|\.)[^.\[]*)$", "", key)
    return DECLARED.get(key)
