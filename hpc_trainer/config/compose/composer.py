"""Composition of one point by Hydra: overrides in, `TrainConfig` out; errors name the nearest legal choice."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from hpc_trainer.config.compose.completion import choices_in
from hpc_trainer.config.compose.hydra_parts import share_schemas
from hpc_trainer.config.compose.overrides import override_value
from hpc_trainer.config.compose.own_files import (
    SITE_VARIABLE,
    check_config_dir,
    conf_dir,
    is_of_site,
    read_user_config,
    user_config_path,
)
from hpc_trainer.config.compose.wrong_overrides import (
    hydra_problem,
    key_meant,
    not_deleted,
    unreadable,
    unresolved,
    wrong_value,
)
from hpc_trainer.config.load import ROOT_KEYS, to_typed
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import DECLARED, FREE_KEYS, declared_at, register_schemas
from hpc_trainer.config.user_files import is_folder
from hpc_trainer.errors import ConfigError, did_you_mean, valid

ROOT = "train"
# The root where sbatch is on PATH: its default is cluster=slurm. An override `cluster=slurm` would win over the cluster
# that a hardware profile chooses.
_ROOT_OF_SLURM = "train_on_slurm"
# Groups of which Hydra would silently take the last of several names. In other groups, such as sweep and debug, files
# add up.
_ONE_OF = {name for name, is_section in ROOT_KEYS.items() if is_section} - {"sweep", *FREE_KEYS}
# Hydra's message about an override that it could not apply.
_MERGING = re.compile(r"Error merging override (.*)", re.DOTALL)

_IN_FILE = re.compile(r"In '([^']+)': \w+ raised while composing config:\n(.*)\n\s+full_key: (\S+)")
_IN_NO_PACKAGE = re.compile(r"In '([^']+)': Could not override '[^'@]+@([^']+)'")
_NO_KEY = re.compile(r"Key '.*' not in |Key '.*' is not in struct")
_ENDLESS = (
    "a configuration file includes itself through its `defaults:` list, directly or through other files, or is nested "
    "too deeply. Check the files of --config-dir that this command chooses."
)


def _is_copy(file: Path, other: Path) -> bool:
    """Return True if two files have the same contents; False if one cannot be read."""
    try:
        return file.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _is_names(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(item, str) for item in value)


class Composer:
    """Composer of points over the shipped `conf/` and, after it, further folders (`own_files.config_dirs_of`).

    Use it as a context manager: Hydra keeps one global state, which is entered and left here.
    """

    def __init__(self, config_dirs: Sequence[Path] = ()) -> None:
        for folder in config_dirs:
            if not is_folder(folder):
                raise ConfigError(f"--config-dir {folder}: there is no such folder.")
            check_config_dir(folder)
        self._config_dirs = [folder.resolve() for folder in config_dirs]
        self._of_site = dict.fromkeys(folder.resolve() for folder in config_dirs if is_of_site(folder))
        self._stack = contextlib.ExitStack()
        self._interpolated: dict[tuple[str, ...], bool] = {}
        self.root = _ROOT_OF_SLURM if shutil.which("sbatch") else ROOT

    def __enter__(self) -> Composer:
        register_schemas()
        if self.root != ROOT:
            _register_root_of_slurm()
        GlobalHydra.instance().clear()
        self._stack.enter_context(initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())))
        share_schemas()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Parse overrides by Hydra's grammar, sweeps included.

        Raises:
            ConfigError: an override does not follow the grammar, or lists choices of a group that takes one.
        """
        loader = GlobalHydra.instance().config_loader()
        try:
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        except (HydraException, ValueError) as error:  # ValueError: a number has more digits than Python reads
            raise ConfigError(unreadable(overrides, error)) from error
        keyless = next((override.input_line for override in parsed if not override.key_or_group), None)
        if keyless is not None:
            raise ConfigError(f"{keyless}: the key is missing. An override has the form KEY=VALUE, as optim.lr=1e-3.")
        for override in parsed:
            value: Any = override.value()
            if override.key_or_group in _ONE_OF and _is_names(value):
                one, names = override.key_or_group, ",".join(map(str, value))
                raise ConfigError(
                    f"{override.input_line} is a list, but a run has one {one}. Use {one}={names} for a run of each."
                )
        return parsed

    def choices(self, group: str) -> list[str]:
        """Return the choices of a group, sorted, including those of all folders."""
        return choices_in(group, [conf_dir(), *self._config_dirs])

    def compose_untyped(self, overrides: Sequence[str]) -> DictConfig:
        """Return one composed configuration, with types checked by the schemas and interpolations unresolved.

        Raises:
            ConfigError: an override is wrong; the message names the key, the rule, the value, and the nearest legal
                choice.
        """
        for override in self.parse(overrides):
            # A typed section takes no new key, yet Hydra's `+` would add it and only the dataclass would notice.
            problem = self._problem_of_key(override, overrides) if override.is_add() else None
            problem = problem or self._problem_of_choice(override)
            if problem:
                raise ConfigError(problem)
        try:
            return self._hydra_compose(overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise self.explain(error, overrides) from error
        except (UnicodeError, YAMLError) as error:
            raise ConfigError(f"a configuration file cannot be read as YAML: {error}") from error
        except RecursionError as error:
            raise ConfigError(_ENDLESS) from error
        except ValueError as error:  # from Hydra, about a defaults list that is not one
            raise ConfigError(f"a configuration file cannot be composed: {error}.") from error

    def compose(self, overrides: Sequence[str]) -> TrainConfig:
        """Compose one configuration as dataclasses, with interpolations resolved, by Hydra's own `compose` (0.1 s)."""
        composed = self.compose_untyped(overrides)
        try:
            return to_typed(composed)
        except (OmegaConfBaseException, AttributeError) as error:
            raise self.explain(error, overrides) from error

    def is_interpolated(self, section: str, overrides: Sequence[str]) -> bool:
        """Return True if a value of the composed configuration is taken from this section, such as ${params.lr}."""
        # Only a file, which a group chooses, or an interpolation can take a value from another section.
        telling = (section, *(line for line in overrides if "." not in line.partition("=")[0] or "${" in line))
        if telling not in self._interpolated:
            texts = _texts(OmegaConf.to_container(self.compose_untyped(overrides), resolve=False))
            self._interpolated[telling] = any("${" in text and section in text for text in texts)
        return self._interpolated[telling]

    def choices_made(self, overrides: Sequence[str]) -> dict[str, str | None]:
        """Return the choice of each group that these overrides make, the defaults of `conf/` included."""
        composed = self._hydra_compose(overrides, return_hydra_config=True)
        return {str(group): choice for group, choice in composed.hydra.runtime.choices.items()}

    def search_path(self) -> list[str]:
        """Return the override that names the further folders to Hydra; none without such folders."""
        folders = [f"file://{folder}" for folder in self._config_dirs]
        return [f"hydra.searchpath={override_value(folders)}"] if folders else []

    def _hydra_compose(self, overrides: Sequence[str], *, return_hydra_config: bool = False) -> DictConfig:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra's own deprecations do not concern the user
            given = [*self.search_path(), *overrides]
            return compose(self.root, overrides=given, return_hydra_config=return_hydra_config)

    def explain(self, error: Exception, overrides: Sequence[str]) -> ConfigError:
        if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
            group, _, name = error.missing_cfg_file.partition("/")
            own = site = ""
            if set(self._config_dirs) == set(self._of_site):
                own = f" To use a choice of your own, pass the folder that has {group}/{name}.yaml with --config-dir."
            if self._of_site:
                site = f" {SITE_VARIABLE}={':'.join(map(str, self._of_site))} has no {group}/{name}.yaml."
            return ConfigError(f"{group}={name}: no such choice. {_valid(name, self.choices(group))}{own}{site}")
        parsed = self.parse(overrides)
        for override in parsed:
            problem = self._problem_of_key(override, overrides)
            if problem:
                is_default = override.key_or_group in read_user_config()
                return ConfigError(f"{user_config_path()}: {problem}" if is_default else problem)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OmegaConfBaseException):
            cause = cause.__cause__
        merged = _MERGING.match(str(error))
        culprit = next((override for override in parsed if merged and override.input_line == merged[1]), None)
        if cause is None:
            return ConfigError(self._in_a_file(str(error), overrides) or hydra_problem(error, parsed))
        # OmegaConf's own message, less its trailing debug lines.
        text = str(cause.msg or cause).strip().splitlines()[0]
        key = cause.full_key or ""
        if isinstance(cause, InterpolationResolutionError):
            return ConfigError(unresolved(key, text, parsed))
        if culprit is not None and culprit.is_delete():
            return ConfigError(not_deleted(culprit))
        if culprit is not None and not key.startswith(culprit.key_or_group):  # a key inside an item of a list
            key = culprit.key_or_group
        if declared_at(key) is not None and _NO_KEY.match(text):
            problem = self._problem_of_key(self.parse([f"{key}=1"])[0], overrides)
        else:
            given = [other.input_line for other in parsed if declared_at(other.key_or_group) is declared_at(key)]
            problem = wrong_value(key, text, given[-1] if given else None)
        return ConfigError(problem or f"{key or 'configuration'}: {text}")

    def _in_a_file(self, said: str, overrides: Sequence[str]) -> str | None:
        """Return the problem with a file of a group, according to Hydra's message; None for any other message."""
        package = _IN_NO_PACKAGE.match(said)
        if package and package[2].startswith(f"{package[1].rpartition('/')[0]}."):
            return (
                f"{package[1]}.yaml overrides a choice below {package[2].partition('.')[0]}, which has no choices. "
                "Begin the file with the line `# @package _global_`."
            )
        wrong = _IN_FILE.match(said)
        if wrong is None:
            return None
        file, text, key = wrong.groups()
        problem = self._problem_of_key(self.parse([f"{key}=1"])[0], overrides) if _NO_KEY.match(text) else None
        return f"{file}.yaml: {problem or wrong_value(key, text, None)}"

    def _problem_of_key(self, override: Override, overrides: Sequence[str]) -> str | None:
        return self.problem_of_key(override, lambda: self._groups_only(overrides, self.choices_of_root()))

    def problem_of_key(self, override: Override, base: Callable[[], DictConfig]) -> str | None:
        """Return the problem with the key of `override`, or None; `base` composes the groups beside it."""
        key = override.key_or_group
        groups = self.choices_of_root()
        if override.package is not None or override.is_delete() or key in groups:
            return None
        if key.partition(".")[0] in {"hydra", *FREE_KEYS}:
            return None
        return self._problem_in(override, base(), groups)

    def _problem_of_choice(self, override: Override) -> str | None:
        """Return the problem with the value for a group, which must be a name or names; None if there is none.

        Hydra would end in a TypeError or ValueError.
        """
        key, value = override.key_or_group, override.value()
        if isinstance(value, dict) or key not in self.choices_of_root():
            return None
        names = value if isinstance(value, list) else [value]
        are_names = bool(names) and all(isinstance(name, str) and name.strip("?/ ") for name in names)
        if are_names or (override.is_delete() and value in (None, "")):
            return next(filter(None, (self._hidden_file(key, str(name)) for name in names)), None)
        return f"{override.input_line}: a choice of {key} must be a name. {_valid(str(value), self.choices(key))}"

    def _hidden_file(self, group: str, name: str) -> str | None:
        """Return the problem of a user's file that a shipped one with other content hides.

        Of the user's own folders the first that has the file counts: options before the project file.
        """
        first = conf_dir() / group / f"{name}.yaml"
        is_file = os.path.isfile  # Path.is_file raises OSError for a name of more than 255 bytes
        own = [folder / group / f"{name}.yaml" for folder in self._config_dirs] if is_file(first) else []
        other = next((file for file in own if is_file(file) and not _is_copy(file, first)), None)
        if other is None:
            return None
        renamed = other.with_stem(f"{other.stem}_own")
        fix = f"Rename the second: mv {other} {renamed}, then {group}={name}_own"
        if not os.access(other.parent, os.W_OK):  # of a site
            fix = f"Ask user {other.stat().st_uid}, who owns the second, to rename it."
        return f"{group}={name}: two files have this name, and the second would not be read: {first} and {other}. {fix}"

    def unread_twins(self, group: str, names: Iterable[str]) -> Iterator[str]:
        """Yield a note on each file of the user's own folders that an earlier one of the same name hides.

        Args:
            names: files of the group; not iterated over unless there are several folders.
        """
        for name in names if len(self._config_dirs) > 1 else ():
            files = [folder / group / f"{name}.yaml" for folder in self._config_dirs]
            own = list(filter(os.path.isfile, files))
            other = next((file for file in own[1:] if not _is_copy(file, own[0])), None)
            if other is not None:
                yield (
                    f"{group}={name}: {own[0]} is read, and {other}, which has other values, is not. "
                    "Rename one of them."
                )

    def _problem_in(self, override: Override, base: DictConfig, groups: Sequence[str]) -> str | None:
        key = override.key_or_group
        parent, _, name = key.rpartition(".")
        section = OmegaConf.select(base, parent) if parent else base
        if parent in DECLARED and DECLARED[parent].section is None and not isinstance(section, DictConfig):
            return f"{key}: {parent} is a single value, without keys below it. Use {parent}=VALUE."
        if not isinstance(section, DictConfig):
            return f"{key}: no such section {parent!r}. {valid(parent, [str(name) for name in base])}"
        names = {str(name) for name in section} | (set() if parent else set(groups))
        if name in names:
            return None
        if OmegaConf.get_type(section) is dict:  # free keys, as in model.kwargs and cluster.env
            return None if override.is_add() else f"{key}: add a new key of {parent} with +{key}=VALUE."
        where = f"in {parent} ({parent}={section.get('name')})" if parent in groups else f"in {parent or 'the root'}"
        return f"{key}: no such key {where}. {key_meant(key, names)}Valid: {', '.join(sorted(names))}."

    def choices_of_root(self) -> list[str]:
        """Return the groups of `conf/`, sorted."""
        loader = GlobalHydra.instance().config_loader()
        return sorted(group for group in loader.list_groups("") if group != "hydra")

    def _groups_only(self, overrides: Sequence[str], groups: Sequence[str]) -> DictConfig:
        chosen = [line for line in overrides if line.split("=", 1)[0].lstrip("+") in groups]
        try:
            return self._hydra_compose(chosen)
        except (HydraException, OmegaConfBaseException):
            return self._hydra_compose([])


def _valid(wrong: str, choices: Sequence[str]) -> str:
    """Return the legal choices for `wrong` as a message; of the choices in a subfolder, the nearest and the folder."""
    flat = [name for name in choices if "/" not in name]
    folders = dict.fromkeys(f"{name.partition('/')[0]}/" for name in choices if "/" in name)
    listed = f"; in folders: {', '.join(folders)}" if folders else ""
    return f"{did_you_mean(wrong, choices)}Valid: {', '.join(flat)}{listed}."


def _register_root_of_slurm() -> None:
    """Register with Hydra a root that equals `conf/train.yaml` except for its default, cluster=slurm."""
    text = (conf_dir() / f"{ROOT}.yaml").read_text(encoding="utf-8")
    root = OmegaConf.create(text)
    root.defaults = [{"cluster": "slurm"} if line == {"cluster": "local"} else line for line in root.defaults]
    ConfigStore.instance().store(name=_ROOT_OF_SLURM, node=root)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
