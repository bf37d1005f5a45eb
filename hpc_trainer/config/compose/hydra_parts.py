"""Private parts of Hydra 1.3 that the composition of many points needs. No other file uses any.

Hydra's `compose` reads and merges every file again for each point, together with its own `hydra` section: 70-150 ms.
Here the files are read once, the `hydra` section is left out, and values are applied to a copy.
`tests/unit/config/compose/test_hydra_parts.py` fails if a release of Hydra changes anything that is used here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal import config_loader_impl as hydra_loader
from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import GroupDefault, InputDefault, ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.plugins.config_source import ConfigResult
from hydra.version import VersionBase
from omegaconf import AnyNode, Container, DictConfig, Node, OmegaConf, ValueNode, flag_override

from hpc_trainer.config.compose.overrides import parse_common

_HYDRAS_OWN = ("hydra", "_dummy_empty_config_.yaml")
"""Entries that Hydra registers itself: the group of its own configuration, and an empty configuration."""
_OMEGACONFS_OWN, _ALWAYS_ALIKE = "oc.", "oc.env"
"""Prefix of the names of OmegaConf's own resolvers; the resolver that depends on nothing in a configuration."""
_OF_AN_APP = (GlobalHydra, HydraConfig, JobRuntime, VersionBase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Result of one choice of groups: the files in the order of their merge, and the choice of each group."""

    entries: tuple[ResultDefault, ...]
    choices: Mapping[str, str | None]


class HydraParts:
    """Hydra's composition in separate steps, over the folders of the open `Composer`.

    `root` is the primary configuration. `before` are overrides that name further folders (hydra.searchpath).
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
        """Return True if Hydra treats an override of `key` as the choice of a group."""
        if key not in self._groups:
            self._groups[key] = self._repo.group_exists(key)
        return self._groups[key]

    def defaults(self, choices: Sequence[Override]) -> Defaults:
        """Return the files that these group overrides choose. Raises what Hydra raises."""
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
        """Return the merged files, before any override of a value. Raises what Hydra raises."""
        with _quiet():
            repo: Any = _Copies(self._repo, entries)
            composed = self._loader._compose_config_from_defaults_list(defaults=list(entries), repo=repo)
        OmegaConf.set_struct(composed, True)
        return composed

    def apply(self, overrides: Sequence[Override], composed: DictConfig) -> None:
        """Apply overrides of values, in order, to `composed` in place. Raises what Hydra raises."""
        with _quiet():
            ConfigLoaderImpl._apply_overrides_to_config(list(overrides), composed)

    def sections_touched(
        self, before: Sequence[ResultDefault], after: Sequence[ResultDefault]
    ) -> frozenset[str] | None:
        """Return the sections whose files differ; None if the difference may affect other sections.

        A section is merged from the files of its package and of the root package, in order. If the files of two choices
        differ only in one package, and no other choice depends on the difference, all other sections stay the same.
        """
        ours, theirs = {_identity(entry): entry for entry in before}, {_identity(entry): entry for entry in after}
        if len(ours) != len(before) or len(theirs) != len(after):
            return None
        if [entry for entry in ours if entry in theirs] != [entry for entry in theirs if entry in ours]:
            return None
        different = [entry for key, entry in {**ours, **theirs}.items() if (key in ours) != (key in theirs)]
        for entry in different:
            if not section_of(entry) or any(default.is_override() for default in self._defaults_of(entry)):
                return None
        for entry in {**ours, **theirs}.values():
            if any(_has_interpolation(default) for default in self._defaults_of(entry)):
                return None
        return frozenset(section_of(entry) for entry in different)

    def _defaults_of(self, entry: ResultDefault) -> list[InputDefault]:
        """Return the defaults list of one file; [] if it has none."""
        assert entry.config_path is not None
        loaded = self._repo.load_config(entry.config_path)
        return list(loaded.defaults_list or []) if loaded is not None else []


def _has_interpolation(default: InputDefault) -> bool:
    """Return True if a line of a defaults list depends on other choices."""
    value = default.value if isinstance(default, GroupDefault) else getattr(default, "path", "")
    return "${" in f"{value} {default.package or ''}"


def _identity(entry: ResultDefault) -> tuple[str | None, str | None, str | None, bool]:
    return entry.config_path, entry.package, entry.parent, entry.is_self


def section_of(entry: ResultDefault) -> str:
    """Return the section that a file is merged into; "" for the root package, which may change any section."""
    return (entry.package or "").partition(".")[0]


def leaf_of(section: DictConfig, key: str) -> ValueNode | None:
    """Return the typed leaf under `key`, which converts values as an assignment does; None if there is no leaf."""
    node = section._get_node(key)
    return node if isinstance(node, ValueNode) and not isinstance(node, AnyNode) else None


class _Copies:
    """Repository that returns copies of the files that the merge adopts and may change.

    A file with a package is embedded, which copies it in OmegaConf itself.
    """

    def __init__(self, repo: CachingConfigRepository, entries: Sequence[ResultDefault]) -> None:
        self._repo = repo
        self._adopted = {entry.config_path for entry in entries if not entry.package or entry.primary}
        self._given: dict[str, ConfigResult] = {}
        self.get_schema_source = repo.get_schema_source

    def load_config(self, config_path: str) -> ConfigResult | None:
        loaded = self._given.get(config_path) or self._repo.load_config(config_path)
        if loaded is not None and config_path not in self._given:
            loaded = self._given[config_path] = copy.copy(loaded)
            if config_path in self._adopted:
                loaded.config = copy.deepcopy(loaded.config)
        return loaded


class UncertainError(Exception):
    """Error for overrides that may compose to another configuration each time."""


class SweepLoader(ConfigLoaderImpl):
    """Hydra's loader for the points of one sweep, which reads each file once and merges a choice of groups once.

    `load_sweep_config` is Hydra's own. Its calls for overrides, the defaults list and merged files are answered from
    memory, which keeps only the last choice of groups. Hydra applies the values to a copy. Errors of Hydra are raised
    unchanged; `UncertainError` is raised if the same overrides may give another result next time.
    """

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        """Adopt the loader of an application, and the configuration that it has composed for the sweep.

        Raises:
            UncertainError: the loader is not Hydra's own. Errors of Hydra are raised unchanged.
        """
        if type(loader) is not ConfigLoaderImpl:
            raise UncertainError
        # Not super().__init__, which opens the folders a second time.
        self.config_search_path, self.repository = loader.config_search_path, loader.repository
        fixed: Any = OmegaConf.to_container(base.hydra.overrides.hydra, resolve=False)
        self._config_name = base.hydra.job.config_name
        _, self._files = loader._parse_overrides_and_create_caching_repo(self._config_name, fixed)
        self._parser = OverridesParser.create()
        self._overrides: dict[str, tuple[Override, bool]] = {}
        self.fixed = tuple(self.read(text)[0] for text in fixed)
        """The overrides of Hydra's own configuration, which all points have."""
        self._touched: dict[tuple[object, ...], tuple[tuple[Any, ...], bool]] = {}
        self._key: tuple[str, ...] | None = None
        self._defaults: hydra_defaults.DefaultsList | None = None
        self._composed: DictConfig | None = None
        self._begun: dict[tuple[object, ...], tuple[DictConfig, _Lookups]] = {}
        self._lookups = _Lookups()

    def read(self, text: str) -> tuple[Override, bool]:
        """Return an override parsed by Hydra's grammar, and True if Hydra treats it as the choice of a group.

        Raises what Hydra raises.
        """
        if text not in self._overrides:
            override = parse_common(text) or self._parser.parse_overrides([text])[0]
            is_value = isinstance(override.value(), dict) or not self._files.group_exists(override.key_or_group)
            self._overrides[text] = override, not is_value
        return self._overrides[text]

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return the configuration of one point."""
        module: Any = hydra_loader
        original = module.create_defaults_list
        module.create_defaults_list = self._defaults_list
        try:
            return super().load_sweep_config(master_config, sweep_overrides)
        finally:
            module.create_defaults_list = original

    def apply(self, override: Override, composed: DictConfig) -> None:
        """Apply the override of a value to a configuration. Raises what Hydra raises."""
        self._apply_overrides_to_config([override], composed)

    def sources(self, choices: Sequence[str]) -> Mapping[Any, tuple[object, ...]]:
        """Return the root keys for these choices of groups, and the files that make each key.

        Keys and files are in the order of the merge. Raises what Hydra raises.
        """
        overrides = [*self.fixed, *(self.read(text)[0] for text in choices)]
        made = self._defaults_list(
            overrides_list=overrides, repo=self._files, config_name=self._config_name, prepend_hydra=True,
            skip_missing=False,
        )  # fmt: skip
        files_of: dict[Any, list[object]] = {}
        of_all: list[object] = []  # files that give the root a type or a flag count for all keys
        for entry in made.defaults:
            identity = _identity(entry)
            names, is_of_all = self._touched_by(entry)
            for name in names:
                files_of.setdefault(name, [*of_all])
            for name in files_of if is_of_all else names:
                files_of[name].append(identity)
            of_all += [identity] if is_of_all else []
        return {name: tuple(files) for name, files in files_of.items()}

    def looks_elsewhere(self, name: Any) -> bool:
        """Return True if the last merge looked outside of a root key for a value that makes that key."""
        return name in self._lookups.from_keys or None in self._lookups.from_keys

    def _touched_by(self, entry: ResultDefault) -> tuple[tuple[Any, ...], bool]:
        """Return the root keys of a file, and True if the file gives the root a type or a flag."""
        identity = _identity(entry)
        if identity not in self._touched:
            repo: Any = _Copies(self._files, [entry])
            config = self._load_single_config(entry, repo).config
            content = config._value()
            if not isinstance(config, DictConfig) or not isinstance(content, dict):
                raise UncertainError
            self._touched[identity] = tuple(content), config._is_typed() or bool(config._metadata.flags)
        return self._touched[identity]

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        return [self.read(text)[0] for text in overrides], self._files

    def _defaults_list(self, *, overrides_list: list[Override], **others: Any) -> hydra_defaults.DefaultsList:
        choices: list[Override] = []
        values: list[Override] = []
        for override in overrides_list:
            (choices if self.read(str(override.input_line))[1] else values).append(override)
        key = tuple(str(override.input_line) for override in choices)
        if key != self._key:
            self._key, self._defaults, self._composed = key, None, None
            lookups = _Lookups()
            with _quiet(), _cheap_interpolation_map(), lookups.watched():
                defaults = hydra_defaults.create_defaults_list(overrides_list=choices, **others)
            self._defaults = None if lookups.resolvers else defaults
        if self._defaults is None:
            raise UncertainError
        return dataclasses.replace(self._defaults, config_overrides=values)

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        if self._composed is None:
            self._composed = self._merged(defaults)
        if self._lookups.is_resolver_used:
            raise UncertainError
        return copy.deepcopy(self._composed)

    def _merged(self, defaults: list[ResultDefault]) -> DictConfig:
        """Return the merged files. Files of Hydra's own section come first and are merged once for all choices."""
        first = list(itertools.takewhile(lambda entry: section_of(entry) == "hydra", defaults))
        key = tuple(map(_identity, first))
        repo: Any = _Copies(self._files, defaults)
        if key not in self._begun:
            begun, lookups = OmegaConf.create(), _Lookups()
            with flag_override(begun, "no_deepcopy_set_nodes", True), lookups.watched():
                for entry in first:
                    begun.merge_with(self._load_single_config(entry, repo).config)
            self._begun[key] = begun, lookups
        begun, lookups = self._begun[key]
        self._beginning = ConfigResult(provider="", path="", config=copy.deepcopy(begun), header={})
        self._lookups = copy.deepcopy(lookups)
        with self._lookups.watched():
            return super()._compose_config_from_defaults_list([_BEGINNING, *defaults[len(first) :]], repo)

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        return self._beginning if default is _BEGINNING else super()._load_single_config(default, repo)


_BEGINNING = ResultDefault()
"""Placeholder in a list of files for the files that were merged before."""


class _Lookups:
    """Watcher of what OmegaConf looks up while files are merged, and of whether the result may depend on it.

    When a later file replaces an interpolation, OmegaConf resolves it, and uses the result if it is a section or null.
    An interpolation with other text around it therefore does not count.
    """

    def __init__(self) -> None:
        self.resolvers: list[str] = []
        """Called resolvers that may return another value next time."""
        self.is_resolver_used = False
        """True if the result depends on the value of a resolver in `resolvers`."""
        self.from_keys: set[Any] = set()
        """Root keys below which a value outside of the key was looked up; None stands for an unknown key."""
        self._is_counted = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch lookups during a `with` block."""
        dereference, look_up, evaluate = (
            Node._maybe_dereference_node, Container._resolve_node_interpolation, Container._evaluate_custom_resolver,
        )  # fmt: skip

        def dereferenced(node: Node, /, *args: Any, **kwargs: Any) -> Node | None:
            num_before, before = len(self.resolvers), self._is_counted
            text = node._value()
            is_alone = isinstance(text, str) and text.startswith("${") and text.endswith("}")
            self._is_counted = before or is_alone
            try:
                result = dereference(node, *args, **kwargs)
            finally:
                self._is_counted = before
            is_of_resolver = len(self.resolvers) > num_before
            if is_of_resolver and result is not None and (isinstance(result, Container) or result._value() is None):
                self.is_resolver_used = True
            return result

        def looked_up(node: Container, /, inter_key: str, *args: Any, **kwargs: Any) -> Node:
            key = _root_key(node)
            if self._is_counted and inter_key.partition(".")[0] != key:
                self.from_keys.add(key)
            return look_up(node, inter_key, *args, **kwargs)

        def evaluated(parent: Container, /, *, inter_type: str, **others: Any) -> Any:
            if inter_type != _ALWAYS_ALIKE:
                self.resolvers += [] if inter_type.startswith(_OMEGACONFS_OWN) else [inter_type]
                self.from_keys.update([_root_key(parent)] if self._is_counted else [])
            return evaluate(parent, inter_type=inter_type, **others)

        patched: Any = Node, Container
        patched[0]._maybe_dereference_node = dereferenced
        patched[1]._resolve_node_interpolation, patched[1]._evaluate_custom_resolver = looked_up, evaluated
        try:
            yield
        finally:
            patched[0]._maybe_dereference_node = dereference
            patched[1]._resolve_node_interpolation, patched[1]._evaluate_custom_resolver = look_up, evaluate


def _root_key(node: Node) -> Any:
    """Return the root key that contains a node; None for the root."""
    key, parent = None, node._get_parent()
    while parent is not None:
        key, node, parent = node._key(), parent, parent._get_parent()
    return key


class _SharedStore:
    """Schemas that copies of a repository share, because a loaded schema is a copy already."""

    def __init__(self, store: ConfigStore) -> None:
        self.load, self.get_type, self.list = store.load, store.get_type, store.list

    def __deepcopy__(self, memo: Any) -> _SharedStore:
        return self


def share_schemas() -> None:
    """Let the open Hydra copy its folders for each query without all schemas, which took 15 of 16 ms."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    assert isinstance(loader.repository, ConfigRepository)
    for source in loader.repository.sources:
        if source.scheme() == "structured":  # the class is not compared: Hydra imports it under another path
            store: ConfigStore = vars(source)["store"]
            vars(source)["store"] = _SharedStore(store)


@contextlib.contextmanager
def own_hydra() -> Iterator[None]:
    """Set aside the state of an app's Hydra during the context, because a process has one Hydra state."""
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
        warnings.simplefilter("ignore")  # Hydra's own deprecations do not concern the user
        yield


@contextlib.contextmanager
def _cheap_interpolation_map() -> Iterator[None]:
    """Skip the map of choices that Hydra builds for every file, if no default of the file needs it.

    The map takes 13 of the 18 ms of a defaults list, and is read only to resolve `${...}` in defaults.
    """
    full: Callable[..., DictConfig] = hydra_defaults._create_interpolation_map

    def cheap(overrides: Any, defaults_list: list[InputDefault], self_added: bool) -> DictConfig:
        if any(not default.is_self() and default.is_interpolation() for default in defaults_list):
            return full(overrides, defaults_list, self_added)
        return DictConfig({})

    hydra_defaults._create_interpolation_map = cheap
    try:
        yield
    finally:
        hydra_defaults._create_interpolation_map = full
