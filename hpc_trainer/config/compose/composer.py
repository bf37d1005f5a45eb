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
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from hpc_trainer.config.compose.hydra_parts import share_schemas
from hpc_trainer.config.compose.key_meant import key_meant
from hpc_trainer.config.compose.own_files import check_config_dir
from hpc_trainer.config.compose.project import own_defaults
from hpc_trainer.config.compose.unreadable import unreadable
from hpc_trainer.config.compose.user import read_user_config, user_config_path
from hpc_trainer.config.compose.words import choices_in, conf_dir
from hpc_trainer.config.compose.wrong_value import wrong_value
from hpc_trainer.config.keys import DECLARED, declared_at
from hpc_trainer.config.load import ROOT_KEYS, to_typed
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import FREE_KEYS, register_schemas
from hpc_trainer.config.user_files import is_folder
from hpc_trainer.errors import ConfigError, did_you_mean, valid

ROOT = "train"
_EXECUTOR = "cluster.executor"
# Groups of which Hydra would silently take the last of several names. In other groups, such as sweep and debug, files
# add up.
_ONE_OF = {name for name, is_section in ROOT_KEYS.items() if is_section} - {"sweep", *FREE_KEYS}
# Hydra's message about an override that it could not apply.
_MERGING = re.compile(r"Error merging override (.*)", re.DOTALL)

_IN_FILE = re.compile(r"In '([^']+)': \w+ raised while composing config:\n(.*)\n\s+full_key: (\S+)")
_IN_NO_PACKAGE = re.compile(r"In '([^']+)': Could not override '[^'@]+@([^']+)'")
_NO_KEY = re.compile(r"Key '.*' not in |Key '.*' is not in struct")
_ENDLESS = (
    "a configuration file names itself in its `defaults:` list (through others, perhaps), or is nested too deep. "
    "Look at the files of --config-dir that this command chooses."
)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(item, str) for item in value)


class Composer:
    """Composer of points over the shipped `conf/` and, after it, the folders of `--config-dir`.

    Use it as a context manager: Hydra keeps one global state, which is entered and left here.
    """

    def __init__(self, config_dirs: Sequence[Path] = ()) -> None:
        for folder in config_dirs:
            if not is_folder(folder):
                raise ConfigError(f"--config-dir {folder} must be a folder; there is none.")
            check_config_dir(folder)
        self._config_dirs = [folder.resolve() for folder in config_dirs]
        self._stack = contextlib.ExitStack()
        self._interpolated: dict[tuple[str, ...], bool] = {}

    def __enter__(self) -> Composer:
        register_schemas()
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
            raise ConfigError(f"{keyless}: there is no key. An override reads KEY=VALUE, as optim.lr=1e-3.")
        for override in parsed:
            value: Any = override.value()
            if override.key_or_group in _ONE_OF and _is_names(value):
                one, names = override.key_or_group, ",".join(map(str, value))
                raise ConfigError(
                    f"{override.input_line} is a list, and a run has one {one}. Use {one}={names} for several."
                )
        return parsed

    def choices(self, group: str) -> list[str]:
        """Return the choices of a group, sorted, including those of `--config-dir`."""
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
        """Return True if a value of the composed configuration is taken from this section, as ${params.lr}."""
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
        """Return the override that names the folders of `--config-dir` to Hydra; none without such folders."""
        folders = [f"file://{folder}" for folder in self._config_dirs]
        return [f"hydra.searchpath={override_value(folders)}"] if folders else []

    def _hydra_compose(self, overrides: Sequence[str], *, return_hydra_config: bool = False) -> DictConfig:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra's own deprecations do not concern the user
            given = [*self.search_path(), *overrides]
            return compose(ROOT, overrides=given, return_hydra_config=return_hydra_config)

    def explain(self, error: Exception, overrides: Sequence[str]) -> ConfigError:
        if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
            group, _, name = error.missing_cfg_file.rpartition("/")
            own = "" if self._config_dirs else " Your own stand in conf/ of a --config-dir."
            return ConfigError(f"{group}={name}: no such choice. {valid(name, self.choices(group))}{own}")
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
            return ConfigError(self._in_a_file(str(error), overrides) or _of_hydra(error, parsed))
        # OmegaConf's own message, less its trailing debug lines.
        text = str(cause.msg or cause).strip().splitlines()[0]
        key = cause.full_key or ""
        if isinstance(cause, InterpolationResolutionError):
            return ConfigError(_unresolved(key, text, parsed))
        if culprit is not None and culprit.is_delete():
            return ConfigError(_not_deleted(culprit))
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
                f"{package[1]}.yaml overrides a choice below {package[2].partition('.')[0]}, where there is none. "
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
            return None
        return f"{override.input_line}: a choice of {key} is a name. {valid(str(value), self.choices(key))}"

    def _problem_in(self, override: Override, base: DictConfig, groups: Sequence[str]) -> str | None:
        key = override.key_or_group
        parent, _, name = key.rpartition(".")
        section = OmegaConf.select(base, parent) if parent else base
        if parent in DECLARED and DECLARED[parent].section is None and not isinstance(section, DictConfig):
            return f"{key}: {parent} has a value, and no keys below it. Use {parent}=VALUE."
        if not isinstance(section, DictConfig):
            return f"{key}: no such section {parent!r}. {valid(parent, [str(name) for name in base])}"
        names = {str(name) for name in section} | (set() if parent else set(groups))
        if name in names:
            return None
        if OmegaConf.get_type(section) is dict:  # free keys, as in model.kwargs and cluster.env
            return None if override.is_add() else f"{key}: a new key of {parent} is added with +{key}=VALUE."
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


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _of_hydra(error: Exception, parsed: Sequence[Override]) -> str:
    """Return Hydra's own message, or a better one."""
    for override in parsed:
        if override.is_delete() and "Could not delete" in str(error):
            return _not_deleted(override)
        key, way = override.key_or_group, f"Use {override.key_or_group}={override.value()}."
        if override.is_add() and str(error).startswith(
            (f"Multiple values for {key}.", f"{key} appears more than once")
        ):
            return f"{override.input_line}: {key} is chosen without +. {way}"
        if override.package is not None and "Could not override" in str(error):
            return f"{override.input_line}: nothing is chosen for @{override.package}. {way}"
    return str(error).strip()


