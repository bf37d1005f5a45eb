"""`_target_` and `train.main`: names of classes and functions, used only if their prefix is on the allow-list.

A name in a configuration is code that will run. Hydra's own blocklist is no boundary (1.3.8 still opens files for
writing), so an allow-list decides: ours, torch, and what the user trusts by `--trust`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from hpc_trainer.errors import ConfigError, did_you_mean

TRUSTED_PREFIXES = ("hpc_trainer.models", "hpc_trainer.datasets", "hpc_trainer.tasks", "torch.nn", "torch.optim")
TO_BE_FOUND = (
    "A package is found in three ways: it lies in the folder from which you submit; PYTHONPATH or `pip install -e` "
    "names its folder there (both are frozen with the run); or it is installed for the runs' own Python "
    "(cluster.python, or what cluster.setup activates)."
)
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")


def check_target(key: str, target: str, trusted: Sequence[str] = ()) -> str | None:
    """Return the problem with `target`, or None; import nothing.

    A prefix covers whole parts of a name: `my_lab` covers `my_lab.nets.Net`, not `my_laboratory.Net`.
    """
    if not _NAME.match(target):
        return f"{key}={target!r} must be a dotted name, as my_package.models.Net."
    prefixes = [*TRUSTED_PREFIXES, *trusted]
    if any(target == prefix or target.startswith(prefix + ".") for prefix in prefixes):
        return None
    package = target.split(".", 1)[0]
    return (
        f"{key}={target}: not on the list of what may be built ({', '.join(prefixes)}). "
        f"If you trust that package, add --trust {package}, or `trust: [{package}]` to the project file."
    )


def locate(key: str, target: str, trusted: Sequence[str] = ()) -> Any:
    """Return the class or function that `target` names.

    Raises:
        ConfigError: the name is not on the allow-list, or leads nowhere.
    """
    problem = check_target(key, target, trusted)
    if problem:
        raise ConfigError(problem)
    module_name, _, attribute = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(_not_imported(f"{key}={target}", module_name, error)) from error
    except ImportError as error:
        raise ConfigError(f"{key}={target}: {module_name} cannot be imported: {error}.") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        nearest = did_you_mean(attribute, [name for name in dir(module) if not name.startswith("_")])
        file = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{key}={target} leads nowhere: {error}. Looked in: {file}. {nearest}".rstrip()) from error


def _not_imported(what: str, module_name: str, error: ModuleNotFoundError) -> str:
    missing = error.name or ""
    if missing != module_name and not module_name.startswith(f"{missing}."):  # an import in the user's own code
        return (
            f"{what}: {module_name} is there and imports {missing}, which is not: {error}. The runs' Python is "
            f"{sys.executable}. {TO_BE_FOUND}"
        )
    parent = sys.modules.get(missing.rpartition(".")[0])
    looked = sys.path if parent is None else getattr(parent, "__path__", [getattr(parent, "__file__", None)])
    where = ", ".join(str(entry) or "the current folder" for entry in looked)
    return f"{what} leads nowhere: {error}. Looked in: {where}. {TO_BE_FOUND}"
