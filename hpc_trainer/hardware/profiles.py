"""Hardware profiles as their files have them: names, figures and sources, read without Hydra.

A list of a hundred profiles takes 0.2 s; Hydra would need 0.1 s for each.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpc_trainer.config.compose.completion import choices_in
from hpc_trainer.config.compose.own_files import conf_dir
from hpc_trainer.config.schema.cluster import ClusterConfig, HardwareConfig
from hpc_trainer.config.user_files import read_given
from hpc_trainer.errors import ConfigError, did_you_mean

_CLUSTER = re.compile(r"override /cluster(@\S+)?")
_BASE = re.compile(r"(?P<name>[^@]+)(@_here_)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """File of `hardware/`, or of `cluster/`."""

    name: str
    """Name as a user types it: `hardware=NAME`."""
    about: str
    """First line of the file, a comment."""
    path: Path
    values: Mapping[str, Any]
    """Values of the file and of the files that its defaults list names; no defaults of the schema."""
    cluster: str | None = None
    """Name of the cluster file that the profile chooses."""

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, which is the schema's default if no file sets it."""
        return self.values.get(key, _DEFAULTS.get(key))

    @property
    def sources(self) -> list[str]:
        """Return the sources of the figures, each with the figures that it has."""
        return split_sources(str(self["source"]))


_DEFAULTS = dataclasses.asdict(HardwareConfig())
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it takes a tenth of the time


def split_sources(text: str) -> list[str]:
    """Return the sources in a `source:` of a profile or a site: they are separated by `; `."""
    return [part for part in re.split(r";\s+", text.strip()) if part]


def read_profiles(config_dirs: Sequence[Path] = (), unread: list[str] | None = None) -> list[Profile]:
    """Return all hardware profiles, by name.

    Args:
        config_dirs: folders of configurations besides the shipped one.
        unread: gets a message about each profile that cannot be read, which is then left out.

    Raises:
        ConfigError: without `unread`, a profile cannot be read.
    """
    profiles = []
    for name in choices_in("hardware", [conf_dir(), *config_dirs]):
        try:
            profiles.append(read_profile(name, config_dirs))
        except ConfigError as error:  # noqa: PERF203 -- each file has its own error
            if unread is None:
                raise
            unread.append(" ".join(str(error).split()))
    return profiles


def read_profile(name: str, config_dirs: Sequence[Path] = ()) -> Profile:
    """Return one hardware profile.

    Raises:
        ConfigError: there is no such profile, or its file cannot be read.
    """
    return _read("hardware", name, (conf_dir(), *config_dirs))


def read_cluster(name: str, config_dirs: Sequence[Path] = ()) -> Profile:
    """Return one cluster file; `values` has its keys, `site` among them.

    Raises:
        ConfigError: as for `read_profile`.
    """
    return _read("cluster", name, (conf_dir(), *config_dirs))


def site_of(cluster: Profile) -> Mapping[str, Any]:
    """Return the site's facts of a cluster file, with the schema's defaults."""
    return {**_site_defaults(), **(cluster.values.get("site") or {})}


@functools.cache
def _site_defaults() -> Mapping[str, Any]:
    return dataclasses.asdict(ClusterConfig().site)


def _read(group: str, name: str, folders: Sequence[Path], seen: tuple[str, ...] = ()) -> Profile:
    path = next((path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None)
    if path is None:
        raise ConfigError(_unknown(group, name, choices_in(group, folders)))
    if name in seen:
        raise ConfigError(f"{path}: its defaults list leads back to itself.")
    text, content = _content(path)
    values: dict[str, Any] = {}
    cluster: str | None = None
    for key, value in _defaults_of(content):
        if _CLUSTER.fullmatch(key):
            cluster = value
        elif not value and key != "_self_" and (base := _BASE.fullmatch(key)):
            above = _read(group, base["name"], folders, (*seen, name))
            values, cluster = {**values, **above.values}, above.cluster
    values |= {key: value for key, value in content.items() if key != "defaults"}
    about = text.partition("\n")[0]
    return Profile(
        name=name, about=about.lstrip("# ") if about.startswith("#") else "", path=path, values=values, cluster=cluster
    )


def _content(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = read_given(path).decode()
        content = _Loader(text).get_single_data()
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must map keys to values, as `name: my_node`.")
    return text, content


def _defaults_of(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each line of a defaults list; the value of a bare name is ""."""
    for line in content.get("defaults") or ():
        yield from line.items() if isinstance(line, dict) else [(str(line), "")]


def _unknown(group: str, name: str, known: Sequence[str]) -> str:
    """Return the message about a name that no file has: the nearest names, and those with the same words."""
    words = [word for word in re.split(r"[/_\W]+", name.lower()) if len(word) > 1]
    alike = [other for other in known if any(word in other.lower() for word in words)][:_MOST_ALIKE]
    near = did_you_mean(name, known) or did_you_mean(name, {other.rpartition("/")[2] for other in known})
    listed = f"Alike: {', '.join(alike)}. " if alike else ""
    return f"{group}={name}: no such profile. {near}{listed}`hpc-trainer hardware list` shows all."


_MOST_ALIKE = 6
