"""Packages that are no dependency of ours: which extra brings each, and what is said where one is missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from hpc_trainer.errors import ConfigError

EXTRAS = {
    "PIL": "images", "kornia": "images",
    "pyarrow": "tables",
    "tokenizers": "text",
    "datasets": "hub", "peft": "hub", "transformers": "hub",
    "onnx": "export", "onnxruntime": "export", "onnxscript": "export",
    "torchao": "quantize",
    "pynvml": "nvidia", "amdsmi": "amd",
    "prometheus_client": "prometheus",
}  # fmt: skip
"""Package, as it is imported -> the extra of pyproject.toml."""


def missing(what: str, *packages: str) -> str | None:
    """What to install for `what`; None if this Python has all of `packages`. Imports none: some take seconds."""
    absent = [each for each in packages if importlib.util.find_spec(each) is None]
    if not absent:
        return None
    extras = ",".join(dict.fromkeys(EXTRAS[each] for each in absent))
    return f"{what} needs the package {' and '.join(absent)}: pip install 'hpc_trainer[{extras}]'"


def check_installed(what: str, *packages: str) -> None:
    """Raises ConfigError: one is missing."""
    problem = missing(what, *packages)
    if problem is not None:
        raise ConfigError(problem)


def optional(module: str, what: str) -> Any:
    """A module of such a package, imported now: `plan` of other choices does not wait for it.

    Raises ConfigError: it is missing.
    """
    check_installed(what, module.partition(".")[0])
    return importlib.import_module(module)