def _not_deleted(override: Override) -> str:
    key = override.key_or_group
    if key in DECLARED:
        return f"{override.input_line}: a run keeps all of its keys. Set it, as {key}=VALUE."
    return f"{override.input_line}: there is no {key} to take away. {did_you_mean(key, DECLARED)}".rstrip()


def _unresolved(key: str, said: str, parsed: Sequence[Override]) -> str:
    """Return the message about an interpolation that leads nowhere."""
    given = [override.input_line for override in parsed if override.key_or_group == key]
    what = f"{given[-1] if given else key}: the interpolation cannot be resolved"
    nowhere = re.fullmatch(r"Interpolation key '(.*)' not found", said)
    if nowhere:
        hint = did_you_mean(nowhere[1], DECLARED) or "Write a key in full, as ${train.num_steps}."
        return f"{what}: there is no key {nowhere[1]}. {hint}".rstrip()
    variable = re.search(r"Environment variable '(.*)' not found", said)
    if variable:
        way = f"Set it, or give a default: ${{oc.env:{variable[1]},VALUE}}."
        return f"{what}: the environment has no {variable[1]}. {way}"
    said = re.sub(r"Value '.*' of type", "its value of type", said)
    return f"{what}: {said.removesuffix('.')}. Name one key with one value, as ${{train.num_steps}}."


def _named(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~").split("@")[0]


_SHORT = re.compile(r"init_from=(?!\s*\{)")


# Hydra would take the text in braces for a mapping.
_OF_RUN = re.compile(r"([+]*train\.command_dir=)(\{run\.[^'\"]*)")


def in_full(override: str) -> str:
    """Return `init_from=PATH` as `init_from.path=PATH`, and a `{run.dir}` in quotes; other overrides unchanged."""
    if (match := _OF_RUN.fullmatch(override)) is not None:
        return f"{match[1]}'{match[2]}'"
    return _SHORT.sub("init_from.path=", override, count=1) if _SHORT.match(override) else override


def default_overrides(given: Iterable[str]) -> Iterator[str]:
    """Yield the overrides before the command line: the user's own defaults, and `cluster=slurm` if sbatch is on PATH.

    Without sbatch it is `cluster=local`. A key that the command line gives too is left out.

    Raises:
        ConfigError: a file of defaults cannot be read.
    """
    named = {_named(override) for override in given}
    own = own_defaults()
    if "cluster" not in named and "cluster" not in own:
        yield f"cluster={'slurm' if shutil.which('sbatch') else 'local'}"
    for key, value in own.items():
        is_overruled = key == "paths.runs_dir" and "HPC_TRAINER_RUNS" in os.environ
        if key not in named and not is_overruled:
            yield f"{'++' if _is_of_a_mapping(key) else ''}{key}={override_value(value)}"


def _is_of_a_mapping(key: str) -> bool:
    """Return True for a name of the user's own, as `cluster.env.NCCL_DEBUG`: Hydra must be told that it may be new."""
    declared = declared_at(key)
    return declared is not None and declared.section is None and declared.name != key


def overrides_for_here(given: Sequence[str], verb: str) -> list[str]:
    """Return `given` with the overrides for a verb that starts its ranks on this machine.

    Everything that `cluster=` sets holds, except the executor. Without a `cluster=` on the command line or in the
    user's own file it is `cluster=local`, even if sbatch is on PATH.

    Raises:
        ConfigError: `given` names another executor; or the user's own file cannot be read.
    """
    for line in given:
        if line.lstrip("+").startswith(f"{_EXECUTOR}=") and line.partition("=")[2] != "local":
            raise ConfigError(f"{line}: {verb} runs on this machine. Leave it out, or give the runs to submit.")
    is_chosen = any(_named(line) == "cluster" for line in given) or "cluster" in read_user_config()
    return [*given, *([] if is_chosen else ["cluster=local"]), f"{_EXECUTOR}=local"]


def override_value(value: Any) -> str:
    """Return `value` in Hydra's override grammar, quoted so that it stays one value of its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, list):
        return "[" + ",".join(override_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_value(item)}" for key, item in value.items()) + "}"
    # The grammar halves only backslashes before a quote; Hydra's own writer takes care of that.
    return str(QuotedString(text=str(value), quote=Quote.single).with_quotes())
