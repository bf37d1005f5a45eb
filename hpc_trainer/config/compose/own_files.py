"""Folders and files that a configuration is read from: the shipped ones, and the user's own.

    ~/.config/hpc_trainer/config.yaml      defaults of the account, as dotted keys; never in the repository
    hpc_trainer.yaml, or the table         the project file: options that a user would type with each command in a
    `[tool.hpc_trainer]` of                project (docs/decisions/0037-project-file.md)
    pyproject.toml
    folders of --config-dir                further groups and choices, as in the shipped `conf/` (`conf_dir`)
    folders of $HPC_TRAINER_CONFIG_DIR     the same, set once for all users of a site; they come last (`config_dirs_of`)

A configuration decides which code runs as the submitting user: `cluster.setup` is shell. Only the owner and root may
therefore write to these files. A folder that is named may belong to another user, such as a site's or a project's:
whoever names it trusts its owner.
"""

from __future__ import annotations

import contextlib
import grp
import importlib
import json
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.user_files import is_file, is_folder, read_given
from hpc_trainer.errors import ConfigError, UntrustedFileError, valid

YAML_NAME, TOML_NAME = "hpc_trainer.yaml", "pyproject.toml"
SITE_VARIABLE = "HPC_TRAINER_CONFIG_DIR"
_KEYS = ("config_dir", "trust", "runs_dir")
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
# A line that may begin our table. Only then the file is parsed: most pyproject.toml have no such line.
_OUR_TABLE = re.compile(r"^\s*\[?\s*tool\s*\.\s*[\"']?hpc_trainer\b|^\s*\[\s*tool\s*\]", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """Contents of the project file; empty without a file."""

    path: Path | None = None
    config_dirs: tuple[Path, ...] = ()
    trust: tuple[str, ...] = ()
    runs_dir: Path | None = None
    unused: str | None = None
    """Reason why an existing file is not used."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a user before a grid is submitted: the file decides whose code runs as that user."""
        if self.unused is not None:
            return (self.unused,)
        added = [f"--config-dir {folder}" for folder in self.config_dirs] + [
            f"--trust {prefix}" for prefix in self.trust
        ]
        return (f"the project file {self.path} adds {' '.join(added)}.",) if added else ()


def read_project() -> Project:
    """Read the project file of the current folder, or of the nearest folder above, up to the root of git or the home.

    Raises:
        ConfigError: the file cannot be read, or has a key or value that a project file may not have.
    """
    for folder in _folders():
        named = [path for path in (folder / YAML_NAME, folder / TOML_NAME) if _is_one(path)]
        if len(named) > 1:
            raise ConfigError(f"{named[0]} and {named[1]} are both project files. Keep one of them.")
        if named:
            reason = _untrusted(named[0])
            return _read(named[0]) if reason is None else Project(unused=f"{named[0]} is not used: {reason}.")
    return Project()


def own_defaults() -> dict[str, Any]:
    """Return the user's defaults, which come before the command line, as dotted key -> value.

    They are those of the user's own file, and the project's folder of runs, which takes precedence.

    Raises:
        ConfigError, UntrustedFileError: as `read_project` and `read_user_config`.
    """
    runs_dir = read_project().runs_dir
    return read_user_config() | ({"paths.runs_dir": str(runs_dir)} if runs_dir is not None else {})


def _folders() -> Iterator[Path]:
    try:
        folder = Path.cwd()
    except OSError:  # the folder was removed
        return
    home = Path("~").expanduser()
    while True:
        yield folder
        if (os.path.lexists(folder / ".git")) or folder in (home, folder.parent):
            return
        folder = folder.parent


def _is_one(path: Path) -> bool:
    if path.name == YAML_NAME:
        return is_file(path)
    try:
        return _OUR_TABLE.search(_given_text(path)) is not None and _names_us(path)
    except (OSError, UnicodeError):  # no file, or an unreadable one
        return False


def _names_us(path: Path) -> bool:
    """Return False for a pyproject.toml without our table. A file that cannot be parsed is reported when it is read."""
    try:
        return _table(path) is not None
    except ConfigError:
        return "hpc_trainer" in _given_text(path)


def _untrusted(path: Path) -> str | None:
    """Return why this file must not decide whose code runs as the user: another user wrote it, or may write to it."""
    for info in (path.lstat(), path.stat()):  # a link, and its target
        if info.st_uid not in (os.getuid(), 0):
            return (
                f"it belongs to user {info.st_uid}, but a project file decides which code runs as you. Create your own"
            )
    if others_may_write(path.stat()):
        return f"others can write to it, but it decides which code runs as you. Check it, then: chmod go-w {path}"
    for folder in {path.parent, path.resolve().parent}:
        if folder.stat().st_mode & stat.S_IWOTH:
            return f"everyone can write to its folder {folder}. Move it elsewhere, or: chmod o-w {folder}"
    return None


def _read(path: Path) -> Project:
    table = _table(path) or {}
    for key, value in table.items():
        if key not in _KEYS:
            raise ConfigError(f"{path}: {key}: no such key. {valid(str(key), _KEYS)}")
        texts = [value] if key == "runs_dir" else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            rule = 'a folder, as "runs"' if key == "runs_dir" else 'a list of texts, as ["my_lab"]'
            raise ConfigError(f"{path}: {key}={value!r} must be {rule}.")
    wrong = [package for package in table.get("trust", ()) if not _PACKAGE.match(package)]
    if wrong:
        raise ConfigError(f"{path}: trust: {wrong[0]!r} must be the name of a package, as my_lab.")
    runs_dir = table.get("runs_dir")
    return Project(
        path=path,
        config_dirs=tuple(_config_dir(path, folder) for folder in table.get("config_dir", ())),
        trust=tuple(table.get("trust", ())),
        runs_dir=None if runs_dir is None else _below(path, runs_dir),
    )


def _below(path: Path, folder: str) -> Path:
    """Return the folder that the file names, relative to the file's own folder."""
    return Path(os.path.normpath(path.parent / Path(folder).expanduser()))


def _config_dir(path: Path, named: str) -> Path:
    folder = _below(path, named)
    if not is_folder(folder):
        raise ConfigError(f"{path}: config_dir names {folder}, and there is no such folder.")
    # A team may write to the project's folder, and so replace this folder by another one.
    owner = folder.stat().st_uid
    if owner not in (os.getuid(), 0) and not Path(named).expanduser().is_absolute():
        raise UntrustedFileError(
            f"{path}: config_dir names {folder}, which belongs to user {owner}, and the setup lines of a configuration "
            f"run as you. Check it; to use it all the same, write its full path: {folder.resolve()}"
        )
    return folder


def _table(path: Path) -> dict[str, Any] | None:
    text = _text(path)
    loaded = _from_yaml(path, text) if path.name == YAML_NAME else _from_toml(path, text)
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path} must map keys to values: {', '.join(_KEYS)}.")
    return loaded


