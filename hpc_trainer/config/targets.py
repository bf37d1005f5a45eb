"""`_target_` and `train.main`: names of classes and functions, used only if their prefix is on the allow-list.

A name in a configuration is code that will run. Hydra's own blocklist is no boundary (1.3.8 still opens files
for writing), so an allow-list decides: ours, torch, and what the person trusts by `--trust`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from hpc_trainer.errors import ConfigError

TRUSTED_PREFIXES = ("hpc_trainer.models", "hpc_trainer.datasets", "hpc_trainer.tasks", "torch.nn", "torch.optim")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")


def check_target(key: str, target: str, trusted: Sequence[str] = ()) -> str | None:
    """The problem with `target`, or None. Imports nothing.

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
        f"If you trust that package, add --trust {package}."
    )


def locate(key: str, target: str, trusted: Sequence[str] = ()) -> Any:
    """The class or function that `target` names.

    Raises:
        ConfigError: the name is not on the allow-list, or leads nowhere.
    """
    problem = check_target(key, target, trusted)
    if problem:
        raise ConfigError(problem)
    module_name, _, attribute = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}={target} leads nowhere: {error}.") from error
