"""The private parts of Hydra 1.3 that composing many points needs. No other file uses any.

Hydra's `compose` reads and merges every file anew for each point, together with its own `hydra` section: 70-150 ms.
Taken apart, the files are read once, the section that nobody sees is left out, and values are applied to a copy.
`tests/unit/config/compose/test_hydra_parts.py` fails when a release of Hydra changes what is used here.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import GroupDefault, InputDefault, ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.plugins.config_source import ConfigResult
from hydra.version import VersionBase
from omegaconf import AnyNode, DictConfig, OmegaConf, ValueNode

_HYDRAS_OWN = ("hydra", "_dummy_empty_config_.yaml")
"""What Hydra registers itself: the group of its own configuration, and an empty one."""
_OF_AN_APP = (GlobalHydra, HydraConfig, JobRuntime, VersionBase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What one choice of groups leads to: the files in the order of their merge, and the choice of each group."""

    entries: tuple[ResultDefault, ...]
    choices: Mapping[str, str | None]


class HydraParts:
    """Hydra's composition in steps, over the folders that the open `Composer` has given it.

    `root` is the primary configuration, `before` are overrides that name further folders (hydra.searchpath).
    """

    def __init__(self, root: str, before: Sequence[str] = ()) -> None:
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        self._root = root
        self._loader = loader
        with _quiet():
            _, self._repo = loader._parse_overrides_and_create_caching_repo(root, list(before))
        self._groups: dict[str, bool] = {}

    def is_group(self, key: str) -> bool:
        """Whether Hydra takes an override of `key` for a choice of a group."""
        if key not in self._groups:
            self._groups[key] = self._repo.group_exists(key)
        return self._groups[key]

    def defaults(self, choices: Sequence[Override]) -> Defaults:
        """The files that these group overrides choose. Raises what Hydra raises."""
        with _quiet(), _cheap_interpolation_map():
            made = hydra_defaults.create_defaults_list(
                repo=self._repo,
                config_name=self._root,
                overrides_list=list(choices),
                prepend_hydra=False,
                skip_missing=False,
            )
        assert not made.config_overrides
        return Defaults(entries=tuple(made.defaults), choices=dict(made.overrides.known_choices))

    def compose(self, entries: Sequence[ResultDefault]) -> DictConfig:
        """The files merged, before any override of a value. Raises what Hydra raises."""
        with _quiet():
            repo: Any = _Copies(self._repo, entries)
            composed = self._loader._compose_config_from_defaults_list(defaults=list(entries), repo=repo)
        OmegaConf.set_struct(composed, True)
        return composed

    def apply(self, overrides: Sequence[Override], composed: DictConfig) -> None:
        """Overrides of values, in order, on `composed` itself. Raises what Hydra raises."""
        with _quiet():
            ConfigLoaderImpl._apply_overrides_to_config(list(overrides), composed)

    def sections_touched(
        self, before: Sequence[ResultDefault], after: Sequence[ResultDefault]
    ) -> frozenset[str] | None:
        """Sections whose files differ; None where the difference may reach further.

        A section is merged from the files of its package and of the root package, in order. If the files of two
        choices differ in one package only, and the choice steers no other one, all other sections stay the same.
        """
        ours, theirs = {_identity(each): each for each in before}, {_identity(each): each for each in after}
        if len(ours) != len(before) or len(theirs) != len(after):
            return None
        if [each for each in ours if each in theirs] != [each for each in theirs if each in ours]:
            return None
        different = [each for key, each in {**ours, **theirs}.items() if (key in ours) != (key in theirs)]
        for each in different:
            if not section_of(each) or any(default.is_override() for default in self._defaults_of(each)):
                return None
        for each in {**ours, **theirs}.values():
            if any(_has_interpolation(default) for default in self._defaults_of(each)):
                return None
        return frozenset(section_of(each) for each in different)

    def _defaults_of(self, entry: ResultDefault) -> list[InputDefault]:
        """The defaults list of one file; [] without one."""
        assert entry.config_path is not None
        loaded = self._repo.load_config(entry.config_path)
        return list(loaded.defaults_list or []) if loaded is not None else []


