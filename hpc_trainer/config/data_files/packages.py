"""Optional packages that read files of one kind."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from hpc_trainer.errors import ConfigError


def optional(module: str, extra: str, what: str) -> Any:
    """A module of a package that is no dependency of ours, imported now: `plan` of other data does not wait for it.

    Raises ConfigError: this Python has not the package, which reads `what` and which an extra of ours brings.
    """
    check_installed(module, extra, what)
    return importlib.import_module(module)


def check_installed(module: str, extra: str, what: str) -> None:
    """As `optional`, without the import: that takes seconds of some packages."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}: pip install 'hpc_trainer[{extra}]'")
