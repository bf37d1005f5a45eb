"""The user's own defaults, by account: `~/.config/hpc_trainer/config.yaml`. Never in the repository."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.own_files import check_own_file
from hpc_trainer.config.user_files import is_file
from hpc_trainer.errors import ConfigError


def user_config_path() -> Path:
    """Return `$XDG_CONFIG_HOME/hpc_trainer/config.yaml`, by default under `~/.config`."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "hpc_trainer" / "config.yaml"


def read_user_config() -> dict[str, Any]:
    """Read the user's file as dotted key -> value; {} without a file.

    Raises:
        ConfigError: the file is no mapping of dotted keys to values.
        UntrustedFileError: other users own the file or may write to it.
    """
    path = user_config_path()
    if not is_file(path):
        return {}
    check_own_file(path)
    import yaml  # late: most commands have no such file; SafeLoader builds plain values only

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        flat = dict(_flatten(loaded, "")) if isinstance(loaded, dict) else {}
        json.dumps(list(flat.values()), default=str, skipkeys=True)  # raises for a list that holds itself
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep, or a part of it holds itself. Write dotted keys.") from error
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
