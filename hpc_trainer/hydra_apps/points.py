"""Configurations of the points of an app's grid, as the app's own Hydra composes them, without reading all files again.

A point is composed in one of three ways, and each gives the same configuration as Hydra:

    parts      Hydra composes a section once for all choices of groups that make it from the same files, and applies
               each override of a value to it once. A point is assembled from these sections if its overrides do not
               overlap.
    loader     Hydra composes the point, with the content of files held in memory (`SweepLoader`).
    hydra      Hydra composes the point. This way is taken if another way failed, so that an error is Hydra's own, or
               if a result might differ from that of Hydra.

`tests/unit/hydra_apps/test_points.py` compares the three ways.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from omegaconf import Container, DictConfig, OmegaConf

from hpc_trainer.config.compose.hydra_parts import SweepLoader, UncertainError

Words = tuple[str, ...]
"""Overrides as the user typed them."""
HYDRA = "hydra"
"""Name of Hydra's own section."""
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", re.ASCII)
_DELETED = object()


class PointComposer:
    """Composer of the points of one sweep of an app."""

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        """Store Hydra's loader, and the configuration that it has composed for the whole sweep."""
        self._loader, self._base = loader, base
        self._fast: SweepLoader | None = None
        with contextlib.suppress(Exception):  # any error: Hydra raises it again later
            self._fast = SweepLoader(loader, base)
        self.counts: Counter[str] = Counter()
        """Number of points composed in each way: parts, loader, hydra."""

    def whole(self, points: Sequence[Sequence[str]]) -> list[DictConfig]:
        """Return the configuration of each point, including Hydra's own section. Errors are Hydra's own."""
        made: list[DictConfig | None] = [None] * len(points)
        if self._fast is not None:
            for places in _by_choices(points, self._fast).values():
                for place in places:
                    made[place] = self._loaded(points[place], self._fast)
        return [
            self._of_hydra(overrides) if config is None else config
            for config, overrides in zip(made, points, strict=True)
        ]

    def plain(self, points: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Return the configuration of each point as JSON values, with interpolations unresolved.

        Hydra's own section is left out. Points share equal sections, so change only copies. Errors are Hydra's own.
        """
        made: list[dict[str, Any] | None] = [None] * len(points)
        shared = _Shared()
        if self._fast is not None:
            sections = _Sections(self._fast, self._base, shared)
            for choices, places in _by_choices(points, self._fast).items():
                try:
                    of_choices = sections.of(choices)
                except Exception:  # any error: Hydra raises it again later
                    of_choices = None
                for place in places:
                    made[place] = self._plain(points[place], of_choices, self._fast, shared)
        return [
            shared.whole(_plain_config(self._of_hydra(overrides))) if config is None else config
            for config, overrides in zip(made, points, strict=True)
        ]

    def _plain(
        self, overrides: Sequence[str], sections: Mapping[Any, _Section] | None, fast: SweepLoader, shared: _Shared
    ) -> dict[str, Any] | None:
        """Return the configuration of a point by one of the two fast ways; None if Hydra has to compose it."""
        if sections is not None:
            try:
                made = _with_values(sections, overrides, fast)
            except Exception:  # any error: Hydra raises it again later
                made = None
            if made is not None:
                self.counts["parts"] += 1
                return made
        whole = self._loaded(overrides, fast)
        return None if whole is None else shared.whole(_plain_config(whole))

    def _loaded(self, overrides: Sequence[str], fast: SweepLoader) -> DictConfig | None:
        try:
            made = fast.load_sweep_config(self._base, list(overrides))
        except Exception:  # any error: Hydra raises it again later
            return None
        self.counts["loader"] += 1
        return made

    def _of_hydra(self, overrides: Sequence[str]) -> DictConfig:
        self.counts[HYDRA] += 1
        return self._loader.load_sweep_config(self._base, list(overrides))


def plain_configs(configs: Iterable[DictConfig]) -> list[dict[str, Any]]:
    """Return configurations in the form of `PointComposer.plain`."""
    shared = _Shared()
    return [shared.whole(_plain_config(config)) for config in configs]


def _by_choices(points: Sequence[Sequence[str]], loader: SweepLoader) -> dict[Words, list[int]]:
    """Return the indices of the points by choice of groups, so that memory holds the files of one choice at a time."""
    places_of: dict[Words, list[int]] = {}
    for place, overrides in enumerate(points):
        try:
            choices = tuple([word for word in overrides if loader.read(word)[1]])
        except Exception:  # noqa: S112  (any error: Hydra raises it again later)
            continue
        places_of.setdefault(choices, []).append(place)
    return places_of


class _Shared:
    """Sections of configurations as JSON values; equal sections are one object."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def section(self, name: Any, value: Any) -> dict[str, Any]:
        """Return a mapping from the section's name to its value, the same object for equal sections."""
        text = json.dumps({name: value}, default=str)
        if text not in self._known:
            self._known[text] = json.loads(text)
        return self._known[text]

    def whole(self, plain: Mapping[Any, Any]) -> dict[str, Any]:
        """Return a whole configuration made of shared sections."""
        return _joined(self.section(name, value) for name, value in plain.items())


def _joined(sections: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for section in sections:
        joined.update(section)
    return joined


class _Sections:
    """Sections by the files that make them; each is composed once, for the first choice of groups that needs it."""

    def __init__(self, loader: SweepLoader, base: DictConfig, shared: _Shared) -> None:
        self._loader, self._base, self._shared = loader, base, shared
        self._made: dict[object, _Section] = {}
        self._looking_elsewhere: set[object] = set()

    def of(self, choices: Words) -> dict[Any, _Section]:
        """Return the sections of a choice of groups, in order.

        Raises:
            UncertainError: the sections might differ from those of Hydra. Errors of Hydra are raised unchanged.
        """
        sources = self._loader.sources(choices)
        keys = self._keys(sources)
        if any(key not in self._made for key in keys.values()):
            config = self._loader.load_sweep_config(self._base, list(choices))
            _check_certain(config, list(keys), self._loader)
            for name, key in keys.items():
                if self._loader.looks_elsewhere(name):
                    self._looking_elsewhere.add(key)
            keys = self._keys(sources)
            self._keep(config, {name: key for name, key in keys.items() if key not in self._made})
        return {name: self._made[key] for name, key in keys.items()}

    def _keys(self, sources: Mapping[Any, tuple[object, ...]]) -> dict[Any, object]:
        """Return the memo key of each section: its files, or all files if it reads a value of another section."""
        every = tuple(sources.items())
        keys = {name: (name, files) for name, files in sources.items()}
        return {name: (name, every) if key in self._looking_elsewhere else key for name, key in keys.items()}

    def _keep(self, config: DictConfig, keys: Mapping[Any, object]) -> None:
        """Keep the new sections of this configuration, and release its other sections."""
        content = config.__dict__["_content"]
        config.__dict__["_content"] = {name: node for name, node in content.items() if name in keys}
        for name, key in keys.items():
            self._made[key] = _Section(name, config, self._shared)


class _Section:
    """A section of the app's configuration, and its forms after overrides of its values."""

    def __init__(self, name: Any, config: DictConfig, shared: _Shared) -> None:
        self._name, self._config, self._shared = name, config, shared
        node = config.__dict__["_content"].get(name)
        self._plain = {} if node is None or name == HYDRA else {name: _plain_child(config, name)}
        self.plain = self._changed_to(self._plain)
        """The section as JSON values; {} for Hydra's own section."""
        self._changes: dict[str, _Change | None] = {}
        self._changed: dict[Words, dict[str, Any] | None] = {}
        self._absent: dict[str, _Section] = {}

    def absent(self, name: str) -> _Section:
        """Return a section that does not exist yet, in a configuration that otherwise equals this section's."""
        if name not in self._absent:
            content = self._config.__dict__["_content"]
            self._config.__dict__["_content"] = {}
            try:
                self._absent[name] = _Section(name, copy.deepcopy(self._config), self._shared)
            finally:
                self._config.__dict__["_content"] = content
        return self._absent[name]

    def with_values(self, overrides: Words, loader: SweepLoader) -> dict[str, Any] | None:
        """Return the section after overrides of values, {} if it was deleted; None if the overrides may overlap.

        Errors are Hydra's own.
        """
        if overrides not in self._changed:
            self._changed[overrides] = self._make(overrides, loader)
        return self._changed[overrides]

    def _make(self, overrides: Words, loader: SweepLoader) -> dict[str, Any] | None:
        plain, paths = self._plain, set[Words]()
        for word in overrides:
            if word not in self._changes:
                self._changes[word] = _change_of(loader.read(word)[0], self._config, loader)
            change = self._changes[word]
            if change is None or any(_is_within(change.path, path) or _is_within(path, change.path) for path in paths):
                return None
            paths.add(change.path)
            plain = _replaced(plain, change.path, change.value)
        return self._changed_to(plain)

    def _changed_to(self, plain: Mapping[Any, Any]) -> dict[str, Any]:
        return self._shared.section(self._name, plain[self._name]) if self._name in plain else {}


def _with_values(
    sections: Mapping[Any, _Section], overrides: Sequence[str], loader: SweepLoader
) -> dict[str, Any] | None:
    """Assemble the configuration of a point from its sections; None if it is uncertain. Errors are Hydra's own."""
    by_section: dict[str, list[str]] = {}
    for word in overrides:
        override, is_choice = loader.read(word)
        if not is_choice:
            by_section.setdefault(override.key_or_group.partition(".")[0], []).append(word)
    if HYDRA in by_section:
        return None
    made: dict[Any, Mapping[str, Any]] = {name: section.plain for name, section in sections.items()}
    for name, of_section in by_section.items():
        section = sections.get(name) or sections[HYDRA].absent(name)
        changed = section.with_values(tuple(of_section), loader)
        if changed is None:
            return None
        made[name] = changed
    return _joined(made.values())


@dataclass(frozen=True, slots=True)
class _Change:
    """New value of the key that one override sets."""

    path: Words
    value: Any
    """The plain value; `_DELETED` if the key was deleted."""


def _is_within(path: Words, other: Words) -> bool:
    return path[: len(other)] == other


def _replaced(plain: Mapping[Any, Any], path: Words, value: Any) -> dict[Any, Any]:
    """Return a copy of a mapping with another value at a path."""
    replaced = dict(plain)
    if len(path) > 1:
        replaced[path[0]] = _replaced(plain[path[0]], path[1:], value)
    elif value is _DELETED:
        replaced.pop(path[0], None)
    else:
        replaced[path[0]] = value
    return replaced


def _change_of(override: Override, config: DictConfig, loader: SweepLoader) -> _Change | None:
    """Return the change that an override makes, by letting Hydra apply it and then undoing it.

    Returns:
        None if the override may change or read another key.

    Errors are Hydra's own.
    """
    place = None if override.is_sweep_override() else _place(override.key_or_group, config)
    if place is None:
        return None
    parent, path = place
    name, before = path[-1], parent.__dict__["_content"]
    node = before.get(name)
    if not _reads_nothing_else(override, node):
        return None
    parent.__dict__["_content"] = {**before} if node is None else {**before, name: copy.deepcopy(node)}
    try:
        loader.apply(override, config)
        after = parent.__dict__["_content"]
        value = _plain_child(parent, name) if name in after else _DELETED
    finally:
        parent.__dict__["_content"] = before
    return _Change(path, value)


def _place(key: str, config: DictConfig) -> tuple[DictConfig, Words] | None:
    """Return the section in which Hydra sets a key, and the path that it sets.

    If a section of the key does not exist, the path ends at that section, which Hydra creates.

    Returns:
        None if the path does not lead through plain sections only.
    """
    if not _KEY.fullmatch(key):
        return None
    names = key.split(".")
    parent: Any = config
    for depth, name in enumerate(names, start=1):
        content = parent.__dict__["_content"] if isinstance(parent, DictConfig) else None
        if not isinstance(content, dict) or parent._metadata.key_type not in (Any, str):
            return None
        if depth == len(names) or name not in content:
            return parent, tuple(names[:depth])
        parent = content[name]
    return None


def _reads_nothing_else(override: Override, node: Any) -> bool:
    """Return True if Hydra follows no interpolation when it applies an override to a node."""
    value = override.value()
    is_merged = isinstance(value, (dict, list))
    if is_merged and "${" in str(value):
        return False
    if node is None:
        return True
    if override.is_delete() and value is not None and isinstance(node, Container):
        return False
    is_section = isinstance(node, Container) and not isinstance(node._value(), str)
    if is_merged and is_section:
        return "${" not in str(OmegaConf.to_container(node, resolve=False))
    is_selected = is_merged or override.is_delete() or override.is_add()
    return is_section or not is_selected or "${" not in str(node._value())


def _plain_child(parent: DictConfig, name: Any) -> Any:
    """Return the value of a child, as `OmegaConf.to_container` of the parent gives it."""
    node: Any = parent._get_child(name)
    if isinstance(node, Container):
        return OmegaConf.to_container(node, resolve=False, enum_to_str=True)
    value = node._value()
    return value.name if isinstance(value, enum.Enum) else value


def _plain_config(config: DictConfig) -> dict[Any, Any]:
    plain: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    return {name: value for name, value in plain.items() if name != HYDRA}


def _check_certain(config: DictConfig, names: Sequence[Any], loader: SweepLoader) -> None:
    """Raise `UncertainError` if the sections of a configuration may depend on each other in an unknown way.

    Args:
        config: the configuration of a choice of groups.
        names: the configuration's keys in the order of the files.
        loader: the loader that has composed the configuration.
    """
    job: Any = OmegaConf.to_container(config.hydra.job, resolve=False)
    reads_values = "${" in str((job["env_copy"], job["config"]))  # Hydra looks them up after the values are applied
    values = [override for override in loader.fixed if not loader.read(str(override.input_line))[1]]
    is_hydras_plain = all(_place(override.key_or_group, config) is not None for override in values)
    content = config.__dict__["_content"]
    in_order = [name for name in names if name in content] == list(content)
    if reads_values or not is_hydras_plain or not in_order or _shares_nodes(config):
        raise UncertainError


def _shares_nodes(config: DictConfig) -> bool:
    """Return True if a node occurs in two places, so that a change of one would change the other."""
    seen: set[int] = set()
    rest: list[Any] = [config]
    while rest:
        node = rest.pop()
        if id(node) in seen:
            return True
        seen.add(id(node))
        content = node.__dict__.get("_content")
        if isinstance(content, dict):
            rest += content.values()
        elif isinstance(content, list):
            rest += content
    return False