def _text(path: Path) -> str:
    try:
        return _given_text(path)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _given_text(path: Path) -> str:
    return read_given(path).decode()


def _from_yaml(path: Path, text: str) -> Any:
    import yaml  # imported late, as the parser below: most commands find no such file

    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error


def _from_toml(path: Path, text: str) -> Any:
    reader = _toml_reader()
    if reader is None:
        raise ConfigError(
            f"{path} has a table [tool.hpc_trainer], and Python 3.10 cannot read TOML by itself. Put the same keys "
            f"into {path.with_name(YAML_NAME)}, or: pip install tomli"
        )
    try:
        tool = reader.loads(text).get("tool")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    return tool.get("hpc_trainer") if isinstance(tool, dict) else None


def _toml_reader() -> Any:
    for name in ("tomllib", "tomli"):  # tomllib is part of Python from 3.11 on
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


def user_config_path() -> Path:
    """Return `$XDG_CONFIG_HOME/hpc_trainer/config.yaml`, by default under `~/.config`."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "hpc_trainer" / "config.yaml"


def read_user_config() -> dict[str, Any]:
    """Read the user's file as dotted key -> value; {} without a file.

    Raises:
        ConfigError: the file is not a mapping of dotted keys to values.
        UntrustedFileError: other users own the file or may write to it.
    """
    path = user_config_path()
    if not is_file(path):
        return {}
    check_own_file(path)
    import yaml  # late: most commands have no such file; SafeLoader builds plain values only

    try:
        loaded = yaml.safe_load(_given_text(path))
        flat = dict(_flatten(loaded, "")) if isinstance(loaded, dict) else {}
        json.dumps(list(flat.values()), default=str, skipkeys=True)  # raises for a list that holds itself
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{path} is nested too deeply, or a part of it contains itself. Write dotted keys."
        ) from error
    if loaded is None:  # empty, or comments only
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must map dotted keys to values, as `cluster.account: my_account`.")
    return flat


def _flatten(tree: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def others_may_write(info: os.stat_result) -> bool:
    """Return True unless only the owner may write to a file or folder.

    A group that the system made for one account alone (umask 002 on Debian, Red Hat) counts as that account.
    """
    if not info.st_mode & stat.S_IWGRP or info.st_mode & stat.S_IWOTH:
        return bool(info.st_mode & stat.S_IWOTH)
    try:
        account, group = pwd.getpwuid(info.st_uid), grp.getgrgid(info.st_gid)
    except KeyError:
        return True
    is_private = account.pw_gid == group.gr_gid and account.pw_name == group.gr_name
    # Accounts of many daemons are in root's group.
    return not is_private or info.st_uid == 0 or bool(set(group.gr_mem) - {account.pw_name})


def conf_dir() -> Path:
    """Return the shipped `conf/`: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[2]
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.parent / "conf"