def _has_interpolation(default: InputDefault) -> bool:
    """Whether a line of a defaults list depends on other choices."""
    value = default.value if isinstance(default, GroupDefault) else getattr(default, "path", "")
    return "${" in f"{value} {default.package or ''}"


def _identity(entry: ResultDefault) -> tuple[str | None, str | None, str | None, bool]:
    return entry.config_path, entry.package, entry.parent, entry.is_self


def section_of(entry: ResultDefault) -> str:
    """The section that a file is merged into; "" for the root package, which may reach any section."""
    return (entry.package or "").partition(".")[0]


def leaf_of(section: DictConfig, key: str) -> ValueNode | None:
    """The typed leaf under `key`, which converts values as an assignment would; None where there is no leaf."""
    node = section._get_node(key)
    return node if isinstance(node, ValueNode) and not isinstance(node, AnyNode) else None


class _Copies:
    """A repository whose files may be changed by the merge: those that it adopts are handed out as copies.

    A file with a package is embedded, and copied on that occasion by OmegaConf itself.
    """

    def __init__(self, repo: CachingConfigRepository, entries: Sequence[ResultDefault]) -> None:
        self._repo = repo
        self._adopted = {entry.config_path for entry in entries if not entry.package or entry.primary}
        self.get_schema_source = repo.get_schema_source

    def load_config(self, config_path: str) -> ConfigResult | None:
        loaded = self._repo.load_config(config_path)
        if loaded is None:
            return None
        loaded = copy.copy(loaded)
        if config_path in self._adopted:
            loaded.config = copy.deepcopy(loaded.config)
        return loaded


class _SharedStore:
    """The schemas, which copies of a repository share: what is loaded is a copy already."""

    def __init__(self, store: ConfigStore) -> None:
        self.load, self.get_type, self.list = store.load, store.get_type, store.list

    def __deepcopy__(self, memo: Any) -> _SharedStore:
        return self


def share_schemas() -> None:
    """Lets Hydra, as it is open now, copy its folders for each question without all schemas (15 of 16 ms)."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    assert isinstance(loader.repository, ConfigRepository)
    for source in loader.repository.sources:
        if source.scheme() == "structured":  # of a class that Hydra has imported by a way of its own
            store: ConfigStore = vars(source)["store"]
            vars(source)["store"] = _SharedStore(store)


@contextlib.contextmanager
def own_hydra() -> Iterator[None]:
    """Sets aside what an app in this process has told Hydra, its configurations too: the state is one for a process."""
    instances = Singleton._instances
    store = copy.copy(ConfigStore.instance())
    store.repo = {name: node for name, node in store.repo.items() if name in _HYDRAS_OWN}
    others = {kind: one for kind, one in instances.items() if kind not in _OF_AN_APP}
    Singleton._instances = {**others, ConfigStore: store}  # type: ignore[dict-item]  # Hydra names the metaclass
    try:
        yield
    finally:
        Singleton._instances = instances


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra's own deprecations are not the person's business
        yield


@contextlib.contextmanager
def _cheap_interpolation_map() -> Iterator[None]:
    """Leaves out the map of choices that Hydra builds for every file, where no default of the file needs it.

    It takes 13 of the 18 ms of a defaults list, and is read only to resolve `${...}` in defaults.
    """
    full: Callable[..., DictConfig] = hydra_defaults._create_interpolation_map

    def cheap(overrides: Any, defaults_list: list[InputDefault], self_added: bool) -> DictConfig:
        if any(not each.is_self() and each.is_interpolation() for each in defaults_list):
            return full(overrides, defaults_list, self_added)
        return DictConfig({})

    hydra_defaults._create_interpolation_map = cheap
    try:
        yield
    finally:
        hydra_defaults._create_interpolation_map = full