def config_dirs_of(given: Iterable[Path] = (), project: Project | None = None) -> list[Path]:
    """Return a command's folders of configurations, the first first: given, of the project file, of the site.

    Args:
        given: folders of --config-dir.
        project: contents of the project file, if they are read already.

    Raises:
        ConfigError, UntrustedFileError: as `read_project`, or the site's variable names something else than folders.
    """
    return [*given, *(project or read_project()).config_dirs, *map(_site_dir, _site_texts())]


def is_of_site(folder: Path) -> bool:
    """Return True if the site's variable names this folder."""
    return folder in map(Path, _site_texts())


def _site_texts() -> list[str]:
    """Return the items of the variable; an empty one, as in `/site/conf:$HPC_TRAINER_CONFIG_DIR`, is left out."""
    return [text for text in os.environ.get(SITE_VARIABLE, "").split(":") if text.strip()]


def _site_dir(text: str) -> Path:
    if not Path(text).is_absolute():
        raise ConfigError(
            f"{SITE_VARIABLE} names {text}, which would be another folder wherever a command is given. Write full "
            "paths, separated by colons."
        )
    try:
        os.scandir(f"{text}/.").close()  # opened, not only looked at: the folder may be closed to this user
    except OSError as error:
        raise ConfigError(
            f"{SITE_VARIABLE} names {text}, which cannot be read as a folder: {error.strerror}. Correct the variable, "
            f"or: unset {SITE_VARIABLE}"
        ) from error
    return Path(text)


def check_config_dir(folder: Path) -> None:
    """Refuse a folder of configurations that others may write to, or with files of users other than its owner.

    Raises:
        UntrustedFileError: the folder is refused; the message names the path, its mode or owner, and the command that
            corrects it.
    """
    source = f"{SITE_VARIABLE}: {folder}" if is_of_site(folder) else f"--config-dir {folder}"
    real = folder.resolve()
    owners = {os.getuid(), 0, real.stat().st_uid}
    for path in (real, *_config_files(real)):
        info = path.stat()
        if others_may_write(info):
            raise UntrustedFileError(
                f"{source}: {path} has mode {stat.S_IMODE(info.st_mode):o}, so others can write to it, "
                f"and the setup lines of a configuration run as you. Check it, then: chmod -R go-w {real} (or use a "
                f"copy of your own: cp -r {real} my_conf)"
            )
        if info.st_uid not in owners:
            raise UntrustedFileError(
                f"{source}: {path} belongs to user {info.st_uid}, who is neither you, nor root, nor the "
                "owner of the folder, and the setup lines of a configuration run as you. Check it, then replace it by "
                "a copy of your own, or remove it."
            )
    for above in real.parents:
        info = above.stat()
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
            raise UntrustedFileError(
                f"{source}: {above} has mode {stat.S_IMODE(info.st_mode):o}, so everyone could put "
                f"another folder in its place. Use chmod o-w {above} (or chmod +t), or move it elsewhere."
            )
        if info.st_uid != os.getuid():
            return  # the site is responsible for folders further up


def _config_files(folder: Path) -> Iterator[Path]:
    """Yield the folders and YAML files that Hydra may read, through links too, without hidden folders such as .git."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if (real := os.path.realpath(parent)) in seen:  # a link that leads back
            folders.clear()
        seen.add(real)
        names = (*folders, *(name for name in files if name.endswith((".yaml", ".yml"))))
        yield from (path for path in map(Path(parent).joinpath, names) if path.exists())


def check_own_file(path: Path) -> None:
    """Refuse a user's file that others own or may write to.

    Raises:
        UntrustedFileError: the file is refused; the message names the mode or owner, and what to do.
    """
    info = path.stat()
    if info.st_uid not in (os.getuid(), 0):
        raise UntrustedFileError(
            f"{path} belongs to user {info.st_uid}. Only a file that belongs to you or to root is read."
        )
    if others_may_write(info):
        raise UntrustedFileError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):o}: others can write to it, and its setup lines run as you. "
            f"Check it, then: chmod go-w {path}"
        )
